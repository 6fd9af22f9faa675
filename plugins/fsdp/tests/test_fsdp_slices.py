"""Slices of a packed sequence, what may not be sliced, and rows too long to be packed: without ranks."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from fsdp_axes_models import BORDER_MIXING, CONVOLUTION, DYNAMIC_ROPE, LONG_ROPE, register
from fsdp_helpers import CONFIGS, VOCAB, batch_of, build_engine, model_section, rows

from rlctl.batch import PackedBatch, pack
from rlctl.errors import BatchError, CapabilityError, ConfigError
from rlctl.microbatch import MicroBatchPlan
from rlctl.parts import attention, layout
from rlctl.parts.layout import lay_out
from rlctl.parts.ulysses import Ulysses, heads_problem
from rlctl.topology import Topology
from rlctl_fsdp.engine import FSDPEngine
from rlctl_fsdp.inspection import row_limit
from rlctl_fsdp.locality import leak_between_rows, mixing_outside_attention
from rlctl_fsdp.place import check_heads

CPU = torch.device("cpu")


def _ranks(size: int) -> list[Ulysses]:
    """Places in a group whose collectives are not used here."""
    return [Ulysses(cast(Any, None), size, rank) for rank in range(size)]


def _batch() -> PackedBatch:
    """Rows of several lengths, two of which share a prompt; a row that scores nothing; gaps in the masks."""
    prompt, *answers = rows((5, 4, 7, 3, 11, 6), seed=2)
    tokens = [torch.cat([prompt, answers[0]]), answers[3], torch.cat([prompt, answers[1]]), answers[2], answers[4]]
    masks = [torch.arange(len(t)) >= start for t, start in zip(tokens, (5, 1, 5, 3, 2), strict=True)]
    masks[1][4] = False
    return pack({"input_ids": tokens, "loss_mask": masks})


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
def test_slices_put_together_are_the_whole_sequence(size, share) -> None:
    batch = _batch()
    whole = lay_out(batch, CPU, packed=True, share=share)
    parts = [lay_out(batch, CPU, packed=True, share=share, ulysses=rank) for rank in _ranks(size)]
    total = whole.inputs["input_ids"].shape[1]
    assert len({p.inputs["input_ids"].shape for p in parts}) == 1, "equal slices"
    for name in ("input_ids", "position_ids"):
        together = torch.cat([p.inputs[name] for p in parts], 1)
        assert torch.equal(together[:, :total], whole.inputs[name]), name
    for part in parts:
        assert part.part is not None
        assert part.part.filling == size * part.part.width - total
        assert 0 <= part.part.filling < size
        # Boundaries and keys are those of the whole sequence on every rank.
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "key_index", "segment_parents"):
            assert (name in part.inputs) == (name in whole.inputs)
            assert name not in whole.inputs or torch.equal(part.inputs[name], whole.inputs[name]), name
        assert torch.equal(part.positions, whole.positions), "the loss sees every scored token"


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
def test_every_scored_token_is_predicted_by_one_slice(size) -> None:
    batch = _batch()
    whole = lay_out(batch, CPU, packed=True)
    owners = torch.zeros(whole.positions.numel(), dtype=torch.long)
    for rank, part in enumerate(lay_out(batch, CPU, packed=True, ulysses=r) for r in _ranks(size)):
        assert part.mine is not None
        assert part.part is not None
        owners[part.mine] += 1
        assert torch.equal(part.sources + rank * part.part.width, whole.sources[part.mine])
        # The hidden state belongs to the token before the scored one in its row, wherever the border runs.
        before = batch.items["input_ids"][whole.positions[part.mine] - 1]
        assert torch.equal(part.inputs["input_ids"][0][part.sources], before)
    assert owners.tolist() == [1] * owners.numel()


def test_positions_are_those_of_the_row_and_start_again_at_each() -> None:
    """Relative positions hide a missing reset from every comparison of numbers, so it is asserted."""
    batch = _batch()
    for size in (2, 4):
        parts = [lay_out(batch, CPU, packed=True, share=False, lean=False, ulysses=r) for r in _ranks(size)]
        positions = torch.cat([p.inputs["position_ids"][0] for p in parts])
        bounds = parts[0].inputs["cu_seq_lens_q"].tolist()
        for start, end in pairwise(bounds):
            assert positions[start:end].tolist() == list(range(end - start))
        assert any(p.inputs["position_ids"][0, 0] > 0 for p in parts[1:]), "a border inside a row"
    shared = [lay_out(batch, CPU, packed=True, ulysses=r) for r in _ranks(4)]
    positions = torch.cat([p.inputs["position_ids"][0] for p in shared])
    parents, bounds = shared[0].inputs["segment_parents"], shared[0].inputs["cu_seq_lens_q"]
    tails = [s for s, parent in enumerate(parents.tolist()) if parent >= 0]
    assert len(tails) == 2
    for tail in tails:
        assert positions[bounds[tail]] == 5, "a tail goes on where the shared prompt ends"


def test_a_sequence_shorter_than_the_group_fills_the_other_slices() -> None:
    batch = batch_of(rows((2,)))
    parts = [lay_out(batch, CPU, packed=True, ulysses=rank) for rank in _ranks(4)]
    assert [p.inputs["input_ids"].shape[1] for p in parts] == [1] * 4
    assert [p.sources.numel() for p in parts] == [1, 0, 0, 0]
    assert parts[3].part is not None
    assert parts[3].part.filling == 3
    np.testing.assert_array_equal(parts[3].inputs["input_ids"], parts[0].inputs["input_ids"])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "fits"),
    [(8, 8, 4, True), (8, 2, 4, True), (8, 1, 8, True), (8, 4, 2, True), (6, 6, 4, False), (12, 3, 4, False), (4, 4, 8, False)],
)  # fmt: skip
def test_heads_that_ranks_can_share(heads, kv_heads, size, fits) -> None:
    """The same rule before launch (from the config) and in attention (from the tensors)."""
    assert (heads_problem(heads, kv_heads, size) is None) == fits
    config = {
        **CONFIGS["llama"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": 8 * heads,
    }
    topology = Topology(world_size=size, usp=size)
    if fits:
        check_heads(topology, {"config": config})
    else:
        with pytest.raises(CapabilityError, match="cannot be split over usp") as refusal:
            check_heads(topology, {"config": config})
        assert f"num_heads={heads}" in str(refusal.value.found)
    check_heads(Topology(world_size=size, dp_shard=size), {"config": config})


def test_rows_one_by_one_exclude_slices() -> None:
    topology = Topology(world_size=2, usp=2)
    with pytest.raises(ConfigError, match="per_row packs none") as refusal:
        FSDPEngine().rlctl_build_mesh(topology, {"device": "cpu", "attention": "per_row"})
    assert refusal.value.next == "set engine.attention=auto"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packable_families_mix_in_attention_alone(dtype) -> None:
    for family in CONFIGS:
        model = build_engine(model_section(family)).local_module().to(dtype)
        attention.register()
        assert leak_between_rows(model, VOCAB, CPU, dtype) is None, family
        assert mixing_outside_attention(model, VOCAB, CPU, dtype) is None, family


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixing_is_found_even_where_logits_hide_it(dtype) -> None:
    """A convolution whose share of the logits is below half precision's rounding, and a mixing that respects rows."""
    register()
    engine = build_engine({"config": dict(CONVOLUTION), "tokenizer": "unused"})
    model = engine.local_module().to(dtype)
    attention.register()
    leak, mixing = (f(model, VOCAB, CPU, dtype) for f in (leak_between_rows, mixing_outside_attention))
    assert leak is not None
    assert "conv" in leak
    assert leak.endswith("with the tokens of another row")
    assert mixing is not None
    assert "conv" in mixing
    border = build_engine({"config": dict(BORDER_MIXING), "tokenizer": "unused"})
    assert border.info is not None
    assert border.info.notes["attention"].startswith("packed"), "it keeps rows apart"
    model = border.local_module().to(dtype)
    assert leak_between_rows(model, VOCAB, CPU, dtype) is None
    mixing = mixing_outside_attention(model, VOCAB, CPU, dtype)
    assert mixing is not None
    assert "BorderMixingModel" in mixing


@pytest.mark.parametrize("config", [LONG_ROPE, DYNAMIC_ROPE], ids=["longrope", "dynamic"])
def test_rows_that_change_the_position_encoding_of_others_are_not_packed(config, monkeypatch) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)

    def score(tokens: list[torch.Tensor], **settings: Any) -> torch.Tensor:
        engine = build_engine({"config": dict(config), "tokenizer": "unused"}, **settings)
        assert row_limit(engine.local_module()) == 20
        return engine.infer_batch(batch_of(tokens), MicroBatchPlan(max_rows=4))["log_probs"]

    short, long = rows((15, 40), seed=3)
    with pytest.raises(BatchError, match="position encoding") as refusal:
        score([short, long])
    assert "attention=per_row" in str(refusal.value.next)
    alone = score([short])
    assert float((score([short, long], attention="per_row")[:15] - alone).abs().max()) < 1e-6
    # Without the limit the short row's numbers depend on its neighbour.
    check = layout.check
    monkeypatch.setattr(layout, "check", lambda batch, vocab, _limit: check(batch, vocab))
    assert float((score([short, long])[:15] - alone).abs().max()) > 1e-3
