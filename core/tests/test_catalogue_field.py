"""The matrix of the field, cell by cell, and the catalogue's own rules."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl import catalogue, constraints
from rlctl.catalogue import PluginState
from rlctl.codec import spec_from_json, spec_to_json
from rlctl.records import Axis, BackendKind, ModelType, Support

GOLDEN = Path(__file__).parent / "golden" / "field_matrix.txt"
YES, IF, NO, NA = Support.SUPPORTED, Support.CONDITIONAL, Support.UNSUPPORTED, Support.NOT_APPLICABLE


def test_every_cell_is_as_written_down():
    """Every backend, released ones too. After a deliberate change: python tools/update_field_matrix.py, and read the diff."""
    found, wanted = catalogue.cell_lines(), GOLDEN.read_text(encoding="utf-8").splitlines()
    assert [x for x in found if x not in wanted] == []
    assert [x for x in wanted if x not in found] == []
    assert found == wanted


def test_the_written_matrix_has_every_backend_head_device_and_axis():
    written = GOLDEN.read_text(encoding="utf-8").splitlines()
    keys = {tuple(line.partition(":")[0].split()) for line in written}
    assert len(keys) == len(written)
    wanted = {
        (e.spec.name, str(e.state), str(head), d if v is None else f"{d}/{v}", str(axis))
        for e in catalogue.entries()
        for head in e.spec.model_types
        for d, v in e.spec.devices
        for axis in Axis
    }
    assert keys == wanted
    assert {key[0] for key in keys} == {
        "fsdp2", "hf", "megatron", "veomni", "vllm", "mindspeed_megatron", "mindspeed_mm", "torchtitan", "automodel",
        "fsdp_turbo", "sglang", "tensorrt_llm",
    }  # fmt: skip


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
        ("fsdp2", "cpu", {"dp_shard": YES, "dp_replicate": YES, "usp": YES, "tp": NO, "pp": NO, "cp": NO, "ep": NO}),
        ("fsdp2", "cuda", {"dp_shard": YES, "dp_replicate": YES, "usp": YES, "cp": NO, "ep": NO, "sp": NO, "dcp": NA}),
        ("fsdp2", "npu", {"dp_shard": YES, "dp_replicate": YES, "usp": YES, "cp": NO, "ep": NO, "etp": NO, "vpp": NO}),
        ("hf", "cpu", {"dp_replicate": YES, "tp": NO, "pp": NO, "ep": NO, "dcp": NO, "usp": NA}),
        ("vllm", "cuda", {"tp": YES, "ep": IF, "dcp": IF, "pp": NO}),
        ("vllm", "cpu", {"tp": YES, "ep": NO, "dcp": NO, "pp": NO}),
        ("megatron", "cpu", {"tp": YES, "pp": YES, "ep": YES, "cp": YES, "sp": IF, "vpp": IF, "etp": IF, "usp": NO}),
        ("megatron", "cuda", {"tp": YES, "pp": YES, "ep": YES, "cp": YES, "sp": IF, "vpp": IF, "usp": NO}),
        ("megatron", "npu", {"tp": YES, "pp": YES, "ep": YES, "cp": YES, "sp": IF, "vpp": IF, "usp": NO}),
        ("veomni", "cuda", {"ep": IF, "usp": YES, "tp": NO, "pp": NO, "cp": NO}),
        ("veomni", "cpu", {"ep": YES, "usp": YES, "dp_replicate": YES, "tp": NO, "sp": NO, "pp": NO, "etp": NO}),
        ("mindspeed_mm", "npu", {"tp": IF, "cp": IF, "pp": NO, "usp": NO}),
        ("torchtitan", "cuda", {"tp": YES, "cp": YES, "ep": YES, "pp": NO}),
        ("automodel", "cuda", {"tp": YES, "cp": YES, "ep": YES, "pp": NO}),
        ("fsdp_turbo", "cuda", {"ep": YES, "cp": IF, "usp": IF}),
        ("mindspeed_megatron", "npu", {"tp": YES, "pp": YES, "cp": YES, "ep": YES, "usp": NO}),
        ("veomni", "npu", {"ep": IF, "usp": YES, "dp_replicate": YES, "tp": NO, "pp": NO, "cp": NO}),
        ("vllm", "npu", {"tp": YES, "ep": IF, "dcp": IF, "pp": NO}),
        ("hf", "npu", {"dp_replicate": YES, "tp": NO}),
        ("sglang", "cuda", {"tp": YES, "pp": NO, "ep": IF, "dcp": NO}),
        ("tensorrt_llm", "cuda", {"tp": YES, "pp": NO, "ep": IF, "dcp": NO}),
    ],
)
def test_what_is_known_of_the_field(backend, device, wanted):
    for axis, support in wanted.items():
        assert cells(backend, axis, device) == {support}, (backend, device, axis)


@pytest.mark.parametrize(
    ("backend", "device", "axis", "rule"),
    [
        ("vllm", "cuda", "ep", "ep_equals_tp_times_dp"),
        ("vllm", "cuda", "dcp", "dcp_within_tp"),
        ("megatron", "cuda", "sp", "sp_needs_tp"),
        ("megatron", "cuda", "vpp", "vpp_needs_pp"),
        ("megatron", "cuda", "pp", "layers_divisible_by_stages"),
        ("megatron", "cuda", "tp", "moe_with_tp_needs_sp"),
        ("fsdp2", "cuda", "usp", "heads_divisible_by_usp"),
        ("veomni", "cuda", "usp", "heads_divisible_by_usp"),
        ("veomni", "cuda", "ep", "experts_divisible_by_ep"),
        ("veomni", "cuda", "ep", "ep_within_a_replica"),
        ("fsdp_turbo", "cuda", "cp", "cp_excludes_usp"),
        ("fsdp_turbo", "cuda", "usp", "usp_excludes_cp"),
    ],
)
def test_the_condition_of_a_cell_is_a_named_predicate(backend, device, axis, rule):
    found = [
        c.constraint or ""
        for e in catalogue.entries()
        if e.spec.name == backend
        for c in e.spec.capabilities
        if (c.device, c.axis) == (device, axis)
    ]
    assert found
    assert all(rule in text.split(" & ") for text in found)


def test_experts_under_fsdp_are_not_called_expert_parallel():
    for cell in next(e.spec for e in catalogue.entries() if e.spec.name == "fsdp2").capabilities:
        if cell.axis is Axis.EP:
            assert cell.support is NO
            assert "every rank runs all of them" in cell.reason


def heads(backend: str) -> set[ModelType]:
    return {m for e in catalogue.entries() if e.spec.name == backend for m in e.spec.model_types}


def test_heads_and_devices_of_the_field():
    for backend in ("torchtitan", "automodel", "mindspeed_megatron", "fsdp_turbo"):
        assert heads(backend) == {ModelType.LANGUAGE_MODEL}
    assert heads("megatron") == {ModelType.LANGUAGE_MODEL, ModelType.VALUE_MODEL}
    automodel = catalogue.find("automodel")
    assert automodel is not None
    assert {d for d, _ in automodel.spec.devices} == {"cuda"}
    assert all(
        e.install and "no rlctl plugin" in e.note for e in catalogue.entries() if e.state is PluginState.NOT_BUILT
    )
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


def test_megatron_is_one_dists_on_cpu_and_cuda_and_anothers_on_npu():
    found = {
        (e.dist, str(e.state), d) for e in catalogue.entries() if e.spec.name == "megatron" for d, _ in e.spec.devices
    }
    assert found == {
        ("rlctl-plugin-megatron", "released", "cpu"),
        ("rlctl-plugin-megatron", "released", "cuda"),
        ("rlctl-plugin-mindspeed", "released", "npu"),
    }
    entry = catalogue.find("megatron")
    assert entry is not None
    assert (entry.install, entry.note) == ("pip install rlctl-plugin-megatron", "")


def test_planned_plugins_say_so_and_give_the_command():
    known = catalogue.find("torchtitan")
    assert known is not None
    entry = replace(known, dist="rlctl-plugin-torchtitan", state=PluginState.PLANNED)
    assert entry.install == known.spec.install_hint
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
