"""Rows over context and sequence parallel ranks: nothing lost, nothing twice, rotary angles where they belong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
from megatron_sequence_ranks import bounds_of, draw_batch, sources

from rlctl.batch import PackedBatch, padding_like
from rlctl.errors import BatchError
from rlctl.topology import Topology
from rlctl_megatron.layout import Laid, check, lay_out, num_filled
from rlctl_megatron.mesh import Place

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=6)


def _places(cp: int, tp: int) -> list[Place]:
    topology = Topology(world_size=cp * tp, cp=cp, tp=tp)
    return [Place(topology, CPU, cp_rank=rank) for rank in range(cp)]


def _all(batch: PackedBatch, cp: int, tp: int, sp: bool) -> list[Laid]:
    return [lay_out(batch, CPU, place, sp) for place in _places(cp, tp)]


@settings(deadline=None, max_examples=100)
@given(lengths=LENGTHS, cp=st.sampled_from([1, 2, 3, 4]), tp=st.sampled_from([1, 2, 3, 4]), sp=st.booleans())
def test_every_token_lies_on_one_rank_at_its_place(lengths, cp, tp, sp) -> None:
    batch = draw_batch(lengths, 50)
    laid = _all(batch, cp, tp, sp)
    found = torch.zeros(batch.num_items, dtype=torch.long)
    for place, one in zip(_places(cp, tp), laid, strict=True):
        at = sources(batch, place, sp)
        real = torch.ones_like(at, dtype=torch.bool) if one.padding is None else ~one.padding[0]
        found += torch.zeros_like(found).index_add(0, at[real], torch.ones_like(at[real]))
        assert torch.equal(one.input_ids[0], batch.items["input_ids"][at])
        assert torch.equal(one.position_ids[0, real], batch.position_ids()[at[real]])
        assert one.input_ids.shape == one.position_ids.shape
    assert torch.equal(found, torch.ones_like(found))
    assert len({one.input_ids.shape for one in laid}) == 1, "every rank has as many tokens"


@settings(deadline=None, max_examples=200)
@given(lengths=LENGTHS, cp=st.sampled_from([1, 2, 3, 4]), tp=st.sampled_from([1, 2, 3, 4]), sp=st.booleans())
def test_filling_is_what_alignment_asks_for_and_no_more(lengths, cp, tp, sp) -> None:
    batch = draw_batch(lengths, 50)
    laid = _all(batch, cp, tp, sp)[-1]
    unit = 2 * cp if cp > 1 else 1
    rows = [end - start for start, end in bounds_of(laid)]
    assert all(0 <= filled - n < unit for filled, n in zip(rows, lengths, strict=False))
    assert all(filled % unit == 0 for filled in rows)
    extra = rows[len(lengths) :]
    assert len(extra) <= 1
    assert not extra or sp
    # With one row fewer of ``unit`` tokens in it, tp would not divide.
    assert all((sum(rows) - n * unit) // cp % tp for e in extra for n in range(1, e // unit + 1))
    assert not sp or laid.input_ids.shape[1] % tp == 0
    assert laid.filling == sum(rows) - batch.num_items
    assert sum(int(one.padding.sum()) for one in _all(batch, cp, tp, sp) if one.padding is not None) == laid.filling
    assert (laid.padding is None) == (laid.filling == 0)
    assert laid.input_ids.shape[1] * cp == sum(rows)


@settings(deadline=None, max_examples=100)
@given(a=LENGTHS, b=LENGTHS, cp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 4]), sp=st.booleans())
def test_micro_batches_are_filled_to_an_agreed_number_of_tokens(a, b, cp, tp, sp) -> None:
    batches = [draw_batch(lengths, 50) for lengths in (a, b)]
    (place, *_) = _places(cp, tp)
    least = max(num_filled(batch, place, sp) for batch in batches)
    for batch in batches:
        alone, filled = lay_out(batch, CPU, place, sp), lay_out(batch, CPU, place, sp, least)
        assert num_filled(batch, place, sp) == alone.filling + batch.num_items
        assert filled.input_ids.shape[1] * cp == least == filled.filling + batch.num_items
        # What the batch itself holds lies where it lay; only the last row is made up, or longer.
        real = slice(0, len(bounds_of(alone)[: batch.num_rows]))
        assert bounds_of(filled)[real] == bounds_of(alone)[real]
        assert torch.equal(filled.predictors, alone.predictors)
        assert torch.equal(filled.positions, alone.positions)
        made_up = filled.input_ids.shape[1] - alone.input_ids.shape[1]
        assert torch.equal(filled.input_ids[:, : alone.input_ids.shape[1]], alone.input_ids)
        assert made_up == 0 or (filled.padding is not None and bool(filled.padding[0, -made_up:].all()))


@settings(deadline=None, max_examples=200)
@given(lengths=LENGTHS, cp=st.sampled_from([1, 2, 3, 4]), tp=st.sampled_from([1, 2]), sp=st.booleans())
def test_each_scored_token_is_predicted_on_one_rank_from_the_token_before_it(lengths, cp, tp, sp) -> None:
    batch = draw_batch(lengths, 50)
    wanted = batch.items["loss_mask"].nonzero()[:, 0]
    times = torch.zeros_like(wanted)
    for place, one in zip(_places(cp, tp), _all(batch, cp, tp, sp), strict=True):
        assert torch.equal(one.positions, wanted)
        assert (one.mine is None) == (cp == 1)
        mine = torch.arange(len(wanted)) if one.mine is None else one.mine
        assert torch.equal(sources(batch, place, sp)[one.predictors], wanted[mine] - 1)
        assert one.padding is None or not one.padding[0, one.predictors].any()
        times[mine] += 1
    assert torch.equal(times, torch.ones_like(times))


def test_a_row_is_cut_into_chunks_of_equal_work() -> None:
    batch = draw_batch((8, 3), 50)
    laid = _all(batch, 2, 1, False)
    assert laid[0].position_ids.tolist() == [[0, 1, 6, 7, 0, 3]]
    assert laid[1].position_ids.tolist() == [[2, 3, 4, 5, 1, 2]]
    assert laid[0].padding is not None
    assert laid[0].padding.tolist() == [[False] * 5 + [True]]
    assert laid[0].filling == laid[1].filling == 1


def test_a_zero_weight_micro_batch_lies_on_every_rank() -> None:
    for laid in _all(padding_like(draw_batch((4,), 50)), 4, 2, True):
        assert laid.positions.numel() == laid.predictors.numel() == 0
        assert laid.input_ids.shape == (1, 2)


class _Group:
    """A process group's size and rank, without one."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def _angles(count: int) -> torch.Tensor:
    return torch.outer(torch.arange(count).float(), 0.3 ** torch.arange(4).float()).repeat(1, 2)[:, None, None, :]


def _rotated(laid: Laid, cp: int, rank: int, count: int) -> torch.Tensor:
    """``[f]`` the angle of the fastest pair that megatron turns each token by."""
    ones = torch.zeros(laid.input_ids.shape[1], 1, 8)
    ones[..., 0] = 1.0
    group = _Group(cp, rank)
    out = _apply_rotary_pos_emb_thd(ones, laid.packed.cu_seqlens_q_padded, _angles(count), cp_group=group)  # type: ignore[arg-type]
    return torch.atan2(out[:, 0, 4], out[:, 0, 0]) % (2 * torch.pi)


@settings(deadline=None, max_examples=100)
@given(lengths=LENGTHS, cp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 4]), sp=st.booleans())
def test_megatron_turns_every_token_by_its_place_in_its_row(lengths, cp, tp, sp) -> None:
    batch = draw_batch(lengths, 50)
    for rank, laid in enumerate(_all(batch, cp, tp, sp)):
        found = _rotated(laid, cp, rank, laid.packed.max_seqlen_q)  # as many angles as megatron makes
        wanted = laid.position_ids[0].float() % (2 * torch.pi)
        torch.testing.assert_close(found.cos(), wanted.cos(), atol=1e-5, rtol=0)
        torch.testing.assert_close(found.sin(), wanted.sin(), atol=1e-5, rtol=0)


def test_as_many_angles_as_tokens_would_number_the_rows_through() -> None:
    laid = _all(draw_batch((3, 4), 50), 1, 1, False)[0]
    right, wrong = (_rotated(laid, 1, 0, count) for count in (laid.packed.max_seqlen_q, 7))
    assert laid.packed.max_seqlen_q == laid.packed.max_seqlen_kv == 4
    assert float((right - wrong).abs().max()) > 0.1
    torch.testing.assert_close(wrong, torch.arange(7) % (2 * torch.pi), atol=1e-5, rtol=0)


def test_boundaries_that_every_layer_reads_lie_on_the_host() -> None:
    place = Place(Topology(world_size=1), torch.device("meta"))
    laid = lay_out(draw_batch((3, 4), 50), torch.device("meta"), place, sp=False)
    packed = laid.packed
    assert packed.cu_seqlens_q is not None
    assert packed.cu_seqlens_q.device.type == "meta"
    assert packed.cu_seqlens_kv is not None
    assert packed.cu_seqlens_kv.device.type == "meta"
    for host in (packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded):
        assert host is not None
        assert host.tolist() == [0, 3, 7]
        assert host.dtype == torch.int32


def test_ids_that_no_shard_has_are_refused() -> None:
    batch = draw_batch((3, 4), 50)
    check(batch, 50)
    high = batch.items["input_ids"].clone()
    high[2] = 50
    low = batch.items["input_ids"].clone()
    low[0] = -1
    with pytest.raises(BatchError, match="outside the model's vocabulary"):
        check(batch.with_items(input_ids=high), 50)
    with pytest.raises(BatchError, match="outside the model's vocabulary"):
        check(batch.with_items(input_ids=low), 50)
    first = batch.items["loss_mask"].clone()
    first[3] = True
    with pytest.raises(BatchError, match="row 1 scores its first token"):
        check(batch.with_items(loss_mask=first), 50)
    with pytest.raises(BatchError, match="no item field 'loss_mask'"):
        check(replace(batch, items={"input_ids": high}), 50)
