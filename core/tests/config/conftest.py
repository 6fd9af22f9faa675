"""A real tiny dist with two training backends and a rollout, installed on sys.path for these tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from rlctl.plugins import PluginSet, load_plugins

LIGHT = """
    from rlctl.hookspecs import hookimpl
    from rlctl.records import *

    def spec(name, kind, model, cells, aliases=()):
        heads = tuple(ModelType) if name == "grid" else (ModelType.LANGUAGE_MODEL,)
        return BackendSpec(
            name=name, kind=kind, engine="cfgtoy_engine:Engine", config=f"cfgtoy_settings:{model}", api_version=(1, 0),
            model_types=heads, devices=(("cpu", None), ("cuda", None)),
            capabilities=tuple(
                Capability(axis=Axis(axis), support=Support(support), reason=reason, device=device, constraint=rule,
                           model_type=head)
                for axis, support, reason, device, *rest in cells for rule in [rest[0] if rest else None]
                for head in heads
            ),
            requirements=(), imports=("cfgtoy_engine",), install_hint="pip install cfgtoy", aliases=aliases,
            one_layout=name == "grid", lora=name == "plain",
        )

    @hookimpl
    def rlctl_backends():
        shard = [("dp_shard", "supported", "", "cpu"), ("dp_shard", "supported", "", "cuda")]
        return [
            spec("plain", BackendKind.TRAIN, "Plain", [
                *shard, ("tp", "unsupported", "no matrix is split; take grid", "cpu"),
                ("usp", "unsupported", "needs NCCL", "cpu"), ("usp", "supported", "", "cuda"),
            ], aliases=("plane",)),
            spec("grid", BackendKind.TRAIN, "Grid", [
                *shard, ("tp", "supported", "", "cpu", "heads_divisible_by_tp"), ("sp", "supported", "", "cpu", "sp_needs_tp"),
                ("tp", "supported", "", "cuda", "heads_divisible_by_tp"), ("sp", "supported", "", "cuda", "sp_needs_tp"),
            ]),
            spec("sampler", BackendKind.ROLLOUT, "Sampler", [
                ("tp", "conditional", "even heads", "cpu"), ("dp_replicate", "supported", "", "cpu"),
            ]),
            spec("broken", BackendKind.TRAIN, "Missing", []),
            spec("careless", BackendKind.TRAIN, "Careless", []),
        ]

    @hookimpl
    def rlctl_recipes():
        import pathlib
        return [RecipeSpec("toy-recipe", str(pathlib.Path(__file__).parent / "toy-recipe.yaml"), "a toy")]
"""

SETTINGS = """
    from typing import Literal
    from pydantic import Field, field_validator
    from rlctl.config.schema import Strict

    class Inner(Strict):
        depth: int = Field(default=1, ge=1)

    class Plain(Strict):
        param_offload: bool = False
        kernel: Literal["auto", "fast"] = "auto"
        inner: Inner = Inner()

    class Grid(Strict):
        pipeline_chunks: int = Field(default=1, ge=1)

    class Careless(Strict):
        table: str = "a"

        @field_validator("table")
        @classmethod
        def _known(cls, value):
            return {"a": "a"}[value]

    class Sampler(Strict):
        max_rows: int = Field(default=64, ge=1)
"""

RECIPE = """\
# A toy.
model: {path: org/tiny}
data: {task: {name: sort_digits}}
actor: {backend: plain}
rollout: {backend: sampler}
"""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginSet]:
    """The toy dist's plugins, and no others, whatever is installed."""
    site = tmp_path_factory.mktemp("cfgtoy-site")
    (site / "cfgtoy_light.py").write_text(dedent(LIGHT))
    (site / "cfgtoy_settings.py").write_text(dedent(SETTINGS))
    (site / "toy-recipe.yaml").write_text(RECIPE)
    info = site / "cfgtoy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cfgtoy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlctl.plugins]\ncfgtoy = cfgtoy_light\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv(
            "RLCTL_DISABLE_PLUGINS",
            "rlctl,rlctl-plugin-fsdp,rlctl-plugin-megatron,rlctl-plugin-mindspeed,rlctl-plugin-veomni,rlctl-plugin-vllm",
        )
        patch.delenv("RLCTL_DEVICE", raising=False)
        loaded = load_plugins()
        assert [e.name for e in loaded.entries if e.status == "ok"] == ["cfgtoy"], loaded.entries
        yield loaded
    for name in ("cfgtoy_light", "cfgtoy_settings"):
        sys.modules.pop(name, None)


@pytest.fixture
def run_file(tmp_path: Path) -> Callable[..., str]:
    """Write a run file next to a model directory and a data file; returns its path."""
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')

    def write(text: str | bytes, name: str = "run.yaml") -> str:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write
