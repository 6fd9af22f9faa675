"""The matrix of the field, cell by cell, and the catalogue's own rules."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlctl import catalogue, constraints
from rlctl.catalogue import PluginState
from rlctl.codec import spec_from_json, spec_to_json
from rlctl.records import Axis, BackendKind, ModelType, Support

GOLDEN = Path(__file__).parent / "golden" / "field_matrix.txt"
YES, IF, NO, NA = Support.SUPPORTED, Support.CONDITIONAL, Support.UNSUPPORTED, Support.NOT_APPLICABLE


def lines() -> list[str]:
    """One line a cell of every backend whose plugin is not released: what is claimed of it, and why.

    Released plugins write their own records; a test across dists keeps the catalogue equal to them.
    """
    out: list[str] = []
    for entry in (e for e in catalogue.entries() if e.state is not PluginState.RELEASED):
        for cell in entry.spec.capabilities:
            place = cell.device if cell.vendor is None else f"{cell.device}/{cell.vendor}"
            rule = f" [{cell.constraint}]" if cell.constraint else ""
            key = f"{entry.spec.name} {entry.state} {cell.model_type} {place} {cell.axis}"
            out.append(f"{key}: {cell.support}{rule}: {cell.reason}")
    return out


def test_every_cell_is_as_written_down():
    # The assertions show each differing line; after a deliberate change the golden file is edited to match.
    found, wanted = lines(), GOLDEN.read_text(encoding="utf-8").splitlines()
    assert [x for x in found if x not in wanted] == []
    assert [x for x in wanted if x not in found] == []
    assert found == wanted


def cells(backend: str, axis: str, device: str = "cuda", dist: str | None = None) -> set[Support]:
    return {
        c.support
        for e in catalogue.entries()
        if e.spec.name == backend and dist in (None, e.dist)
        for c in e.spec.capabilities
        if c.axis == axis and c.device == device
    }


@pytest.mark.parametrize(
    ("backend", "device", "wanted"),
    [
        ("fsdp2", "cpu", {"dp_shard": YES, "tp": NO, "pp": NO, "cp": NO, "ep": NO, "dp_replicate": YES, "usp": YES}),
        ("vllm", "cuda", {"tp": YES, "ep": IF, "dcp": IF, "pp": NO}),
        ("vllm", "cpu", {"tp": YES, "ep": NO, "dcp": NO, "pp": NO}),
        ("megatron", "cuda", {"tp": YES, "pp": YES, "ep": YES, "cp": YES, "sp": IF, "vpp": IF, "usp": NO}),
        ("megatron", "npu", {"tp": YES, "pp": YES, "ep": YES, "cp": YES, "sp": IF, "vpp": IF, "usp": NO}),
        ("veomni", "cuda", {"ep": YES, "usp": YES, "tp": NO, "pp": NO, "cp": NO}),
        ("mindspeed_mm", "npu", {"tp": IF, "cp": IF, "pp": NO, "usp": NO}),
        ("torchtitan", "cuda", {"tp": YES, "cp": YES, "ep": YES, "pp": NO}),
        ("automodel", "cuda", {"tp": YES, "cp": YES, "ep": YES, "pp": NO}),
        ("fsdp_turbo", "cuda", {"ep": YES, "cp": IF, "usp": IF}),
        ("mindspeed_megatron", "npu", {"tp": YES, "pp": YES}),
    ],
)
def test_what_is_known_of_the_field(backend, device, wanted):
    for axis, support in wanted.items():
        assert cells(backend, axis, device) == {support}, (backend, device, axis)


def heads(backend: str) -> set[ModelType]:
    return {m for e in catalogue.entries() if e.spec.name == backend for m in e.spec.model_types}


def test_heads_and_devices_of_the_field():
    for backend in ("torchtitan", "automodel", "mindspeed_megatron", "fsdp_turbo"):
        assert heads(backend) == {ModelType.LANGUAGE_MODEL}
    assert heads("megatron") == {ModelType.LANGUAGE_MODEL, ModelType.VALUE_MODEL}
    automodel = catalogue.find("automodel")
    assert automodel is not None
    assert {d for d, _ in automodel.spec.devices} == {"cuda"}
    rollouts = {e.spec.name for e in catalogue.entries() if e.spec.kind is BackendKind.ROLLOUT}
    assert rollouts == {"hf", "vllm", "sglang", "tensorrt_llm"}


def test_the_two_splits_of_fsdp_turbo_exclude_each_other():
    turbo = catalogue.find("fsdp_turbo")
    assert turbo is not None
    rules = {c.axis: c.constraint for c in turbo.spec.capabilities}
    assert (rules[Axis.CP], rules[Axis.USP]) == ("cp_excludes_usp", "usp_excludes_cp")


def test_every_refusal_says_why_and_what_to_take_instead():
    known = {e.spec.name for e in catalogue.entries()}
    axes = {str(a) for a in Axis}
    for entry in catalogue.entries():
        for cell in entry.spec.capabilities:
            assert cell.reason, (entry.spec.name, cell.axis)
            if cell.support is NO:
                taken = re.search(r"take (.+)$", cell.reason)
                assert taken, (entry.spec.name, cell.axis, cell.reason)
                words = set(re.findall(r"\w+", taken.group(1)))
                assert words & (known | axes), (entry.spec.name, cell.axis, cell.reason)
            if cell.support is IF:
                assert ":" in cell.reason or "only" in cell.reason or "needs" in cell.reason or cell.constraint


def test_every_declared_place_has_every_axis_once():
    for entry in catalogue.entries():
        for head in entry.spec.model_types:
            for device, _ in entry.spec.devices:
                found = [c.axis for c in entry.spec.capabilities if (c.model_type, c.device) == (head, device)]
                assert sorted(found) == sorted(Axis), (entry.spec.name, head, device)


def test_constraints_that_are_named_exist():
    for entry in catalogue.entries():
        for cell in entry.spec.capabilities:
            assert all(name in constraints.CONSTRAINTS for name, _ in constraints.named(cell.constraint))


def test_planned_plugins_say_so_and_give_the_command():
    for name, kind in (("megatron", "train"), ("veomni", "train"), ("vllm", "rollout"), ("mindspeed", "train")):
        entry = catalogue.find(name, BackendKind(kind))
        assert entry is not None
        assert entry.state is PluginState.PLANNED
        assert entry.install == f"pip install rlctl-plugin-{name}"
        assert "not released" in entry.note
    torchtitan = catalogue.find("torchtitan")
    assert torchtitan is not None
    assert torchtitan.state is PluginState.NOT_BUILT
    assert "no rlctl plugin for it is built" in torchtitan.note


def test_installable_lists_each_name_once_and_no_unbuilt_one():
    names = [e.spec.name for e in catalogue.installable()]
    assert len(names) == len(set(names))
    assert "torchtitan" not in names
    assert {"fsdp2", "hf", "megatron", "veomni", "vllm"} <= set(names)


def test_find_prefers_names_to_aliases():
    assert catalogue.find("fsdp") is catalogue.find("fsdp2")
    assert catalogue.find("fsdp", BackendKind.ROLLOUT) is None
    assert catalogue.find("nothing") is None


def test_records_survive_json_and_the_dump_is_json():
    for entry in catalogue.entries():
        assert spec_from_json(json.loads(json.dumps(spec_to_json(entry.spec)))) == entry.spec
    owned = [(e.dist or "", e.spec) for e in catalogue.entries() if e.state is PluginState.RELEASED]
    back = json.loads(catalogue.dump(owned))["backends"]
    assert [(b["dist"], spec_from_json(b["spec"])) for b in back] == owned
