"""What this backend takes from megatron-core is there: names, fields and the few inner things. Another version is judged by it."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest
from packaging.version import Version

import rlctl_megatron
from rlctl_megatron import versions
from rlctl_megatron.standins import prepare

prepare("cpu")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

SOURCES = sorted(Path(rlctl_megatron.__file__).parent.glob("*.py"))


def imported() -> set[tuple[str, str]]:
    """(module, name) of everything that the package imports from megatron-core."""
    found: set[tuple[str, str]] = set()
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
                found |= {(str(node.module), alias.name) for alias in node.names}
    return found


def test_every_imported_name_exists() -> None:
    names = imported()
    assert len(names) > 20
    for module, name in names:
        holder = importlib.import_module(module)
        assert hasattr(holder, name) or importlib.util.find_spec(f"{module}.{name}"), f"{module}.{name}"


def keywords(file: str, *callees: str) -> set[str]:
    """Names of the fields that a source passes on: string keys of its dictionaries and keywords of the calls."""
    tree = ast.parse((Path(rlctl_megatron.__file__).parent / file).read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in callees:
            found |= {k.arg for k in node.keywords if k.arg}
    return found


def test_every_field_that_is_set_exists() -> None:
    optimizer = {f.name for f in dataclasses.fields(OptimizerConfig)}
    set_here = keywords("optim.py", "OptimizerConfig")
    assert len(set_here) > 8
    assert set_here <= optimizer
    buffers = {f.name for f in dataclasses.fields(DistributedDataParallelConfig)}
    assert keywords("build.py", "DistributedDataParallelConfig") <= buffers
    # TransformerConfig is given a dictionary; an unknown key is a TypeError, which every built engine would raise.
    assert {"calculate_per_token_loss", "perform_initialization", "variable_seq_lengths"} <= {
        f.name for f in dataclasses.fields(TransformerConfig)
    }


def test_inner_things_that_are_used_exist() -> None:
    assert hasattr(parallel_state, "_global_process_group_list")
    assert "param" in inspect.signature(DistributedOptimizer._get_model_param_range_map).parameters
    wanted = {"expert_tensor_parallel_size", "order", "create_gloo_process_groups", "distributed_timeout_minutes"}
    assert wanted <= set(inspect.signature(parallel_state.initialize_model_parallel).parameters)


@pytest.mark.parametrize(("version", "proved"), [("0.16.1", True), ("0.16.1.post1", True), ("0.17.0", False)])
def test_only_the_tested_version_is_called_proved(version: str, proved: bool) -> None:
    assert versions.is_proved(Version(version)) is proved


def test_the_installed_version_is_the_proved_one() -> None:
    found = versions.installed()
    assert found is not None
    assert versions.is_proved(found)
