"""docs/veomni.md against the plugin."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlctl.constraints import named
from rlctl.records import Support
from rlctl_veomni import families, plugin, standins, versions
from rlctl_veomni.config import VeOmniConfig

DIST = Path(__file__).parents[1]
FILE = DIST.parents[1] / "docs" / "veomni.md"
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


def test_every_axis_of_veomni_is_in_the_table_with_its_constraint() -> None:
    cells = {str(c.axis): c for c in SPEC.capabilities}
    usable = {axis for axis, c in cells.items() if c.support in (Support.SUPPORTED, Support.CONDITIONAL)}
    table = {row[0].strip("`"): row[-1] for row in rows("Axes")}
    assert set(table) == usable
    for axis, words in table.items():
        for _, rule in named(cells[axis].constraint):
            assert rule.words in words, axis
        assert bool(cells[axis].constraint) is (words.strip("| ") != ""), axis
    for axis in set(cells) - usable - {"dcp"}:
        assert f"`{axis}`" in section("Axes")


def test_every_setting_of_veomni_is_in_the_table_with_its_default() -> None:
    table = {name: row[1] for row in rows("Settings") for name in re.findall(r"`(\w+)`", row[0])}
    defaults = VeOmniConfig().model_dump()
    assert set(table) == set(defaults)
    for name, default in defaults.items():
        shown = str(default).lower() if isinstance(default, bool) else default
        assert table[name] == (f"`{shown:g}`" if isinstance(shown, float) else f"`{shown}`"), name


def test_every_stand_in_of_veomni_is_in_the_table_with_what_it_leaves_unproved() -> None:
    assert {tuple(row) for row in rows("On a CPU")} == {(f"`{s.name}`", s.unproved) for s in standins.STAND_INS}


def test_families_and_versions_are_those_of_the_plugin() -> None:
    sentence = re.search(r"Models by the `model_type` of their config:(.*?)with a", PAGE, re.DOTALL)
    assert sentence
    assert set(re.findall(r"`(\w+)`", sentence[1])) == set(families.FAMILIES)
    assert f"VeOmni {versions.PROVED}, the version that the tests run with" in " ".join(PAGE.split())
    assert "transformers>=5.9,<5.10" in SPEC.requirements


def test_each_guard_of_veomni_has_its_test() -> None:
    named_tests = {n for row in rows("Errors that would be silent") for n in re.findall(r"`(test_\w+)`", row[-1])}
    sources = "\n".join(p.read_text(encoding="utf-8") for p in (DIST / "tests").glob("test_*.py"))
    assert len(named_tests) >= 8
    assert [n for n in named_tests if f"def {n}(" not in sources] == []


def test_every_proof_that_ships_names_what_the_page_says() -> None:
    records = [json.loads(p.read_text(encoding="utf-8")) for p in (DIST / "src/rlctl_veomni/evidence").glob("*.json")]
    proved = {(r["device"], r["model_family"]) for r in records}
    assert {family for device, family in proved if device == "cpu"} == set(families.FAMILIES)
    on_gpus = [r for r in records if r["device"] == "cuda"]
    by_dtype = {
        d: {tuple(sorted(r["axes"])) for r in on_gpus if r["extra"]["dtype"] == d} for d in ("float32", "bfloat16")
    }
    plain = {(), ("dp_shard",), ("dp_replicate",), ("usp",)}
    assert by_dtype == {"float32": plain, "bfloat16": plain | {("dp_shard", "ep"), ("ep", "usp")}}
    text = " ".join(PAGE.split())
    assert "in float32 one process, and over NCCL two ranks with dp_shard, dp_replicate and usp" in text
    assert "in bfloat16 all of these, and ep with dp_shard and with usp" in text
