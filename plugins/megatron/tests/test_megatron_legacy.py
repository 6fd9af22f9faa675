"""megatron-core 0.12.1, which MindSpeed patches, on a CPU: the same numbers as plain transformers, and resumed runs.

Installs it (2 MB, alone) into a directory of its own, from the package index that pip is set up for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rlctl_megatron import plugin, versions

WHOLE = pytest.mark.skipif(not os.environ.get("RLCTL_TEST_ASCEND"), reason="a minute more: make test-ascend")
RANKS = Path(__file__).with_name("megatron_legacy_ranks.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What one process, and what two ranks found."""
    from megatron_tiny import run_ranks

    site, scratch = tmp_path_factory.mktemp("legacy"), tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site)]
    done = subprocess.run([*command, f"megatron-core=={versions.LEGACY}"], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"megatron-core {versions.LEGACY} cannot be had from pip's index: {done.stderr.strip()[-200:]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
        patch.delenv("WORLD_SIZE", raising=False)
        for world in (1, 2):
            run_ranks(RANKS.name, scratch, world=world)
    return {world: json.loads((scratch / f"found{world}.json").read_text()) for world in (1, 2)}


@WHOLE
def test_the_ranks_ran_the_version_that_mindspeed_patches(found) -> None:
    assert {run["version"] for run in found.values()} == {versions.LEGACY}


@WHOLE
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_on_the_older_version_equals_plain_transformers(found, world) -> None:
    steps = found[world]["steps"]
    assert len(steps) == {1: 3, 2: 8}[world]
    assert {name: off for name, off in steps.items() if not off < 1e-5} == {}


@WHOLE
def test_a_run_on_the_older_version_is_resumed_exactly(found) -> None:
    assert found[2]["resumed"] == {"whole moments, tp2": 0.0, "whole moments, pp2 vpp2": 0.0, "sharded moments": 0.0}


@pytest.mark.parametrize(
    ("version", "taken"),
    [
        ("0.12.1", True),
        ("0.12.2", True),
        ("0.12.0", False),
        ("0.13.0", False),
        ("0.15.3", False),
        ("0.16.0", False),
        ("0.16.1", True),
        ("0.17.0", True),
        ("0.20.0", False),
    ],
)
def test_versions_between_the_two_are_not_taken(version: str, taken: bool) -> None:
    (need,) = [r for r in plugin.REQUIREMENTS if r.startswith("megatron-core")]
    assert SpecifierSet(need.removeprefix("megatron-core")).contains(version) is taken
    assert versions.is_legacy(Version(version)) is (Version(version) < Version("0.13"))
