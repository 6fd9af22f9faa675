"""Constraints, topologies and the cells of the matrix."""

from __future__ import annotations

import pytest

from rlctl import catalogue, constraints
from rlctl.capabilities import UNDECLARED, check_topology, matrix, require_topology
from rlctl.constraints import ModelFacts
from rlctl.errors import CapabilityError
from rlctl.evidence import EvidenceBook, Proof
from rlctl.plan.backends import Needs, rank_backends
from rlctl.plugins import BackendRecord, PluginEntry, PluginSet, Stage
from rlctl.records import (
    API_VERSION,
    Axis,
    BackendKind,
    BackendSpec,
    Capability,
    CheckStatus,
    EvidenceLevel,
    EvidenceRecord,
    ModelType,
    Support,
)
from rlctl.topology import Topology, resolve

DENSE = ModelFacts(num_heads=16, num_kv_heads=8, num_layers=28, num_experts=0)
MOE = ModelFacts(num_heads=32, num_kv_heads=4, num_layers=48, num_experts=128)


def field(name: str, dist: str | None = None) -> BackendSpec:
    return next(e.spec for e in catalogue.entries() if e.spec.name == name and dist in (None, e.dist))


@pytest.mark.parametrize(
    ("rule", "world", "axes", "facts", "nearest"),
    [
        ("heads_divisible_by_tp", 12, {"tp": 3}, DENSE, ("tp=2", "tp=4")),
        ("heads_and_kv_heads_divisible_by_tp", 16, {"tp": 16}, DENSE, ("tp=8",)),
        ("heads_divisible_by_usp", 12, {"usp": 6}, DENSE, ("usp=4",)),
        ("layers_divisible_by_stages", 24, {"pp": 8}, DENSE, ("pp=4",)),
        ("vpp_needs_pp", 1, {"vpp": 2}, DENSE, ("vpp=1",)),
        ("vpp_needs_pp", 4, {"pp": 4, "vpp": 3}, DENSE, ("vpp=1", "vpp=7")),
        ("sp_needs_tp", 1, {"sp": 1}, DENSE, ("sp=false",)),
        ("moe_with_tp_needs_sp", 2, {"tp": 2}, MOE, ("sp=true",)),
        ("experts_divisible_by_ep", 2, {"ep": 2}, DENSE, ("ep=1",)),
        ("experts_divisible_by_ep", 6, {"ep": 3}, MOE, ("ep=2",)),
        ("experts_divisible_by_ep", 4, {"ep": 8}, MOE, ("ep=4",)),
        ("ep_within_a_replica", 4, {"dp_replicate": 2, "ep": 4}, MOE, ("ep=2",)),
        ("etp_needs_experts", 2, {"etp": 2}, DENSE, ("etp=1",)),
        ("ep_equals_tp_times_dp", 8, {"tp": 4, "ep": 4}, MOE, ("ep=1", "ep=8")),
        ("ep_divides_tp", 4, {"tp": 4, "ep": 3}, MOE, ("ep=2", "ep=4")),
        ("dcp_within_tp", 8, {"tp": 8, "dcp": 4}, MOE, ("dcp=2",)),
        ("cp_excludes_usp", 4, {"cp": 2, "usp": 2}, DENSE, ("cp=1",)),
        ("usp_excludes_cp", 4, {"cp": 2, "usp": 2}, DENSE, ("usp=1",)),
    ],
)
def test_each_constraint_refuses_with_words_and_the_nearest_choices(rule, world, axes, facts, nearest):
    broken = constraints.check(rule, resolve(world, axes), facts)
    assert broken is not None
    assert broken.nearest == nearest
    assert broken.words == constraints.CONSTRAINTS[rule].words
    for axis, size in axes.items():
        if axis in constraints.CONSTRAINTS[rule].shown:
            assert f"{axis}={size if axis != 'sp' else 'true'}" in broken.found


@pytest.mark.parametrize("rule", constraints.CONSTRAINTS)
def test_no_constraint_refuses_one_process(rule):
    for facts in (DENSE, MOE, ModelFacts()):
        assert constraints.check(rule, Topology(), facts) is None


def test_every_nearest_choice_really_fits():
    for rule_name, rule in constraints.CONSTRAINTS.items():
        for facts in (DENSE, MOE):
            for world in (4, 6, 8, 12):
                for size in range(2, 13):
                    try:
                        topology = resolve(world, {rule.axis: size} if rule.axis != "sp" else {"sp": 1})
                    except CapabilityError:
                        continue
                    broken = constraints.check(rule_name, topology, facts)
                    for choice in broken.nearest if broken else ():
                        axis, _, value = choice.partition("=")
                        better = resolve(world, {axis: int(value)} if axis != "sp" else {"sp": int(value == "true")})
                        assert constraints.check(rule_name, better, facts) is None, (rule_name, choice, world)


def test_facts_that_are_not_known_refuse_nothing():
    topology = resolve(6, {"tp": 3})
    assert constraints.check("heads_and_kv_heads_divisible_by_tp", topology, ModelFacts()) is None
    assert constraints.check("heads_and_kv_heads_divisible_by_tp", topology, ModelFacts(num_kv_heads=8)) is not None


def test_facts_are_read_from_hugging_face_configs():
    qwen = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 28}
    assert ModelFacts.from_config(qwen) == DENSE
    assert ModelFacts.from_config({"n_head": 12, "n_layer": 6}) == ModelFacts(12, 12, 6, 0)
    moe = {
        "text_config": {
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_hidden_layers": 48,
            "num_experts": 128,
        }
    }
    assert ModelFacts.from_config(moe) == MOE
    assert ModelFacts.from_config({"num_local_experts": 8}).num_experts == 8
    assert ModelFacts.from_config({}) == ModelFacts(None, None, None, 0)


def test_a_topology_that_fits_has_no_problem():
    fit = check_topology(field("megatron"), resolve(16, {"tp": 4, "pp": 2}), "cuda", "nvidia", facts=DENSE)
    assert fit.problems == ()
    assert fit.notes == ()


def test_refused_axes_carry_the_records_reason():
    fit = check_topology(field("megatron"), resolve(4, {"usp": 2}), "cuda", "nvidia", facts=DENSE)
    assert [p.axis for p in fit.problems] == ["usp"]
    assert "take cp, or fsdp2 with usp" in str(fit.problems[0])


def test_constraints_come_with_the_nearest_choice():
    fit = check_topology(field("megatron"), resolve(24, {"tp": 3}), "cuda", "nvidia", facts=DENSE)
    (problem,) = fit.problems
    assert "heads must divide by tp" in str(problem)
    assert "Nearest that fits: tp=2 or tp=4." in str(problem)


def test_moe_with_tp_needs_sp_and_sp_without_tp_is_announced():
    megatron = field("megatron")
    (problem,) = check_topology(megatron, resolve(4, {"tp": 4}), "cuda", "nvidia", facts=MOE).problems
    assert problem.nearest == ("sp=true",)
    assert check_topology(megatron, resolve(4, {"tp": 4, "sp": 1}), "cuda", "nvidia", facts=MOE).problems == ()
    fit = check_topology(megatron, resolve(2, {"sp": 1}), "cuda", "nvidia", facts=DENSE)
    assert fit.problems == ()
    assert fit.notes == ("megatron: sp is tied to tp: it is off while tp is 1",)


def test_vllm_expert_parallelism_is_the_whole_engine_and_absent_on_cpu():
    vllm = field("vllm")
    good = resolve(4, {"tp": 4, "ep": 4, "dp_shard": 1})
    assert check_topology(vllm, good, "cuda", "nvidia", facts=MOE).problems == ()
    bad = resolve(4, {"tp": 4, "ep": 2, "dp_shard": 1})
    assert check_topology(vllm, bad, "cuda", "nvidia", facts=MOE).problems[0].nearest == ("ep=1", "ep=4")
    assert "segmentation fault" in check_topology(vllm, good, "cpu", None, facts=MOE).problems[0].reason


def toy(*cells: Capability) -> BackendSpec:
    return BackendSpec(
        "toy",
        BackendKind.TRAIN,
        "m:E",
        "m:C",
        API_VERSION,
        (ModelType.LANGUAGE_MODEL,),
        (("cpu", None),),
        cells,
        (),
        (),
        "pip install toy",
    )


def test_an_axis_that_nobody_declares_is_refused():
    fit = check_topology(toy(), resolve(2, {"tp": 2}), "cpu")
    assert fit.problems[0].reason == UNDECLARED


def test_require_topology_raises_with_a_line_an_axis():
    record = BackendRecord(toy(), "rlctl-toy", "1.0")
    with pytest.raises(CapabilityError) as caught:
        require_topology(record, resolve(4, {"tp": 2, "pp": 2}), "cpu")
    assert len(caught.value.details) == 2
    assert caught.value.details[0].startswith("parallel.tp=2: ")
    assert caught.value.next == "rlctl capabilities --backend toy"
    assert require_topology(record, Topology(), "cpu") == ()


def test_matrix_puts_installed_first_and_keeps_what_is_only_known():
    cell = Capability(Axis.DP_SHARD, Support.SUPPORTED, "shards")
    entry = PluginEntry("toy", "rlctl-toy", "1.0", "t", Stage.COMPATIBLE, CheckStatus.OK, backends=(toy(cell),))
    cells = matrix(PluginSet([entry]), EvidenceBook())
    assert [c.axis for c in cells[: len(Axis)]] == list(Axis)
    assert {c.backend for c in cells[: len(Axis)]} == {"toy"}
    assert cells[0].support is Support.SUPPORTED
    assert cells[2].support is Support.UNSUPPORTED
    assert cells[2].reason == UNDECLARED
    states = {(c.backend, c.dist): c.state for c in cells}
    assert states["toy", "rlctl-toy"] == "installed"
    assert states["fsdp2", "rlctl-plugin-fsdp"] == "released"
    assert states["megatron", "rlctl-plugin-megatron"] == "released"
    assert states["megatron", "rlctl-plugin-mindspeed"] == "released"
    assert states["torchtitan", ""] == "not_built"
    assert {c.evidence.level for c in cells} == {"declared"}


def test_records_of_one_device_raise_no_level_on_another_whichever_dist_answers_there():
    record = EvidenceRecord(
        backend="megatron", model_type="language_model", device="cpu", vendor=None, axes={"tp": 2},
        level=EvidenceLevel.PARITY, model_family="llama", what="w", versions={}, world_size=2, deltas={}, date="d",
    )  # fmt: skip
    book = EvidenceBook((Proof(record, "this machine"),))
    found = {
        (c.state, c.device): (str(c.evidence.level), c.evidence.stale)
        for c in matrix(PluginSet(), book, ["megatron"])
        if c.axis is Axis.TP and c.model_type == ModelType.LANGUAGE_MODEL
    }
    assert found == {
        ("released", "cpu"): ("parity", False),
        ("released", "cuda"): ("declared", True),
        ("released", "npu"): ("declared", True),
    }
    needs = Needs(BackendKind.TRAIN, 2, {"tp": 2}, "npu", "huawei")
    [choice] = [c for c in rank_backends(needs, PluginSet(), book) if c.name == "megatron"]
    assert (choice.dist, choice.state, choice.evidence) == ("rlctl-plugin-mindspeed", "released", "declared")
    assert choice.elsewhere == "parity, made on cpu, not on npu"


def test_matrix_of_a_backend_that_is_installed_speaks_with_its_own_records():
    spec = toy(Capability(Axis.TP, Support.SUPPORTED, "mine"))
    mine = PluginEntry(
        "fsdp",
        "rlctl-plugin-fsdp",
        "0.1.0",
        "t",
        Stage.COMPATIBLE,
        CheckStatus.OK,
        backends=(BackendSpec(**{**vars(spec), "name": "fsdp2"}),),
    )
    cells = matrix(PluginSet([mine]), EvidenceBook(), ["fsdp2"])
    assert {c.state for c in cells} == {"installed"}
    assert [c.reason for c in cells if c.axis is Axis.TP] == ["mine"]


def test_unknown_backend_is_refused_with_a_near_name():
    with pytest.raises(CapabilityError) as caught:
        matrix(PluginSet(), EvidenceBook(), ["megatrn"])
    assert caught.value.next == "rlctl capabilities --backend megatron"
