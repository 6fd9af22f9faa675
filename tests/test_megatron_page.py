"""docs/megatron.md against the plugin."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlctl import catalogue
from rlctl.constraints import named
from rlctl.discovery import discover
from rlctl.records import BackendSpec, Support

pytestmark = pytest.mark.skipif(
    not any(c.dist == "rlctl-plugin-megatron" for c in discover()), reason="rlctl-plugin-megatron is not installed"
)

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
PLUGIN = ROOT / "plugins" / "megatron"


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}.*?\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def rows(title: str) -> list[list[str]]:
    """Cells of the table's body."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def spec() -> BackendSpec:
    return next(e.spec for e in catalogue.entries() if e.dist == "rlctl-plugin-megatron")


def test_every_axis_of_megatron_is_in_the_table_with_its_constraint() -> None:
    cells = {str(c.axis): c for c in spec().capabilities}
    usable = {axis for axis, c in cells.items() if c.support in (Support.SUPPORTED, Support.CONDITIONAL)}
    table = {row[0].strip("`"): row[-1] for row in rows("Axes")}
    assert set(table) == usable
    for axis, words in table.items():
        for _, rule in named(cells[axis].constraint):
            assert rule.words in words, axis
        assert bool(cells[axis].constraint) is (words.strip("| ") != ""), axis
    for axis in set(cells) - usable - {"dcp"}:
        assert f"`{axis}`" in section("Axes")


def test_every_setting_of_megatron_is_in_the_table_with_its_default() -> None:
    from rlctl_megatron.config import MegatronConfig

    table = {name: row[1] for row in rows("Settings") for name in re.findall(r"`(\w+)`", row[0])}
    defaults = MegatronConfig().model_dump()
    assert set(table) == set(defaults)
    for name, default in defaults.items():
        shown = (
            str(default).lower()
            if isinstance(default, bool)
            else f"{default:g}"
            if isinstance(default, float)
            else default
        )
        assert table[name] == f"`{shown}`", name


def test_every_stand_in_is_in_the_table_with_what_it_leaves_unproved() -> None:
    from rlctl_megatron.standins import STAND_INS

    assert {tuple(row) for row in rows("On a CPU")} == {(f"`{s.name}`", s.unproved) for s in STAND_INS}


def test_the_families_of_megatron_are_those_that_it_builds() -> None:
    from rlctl_megatron.families import TABLES

    sentence = re.search(r"Models by the `model_type` of their config:(.*?)with a", PAGE, re.DOTALL)
    assert sentence
    assert set(re.findall(r"`(\w+)`", sentence[1])) == set(TABLES)


def test_versions_are_those_of_the_plugin() -> None:
    from rlctl_megatron.versions import PROVED

    assert f"{PROVED} is what the tests run with" in " ".join(PAGE.split())
    [need] = [r for r in spec().requirements if r.startswith("megatron-core")]
    assert need.endswith("<0.20")
    assert "ends below 0.20" in " ".join(PAGE.split())


def test_axes_that_bind_sharded_moments_are_named() -> None:
    from rlctl_megatron import written

    *most, last = written._LAYOUT
    assert f"other sizes of {', '.join(most)} or {last}" in PAGE


def test_each_guard_has_its_test() -> None:
    named_tests = {n for row in rows("Errors that would be silent") for n in re.findall(r"`(test_\w+)`", row[-1])}
    sources = "\n".join(p.read_text(encoding="utf-8") for p in (PLUGIN / "tests").glob("test_*.py"))
    assert len(named_tests) >= 6
    assert [n for n in named_tests if f"def {n}(" not in sources] == []


def test_what_the_page_says_of_cuda_is_what_ships() -> None:
    folder = PLUGIN / "src" / "rlctl_megatron" / "evidence"
    records = [json.loads(p.read_text(encoding="utf-8")) for p in folder.glob("*.json")]
    proved = {tuple(sorted(r["axes"])) for r in records if r["device"] == "cuda"}
    exact = {
        (),
        ("dp_shard",),
        ("tp",),
        ("sp", "tp"),
        ("pp",),
        ("pp", "vpp"),
        ("cp",),
        ("dp_shard", "ep"),
        ("etp", "sp", "tp"),
    }
    assert proved == exact
    halves = {tuple(sorted(r["axes"])) for r in records if r["device"] == "cuda" and "bfloat16" in r["what"]}
    assert exact - halves == {("pp", "vpp"), ("etp", "sp", "tp")}
    engine = [r for r in records if "transformer-engine" in r["versions"]]
    assert {tuple(sorted(r["axes"])) for r in engine} == halves - {(), ("dp_shard",)}
    assert {r["versions"]["transformer-engine"] for r in engine} == {"2.20.2"}
    assert all("bfloat16" in r["what"] for r in engine)
    text = " ".join(PAGE.split())
    assert (
        "With the layers of Transformer Engine 2.20.2, in bfloat16, it passed for tp, tp with sp, pp, cp and ep "
        in text
    )
    assert "two ranks with dp_shard, tp, tp with sp, pp, pp with vpp, cp, ep and etp (with tp and sp)" in text
    assert "in bfloat16 all of these but vpp and etp" in text
