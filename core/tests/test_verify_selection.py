"""What `rlctl verify --all` chooses: which topologies, with which models and heads, and what it says of the rest."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from rlctl.device import Device
from rlctl.records import API_VERSION, Axis, BackendKind, BackendSpec, Capability, ModelType, Support
from rlctl.verify.selection import Choice, LeftOut, choose_all, choose_one, is_mixture
from rlctl.verify.tiny import FAMILIES, MOE, VOCAB, TinyModel, fit_tiny
from rlctl.verify.topologies import all_topologies, words

LM, VALUE = ModelType.LANGUAGE_MODEL, ModelType.VALUE_MODEL
CPU = Device("cpu")
FSDP2 = {"dp_shard": None, "dp_replicate": None, "usp": "heads_divisible_by_usp"}
MEGATRON = {
    "dp_shard": None,
    "tp": "heads_and_kv_heads_divisible_by_tp & moe_with_tp_needs_sp",
    "sp": "sp_needs_tp",
    "pp": "layers_divisible_by_stages",
    "vpp": "vpp_needs_pp",
    "cp": None,
    "ep": "experts_divisible_by_ep",
    "etp": "etp_needs_experts",
}
VEOMNI = {**FSDP2, "ep": "experts_divisible_by_ep & ep_within_a_replica"}


def backend(axes: dict[str, str | None], *heads: ModelType) -> BackendSpec:
    """One that supports these axes under these constraints."""
    heads = heads or (LM,)
    cells = [
        Capability(Axis(a), Support.SUPPORTED, "does", constraint=c, model_type=head)
        for a, c in axes.items()
        for head in heads
    ]
    return BackendSpec(
        name="mine",
        kind=BackendKind.TRAIN,
        engine="mine:Engine",
        config="mine:Config",
        api_version=API_VERSION,
        model_types=heads,
        devices=(("cpu", None),),
        capabilities=tuple(cells),
        requirements=(),
        imports=(),
        install_hint="pip install mine",
    )


def every(axes: dict[str, str | None], ranks: int) -> list[str]:
    return [words(t) for t in all_topologies(backend(axes), LM, "cpu", None, ranks)]


def chosen(spec: BackendSpec, ranks: int, *models: str) -> dict[tuple[str, str], list[str]]:
    """(model, head) -> topologies."""
    out: dict[tuple[str, str], list[str]] = {}
    for choice in choose_all(spec, CPU, models, ranks)[0]:
        out.setdefault((choice.model, str(choice.model_type)), []).append(words(choice.topology))
    return out


def test_verify_takes_every_axis_alone_and_every_two_together() -> None:
    found = every(FSDP2, 4)
    assert found == [
        "one process",
        *("dp_shard=2", "dp_replicate=2", "usp=2"),
        *("dp_shard=3", "dp_replicate=3", "usp=3"),
        *("dp_shard=4", "dp_replicate=4", "usp=4"),
        *("dp_shard=2,dp_replicate=2", "dp_shard=2,usp=2", "dp_replicate=2,usp=2"),
    ]
    assert every({}, 4) == ["one process"]
    assert every(FSDP2, 1) == ["one process"]
    assert every(FSDP2, 2) == found[:4]
    # More ranks bring larger sizes, and no products of three axes.
    assert len(every(FSDP2, 8)) == 1 + 3 * 7 + 3


def test_verify_spreads_experts_within_a_replica_and_over_shards_and_slices_at_once() -> None:
    spread = [t for t in every(VEOMNI, 4) if "ep=" in t]
    assert spread == [
        *("dp_shard=2,ep=2", "ep=2,usp=2", "dp_shard=3,ep=3", "dp_shard=4,ep=4", "dp_shard=4,ep=2"),
        *("dp_shard=2,dp_replicate=2,ep=2", "dp_shard=2,ep=2,usp=2", "dp_shard=2,ep=4,usp=2"),
    ]
    assert not [t for t in every(VEOMNI, 2) if "ep=4" in t]


def test_verify_axes_that_reuse_ranks_come_with_those_that_they_need() -> None:
    found = every(MEGATRON, 4)
    assert len(found) == len(set(found)) == 45
    assert {"tp=2,sp=1", "pp=2,vpp=2", "tp=2,sp=1,pp=2,vpp=2"} <= set(found)
    assert {"dp_shard=2,ep=2", "dp_shard=4,ep=2", "dp_shard=2,pp=2,ep=2", "tp=2,sp=1,ep=2"} <= set(found)
    assert not {"sp=1", "vpp=2", "ep=2", "etp=2", "dp_shard=2,ep=4", "tp=2,ep=2"} & set(found)
    # An axis that needs one which the backend lacks is no topology.
    assert every({"sp": None, "vpp": None, "ep": None}, 4) == ["one process"]
    # Without data parallel ranks experts are spread over what there is.
    assert every({"tp": None, "sp": None, "ep": None}, 2) == ["one process", "tp=2", "tp=2,sp=1", "tp=2,sp=1,ep=2"]


def test_verify_of_megatrons_axes_is_finite_and_complete() -> None:
    found = chosen(backend(MEGATRON, LM, VALUE), 4)
    dense, moe = found["tiny:qwen3", "language_model"], found["tiny:qwen3_moe", "language_model"]
    wanted_dense = {
        *("one process", "tp=2", "tp=2,sp=1", "tp=4", "pp=2", "pp=4", "pp=2,vpp=2", "cp=2", "cp=4"),
        *("tp=2,sp=1,pp=2", "tp=2,cp=2", "pp=2,cp=2", "dp_shard=2,tp=2", "dp_shard=2,pp=2", "dp_shard=2,cp=2"),
    }
    assert wanted_dense <= set(dense)
    assert {"one process", "dp_shard=2,ep=2", "dp_shard=4,ep=4", "tp=2,sp=1,ep=2", "dp_shard=4,ep=2,etp=2"} <= set(moe)
    assert {"tp=2,sp=1", "dp_shard=2", "pp=2", "pp=2,vpp=2", "cp=2"} <= set(moe)
    assert found["tiny:qwen2", "language_model"] == ["one process", "tp=2", "pp=2"]
    assert sorted(found["tiny:qwen3", "value_model"]) == ["cp=2", "dp_shard=2", "one process", "pp=2", "tp=2"]
    assert {k: len(v) for k, v in found.items()} == {
        ("tiny:qwen3", "language_model"): 28,
        ("tiny:qwen3_moe", "language_model"): 23,
        ("tiny:qwen2", "language_model"): 3,
        ("tiny:qwen3", "value_model"): 5,
    }
    assert all(count == 1 for topologies in found.values() for count in Counter(topologies).values())


def test_verify_of_megatrons_axes_fits_the_tiny_models() -> None:
    spec = backend(MEGATRON, LM, VALUE)
    for ranks in (4, 8):
        for choice in choose_all(spec, CPU, (), ranks)[0]:
            t = choice.topology
            # Raises where a constraint refuses it.
            model = fit_tiny(choice.model.removeprefix("tiny:"), spec, t, "cpu", None, choice.model_type)
            config = model.config()
            assert config["intermediate_size"] % t.tp == 0, words(t)
            assert config.get("moe_intermediate_size", 0) % t.etp == 0, words(t)


def test_verify_runs_share_worker_groups() -> None:
    choices, _ = choose_all(backend(MEGATRON, LM, VALUE), CPU, (), 4)
    sizes = [c.topology.world_size for c in choices]
    assert sizes == sorted(sizes)
    assert choices[0] == Choice(choices[0].topology, LM, "tiny:qwen3")
    # A topology's cases follow each other, so that it shows at once where they differ.
    order = [words(c.topology) for c in choices]
    assert len([a for a, b in pairwise(order) if a != b]) == len(set(order)) - 1


def test_verify_says_what_it_leaves_out_and_why() -> None:
    _, left_out = choose_all(backend(MEGATRON, LM, VALUE), CPU, (), 4)
    assert [(e.topology, e.model, e.model_type) for e in left_out] == [
        ("topologies with ep or etp", "tiny:qwen3", "language_model"),
        ("more than two ranks without ep and etp", "tiny:qwen3_moe", "language_model"),
        ("all but one process, tp=2 and pp=2", "tiny:qwen2", "language_model"),
        ("all but one process and one axis of size 2", "tiny:qwen3", "value_model"),
        ("every topology", "tiny:qwen3_moe", "value_model"),
    ]
    assert all(e.reason for e in left_out)
    assert LeftOut("a", "b", "c").to_json() == {
        "topology": "a",
        "model": "b",
        "model_type": "language_model",
        "reason": "c",
    }


def test_verify_without_an_axis_of_experts_runs_mixtures_everywhere() -> None:
    found, left_out = choose_all(backend(FSDP2), CPU, (), 4)
    assert left_out == []
    assert len(found) == 26
    assert chosen(backend(FSDP2), 4).keys() == {("tiny:qwen3", "language_model"), ("tiny:qwen3_moe", "language_model")}


@pytest.mark.parametrize("model", ["tiny:mixtral", "tiny:llama"])
def test_verify_a_model_asked_for_alone_runs_on_all_that_it_can(model: str) -> None:
    found = chosen(backend(MEGATRON, LM, VALUE), 4, model)
    spread = [t for t in every(MEGATRON, 4) if "ep=" in t or "etp=" in t]
    wanted = [t for t in every(MEGATRON, 4) if model == "tiny:mixtral" or t not in spread]
    assert sorted(found[model, "language_model"]) == sorted(wanted)
    assert sorted(found[model, "value_model"]) == ["cp=2", "dp_shard=2", "one process", "pp=2", "tp=2"]
    assert len(found) == 2


def test_verify_one_topology_runs_every_head() -> None:
    [topology] = [t for t in all_topologies(backend(MEGATRON), LM, "cpu", None, 2) if words(t) == "tp=2"]
    found = choose_one(backend(MEGATRON, LM, VALUE), topology, ("tiny:llama", "tiny:qwen2"))
    assert [(c.model, c.model_type) for c in found] == [
        ("tiny:llama", LM),
        ("tiny:llama", VALUE),
        ("tiny:qwen2", LM),
        ("tiny:qwen2", VALUE),
    ]
    assert [c.model_type for c in choose_one(backend(MEGATRON), topology, ("tiny:llama",))] == [LM]


def test_verify_tiny_models_have_tied_heads_untied_ones_and_a_vocabulary_that_no_axis_divides() -> None:
    assert all(VOCAB % n for n in range(2, 9))
    tied = {f for f in FAMILIES if TinyModel(f, num_experts=4).config().get("tie_word_embeddings")}
    assert "qwen3" in tied
    assert not {"qwen2", "qwen3_moe"} & tied
    assert [f for f in FAMILIES if is_mixture(f"tiny:{f}")] == list(MOE)
