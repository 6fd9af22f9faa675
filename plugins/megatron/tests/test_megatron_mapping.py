"""The tables and the pure mapping: what a rank gets is right, and all ranks' pieces make the checkpoint again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_weights_models import CONFIGS, config_of, differences, reference, write_model
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.errors import CapabilityError
from rlctl.topology import Topology
from rlctl_megatron import mapping
from rlctl_megatron.families import TABLES, Entry, Family, Layout, Split, Stored, family_of
from rlctl_megatron.mapping import Shard

SIZES = st.integers(1, 4)


def _pieces(family: Family, tensors: dict[str, torch.Tensor], tp: int, etp: int = 1) -> list[dict[str, torch.Tensor]]:
    """Every rank's parameters of a one-stage model by megatron name; the tp rank is the etp rank where both are split."""
    ranks = []
    for rank in range(max(tp, etp)):
        mine = {}
        for site in family.sites():
            size = tp if site.entry.split is Split.TP else etp
            whole = [tensors[n] for n in site.names()]
            name = site.entry.megatron.format(layer=site.layer, expert=site.expert)
            mine[name] = mapping.piece(site.entry, whole, family, Shard(rank % size, size))
        ranks.append(mine)
    return ranks


@pytest.fixture(scope="module", params=list(CONFIGS))
def saved(request, tmp_path_factory) -> tuple[str, dict[str, torch.Tensor]]:
    """(name, tensors of its directory)."""
    return request.param, write_model(request.param, tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_pieces_are_what_megatron_computes_with(saved, tp) -> None:
    name, tensors = saved
    config = config_of(name)
    family = family_of(config)
    for rank, mine in enumerate(_pieces(family, tensors, tp, tp)):
        wanted = reference(tensors, config, tuple(range(4)), (True, True), (rank, tp), (0, 1), (rank, tp))
        if family.tied:
            assert torch.equal(mine.pop("output_layer.weight"), mine["embedding.word_embeddings.weight"])
        assert differences(mine, wanted) == []


def test_tables_name_what_transformers_saves(saved) -> None:
    name, tensors = saved
    found = {k: tuple(t.shape) for k, t in tensors.items()}
    assert family_of(config_of(name)).checkpoint() == found


def test_export_order_is_embedding_layers_norm_head() -> None:
    names = list(family_of(config_of("qwen3-moe")).checkpoint())
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    layers = [int(n.split(".")[2]) for n in names if n.startswith("model.layers.")]
    assert layers == sorted(layers)


def test_swapped_gate_and_up_is_seen(saved) -> None:
    name, tensors = saved
    config = config_of(name)
    family = family_of(config)
    swapped = replace(family, layer=_swapped(family.layer), expert=_swapped(family.expert))
    (mine,) = _pieces(swapped, tensors, 1)
    (right,) = _pieces(family, tensors, 1)
    odd = differences(mine, right)
    assert odd
    assert all(n.endswith("linear_fc1.weight") for n in odd)
    # The two tables undo themselves, so a round trip alone would not notice.
    entry = next(e for e in (*swapped.layer, *swapped.expert) if e.megatron.endswith("linear_fc1.weight"))
    whole = [tensors[s.name.format(layer=0, expert=0)] for s in entry.stored]
    back = mapping.assemble(entry, [mapping.piece(entry, whole, swapped, Shard(r, 2)) for r in range(2)], swapped)
    assert all(torch.equal(a, b) for a, b in zip(back, whole, strict=True))


def _swapped(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    return tuple(replace(e, stored=e.stored[::-1]) if e.megatron.endswith("linear_fc1.weight") else e for e in entries)


def test_queries_keys_and_values_not_interleaved_by_group_are_seen() -> None:
    family = family_of(config_of("qwen2"))
    tensors = {n: torch.randn(s, generator=torch.Generator().manual_seed(0)) for n, s in family.checkpoint().items()}
    flat = replace(
        family,
        layer=tuple(replace(e, layout=Layout.COLUMN) if e.layout is Layout.QKV else e for e in family.layer),
    )
    wanted = reference(tensors, config_of("qwen2"), tuple(range(4)), (True, True), (1, 2))
    odd = differences(_pieces(flat, tensors, 2)[1], wanted)
    assert len(odd) == 8
    assert all("linear_qkv" in n for n in odd)


# ---- round trips for every layout and size ------------------------------------------------------------------------
def _family(groups: int = 1, ratio: int = 1, head: int = 1, hidden: int = 1, ffn: int = 1, vocab: int = 1) -> Family:
    return family_of(
        {
            "model_type": "qwen2",
            "num_hidden_layers": 1,
            "num_attention_heads": groups * ratio,
            "num_key_value_heads": groups,
            "head_dim": head,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "vocab_size": vocab,
        }
    )


def _round_trip(family: Family, entry: Entry, size: int) -> list[torch.Tensor]:
    """Cut, combine and assemble numbers that are all different; returns the pieces."""
    start, tensors = 1, []
    for shape in family.shapes(entry):
        count = int(torch.Size(shape).numel())
        tensors.append(torch.arange(start, start + count).reshape(shape))
        start += count
    pieces = [mapping.piece(entry, tensors, family, Shard(r, size)) for r in range(size)]
    for rank, piece in enumerate(pieces):
        assert tuple(piece.shape) == mapping.parameter_shape(entry, family, Shard(rank, size))
    back = mapping.assemble(entry, pieces, family)
    assert len(back) == len(tensors)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))
    if entry.layout is not Layout.REPLICATED:
        values = torch.cat([p.flatten() for p in pieces])
        assert sorted(values[values > 0].tolist()) == list(range(1, start)), "each number is on one rank"
    return pieces


@settings(max_examples=60, deadline=None)
@given(size=SIZES, groups=SIZES, ratio=SIZES, head=SIZES, hidden=SIZES)
def test_round_trip_of_queries_keys_and_values(size, groups, ratio, head, hidden) -> None:
    family = _family(groups * size, ratio, head, hidden)
    for entry in family.layer:
        if entry.layout is Layout.QKV:
            pieces = _round_trip(family, entry, size)
            assert {len(p) for p in pieces} == {groups * (ratio + 2) * head}


@settings(max_examples=60, deadline=None)
@given(size=SIZES, share=SIZES, hidden=SIZES, count=st.integers(1, 3))
def test_round_trip_of_columns_and_rows(size, share, hidden, count) -> None:
    family = _family(hidden=hidden, ffn=share * size)
    tensors = tuple(Stored(f"t{i}", ("ffn", "hidden")) for i in range(count))
    assert len(_round_trip(family, Entry("column", tensors, Layout.COLUMN), size)) == size
    assert len(_round_trip(family, Entry("row", (Stored("t", ("hidden", "ffn")),), Layout.ROW), size)) == size


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 8), vocab=st.integers(1, 40), hidden=SIZES)
def test_round_trip_of_a_padded_vocabulary(size, vocab, hidden) -> None:
    family = _family(vocab=vocab, hidden=hidden)
    (entry,) = family.first
    pieces = _round_trip(family, entry, size)
    rows = torch.cat(pieces)
    assert len(rows) == mapping.padded_vocab(vocab, size)
    assert len(rows) % size == 0
    assert len(rows) - vocab < size
    assert not rows[vocab:].any(), "padding is zeros"


@given(size=SIZES, hidden=SIZES)
def test_round_trip_of_what_every_rank_has(size, hidden) -> None:
    family = _family(hidden=hidden)
    pieces = _round_trip(family, family.last[0], size)
    assert all(torch.equal(p, pieces[0]) for p in pieces)


# ---- which rank has which layer -----------------------------------------------------------------------------------
@given(pp=SIZES, vpp=SIZES, each=SIZES)
def test_every_layer_is_on_one_stage_in_interleaved_order(pp, vpp, each) -> None:
    topology = Topology(world_size=pp, pp=pp, vpp=vpp)
    layers = pp * vpp * each
    order = [
        (layer, stage)
        for chunk in range(vpp)
        for stage in range(pp)
        for layer in mapping.layers_of(topology, layers, stage, chunk)
    ]
    assert [layer for layer, _ in order] == list(range(layers)), "a microbatch meets the layers in order"
    assert all(mapping.stage_of(topology, layers, layer) == stage for layer, stage in order)


def test_experts_are_shared_in_order() -> None:
    family = family_of(config_of("qwen3-moe"))
    assert [list(mapping.local_experts(family, r, 4)) for r in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


# ---- refusals -----------------------------------------------------------------------------------------------------
def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CapabilityError) as caught:
        family_of({"model_type": "gpt2"})
    assert caught.value.found == "model_type gpt2"
    assert caught.value.wanted == ", ".join(TABLES)


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("llama", {"attention_bias": True}, "attention_bias true"),
        ("llama", {"mlp_bias": True}, "mlp_bias true"),
        ("qwen3-moe", {"mlp_only_layers": [1]}, "1 of 4 layers without, first 1"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "2 of 4 layers without, first 0"),
    ],
)
def test_weights_without_a_place_are_refused(name, change, found) -> None:
    config = AutoConfig.for_model(**{**CONFIGS[name], **change})
    with pytest.raises(CapabilityError) as caught:
        family_of(config.to_dict())
    assert found in str(caught.value.found)


def test_dense_layers_that_the_model_does_not_reach_are_no_obstacle() -> None:
    assert family_of({**config_of("qwen3-moe"), "mlp_only_layers": [4, 9]}).num_experts == 8


def test_a_refused_mixture_has_dense_layers_in_transformers_too() -> None:
    config = AutoConfig.for_model(**{**CONFIGS["qwen3-moe"], "decoder_sparse_step": 2})
    with torch.device("meta"):
        names = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.1.mlp.experts.down_proj" in names


def test_sizes_that_ranks_cannot_share_are_refused() -> None:
    family = family_of({**config_of("llama"), "intermediate_size": 30})
    mapping.check_split(family, Topology(world_size=2, tp=2))
    with pytest.raises(CapabilityError) as caught:
        mapping.check_split(family, Topology(world_size=4, tp=4))
    assert caught.value.found == "30 rows of model.layers.0.mlp.gate_proj.weight"
    assert caught.value.next == "set parallel.tp to 2 or 3"
    experts = family_of({**config_of("qwen3-moe"), "moe_intermediate_size": 30})
    mapping.check_split(experts, Topology(world_size=4, tp=4, sp=True))
    with pytest.raises(CapabilityError, match="etp=4"):
        mapping.check_split(experts, Topology(world_size=4, dp_shard=4, etp=4))
