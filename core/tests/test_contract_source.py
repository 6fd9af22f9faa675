"""What the source of core may say and import: no backend's name, no torch in the light contract, thin dependencies."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rlctl

SOURCE = Path(rlctl.__file__).parent
BACKENDS = re.compile(
    r"\b(?<!rlctl-plugin-)(fsdp2?|hf(?!:)|megatron\w*|veomni|vllm|sglang|mindspeed\w*|torchtitan|automodel|fsdp_turbo|tensorrt\w*)\b",
    re.I,
)
# Data about the field, the tables that translate other projects' keys, and the two defaults of the schema: the only
# places where a backend may be named. (The name of a distribution of ours, rlctl-plugin-NAME, is none.)
DATA_MODULES = re.compile(r"(catalogue|capabilities)\w*(/\w+)?\.py|config/(foreign|migrate\w*)\.py")
ALLOWED = {
    "config/schema_roles.py": {'"fsdp2"'},
    "config/schema_rollout.py": {'"hf"'},
    # Which dist brings an importable module: a table of libraries, whoever uses them.
    "remedy.py": {'"megatron"', '"megatron-core"'},
    # torch's own module of that name, which several backends shard with.
    "parts/fsdp.py": {"fsdp"},
}


def strings_and_names(path: Path) -> list[tuple[int, str]]:
    """(line, text) of the names and string literals of a module, without comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        # A string that stands alone is documentation, of a module, a class, a function or an attribute.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found = []
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.STRING, tokenize.NAME) and token.start[0] not in documented:
                found.append((token.start[0], token.string))
    return found


def named_backends(path: Path) -> list[str]:
    place = path.relative_to(SOURCE).as_posix()
    allowed = ALLOWED.get(place, set())
    return [
        f"{place}:{line}: {text}"
        for line, text in strings_and_names(path)
        # A sentence of the schema may name a technique (FSDP) or its inventor.
        if BACKENDS.search(text) and text not in allowed and not (place.startswith("config/schema_") and " " in text)
    ]


def test_core_names_no_backend() -> None:
    modules = [p for p in SOURCE.rglob("*.py") if not DATA_MODULES.fullmatch(p.relative_to(SOURCE).as_posix())]
    assert len(modules) > 15
    assert [line for p in modules for line in named_backends(p)] == []


def test_only_engines_use_what_engines_are_built_of() -> None:
    """It needs torch and transformers, which core does not depend on."""
    others = [p for p in SOURCE.rglob("*.py") if p.parent != SOURCE / "parts"]
    assert [str(p) for p in others if "rlctl.parts" in p.read_text(encoding="utf-8")] == []
    assert len(list((SOURCE / "parts").glob("*.py"))) > 8


def test_the_search_for_names_finds_them(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text('"""Docs may say vllm."""\n# and comments megatron\nif name == "fsdp2":\n    import vllm\n')
    found = [(line, text) for line, text in strings_and_names(source) if BACKENDS.search(text)]
    assert found == [(3, '"fsdp2"'), (4, "vllm")]


def test_core_depends_on_four_packages() -> None:
    requirements = [Requirement(r) for r in importlib.metadata.requires("rlctl-core") or []]
    hard = {r.name.lower() for r in requirements if r.marker is None or "extra" not in str(r.marker)}
    assert hard == {"pluggy", "pydantic", "pyyaml", "packaging"}


CONTRACT = ("hookspecs", "records", "topology", "generation", "errors", "plugins", "registry", "capabilities")
CONTRACT_WITH_TENSORS = ("engine", "engine_records", "batch", "microbatch", "logits", "normalizer")
ABOVE = ("rlctl.trainers", "rlctl.data", "rlctl.tracking", "rlctl.roles", "rlctl.algorithms")


def modules_after(*names: str) -> set[str]:
    code = f"import sys\nfor n in {names!r}:\n    __import__('rlctl.' + n)\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def light_modules() -> set[str]:
    return modules_after(*CONTRACT)


@pytest.mark.parametrize("heavy", ["torch", "transformers", "numpy", "click", "rich", "safetensors"])
def test_the_light_contract_imports_nothing_heavy(light_modules: set[str], heavy: str) -> None:
    assert "rlctl.registry" in light_modules
    assert heavy not in light_modules


def test_the_contract_imports_nothing_of_what_stands_on_it(light_modules: set[str]) -> None:
    loaded = light_modules | modules_after(*CONTRACT_WITH_TENSORS)
    assert "rlctl.engine" in loaded
    assert [m for m in sorted(loaded) if m.startswith(ABOVE)] == []
    assert "transformers" not in loaded


def test_the_pure_parts_need_no_torch() -> None:
    assert "torch" not in modules_after("microbatch", "schedule", "normalizer_modes", "config.schema")


PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing", "joblib"}
PICKLING_CALLS = {"save", "load", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}


def test_what_travels_between_processes_is_never_pickled() -> None:
    """Neither between a controller and its ranks, which may run other packages, nor between pools, nor from a probe's child."""
    files = [
        SOURCE / "sync.py",
        *(f for name in ("runtime", "interpreters", "probing") for f in (SOURCE / name).rglob("*.py")),
    ]
    assert len(files) > 40
    found: list[str] = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Attribute) and node.attr in PICKLING_CALLS and isinstance(node.value, ast.Name):
                names = ["pickle"] if node.value.id in ("torch", "dist") else []
            found += [f"{file.name}:{node.lineno}" for name in names if name.partition(".")[0] in PICKLES]
    assert found == []
