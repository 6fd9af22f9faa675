"""One normaliser: five aggregation modes against their plain definitions, and gradients that no split changes.

N_m: items of row m that are in the loss; B: rows that have one; L: norm length; w_m: row weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.batch import PackedBatch, pack, padding_like
from rlctl.microbatch import MicroBatchPlan, assign, min_count
from rlctl.normalizer import item_weights
from rlctl.normalizer_modes import LossAggMode

MODES = list(LossAggMode)
L = 7


def slow_loss(losses: list[list[float]], masks: list[list[bool]], row_weights: list[float], mode: LossAggMode) -> float:
    """The aggregation as the papers write it, one Python float at a time; a row weight counts a row w times."""
    kept = [[x for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(losses, masks, strict=True)]
    num_tokens = math.fsum(w * len(row) for w, row in zip(row_weights, kept, strict=True))
    num_rows = math.fsum(w for w, row in zip(row_weights, kept, strict=True) if row)
    total = 0.0
    for w, row in zip(row_weights, kept, strict=True):
        if not row or w == 0:
            continue
        row_sum = math.fsum(row)
        if mode is LossAggMode.TOKEN_MEAN:
            total += w * row_sum / num_tokens
        elif mode is LossAggMode.TOKEN_SUM:
            total += w * row_sum
        elif mode is LossAggMode.SEQ_MEAN_TOKEN_SUM:
            total += w * row_sum / num_rows
        elif mode is LossAggMode.SEQ_MEAN_TOKEN_MEAN:
            total += w * (row_sum / len(row)) / num_rows
        else:
            total += w * (row_sum / L) / num_rows
    return total


@st.composite
def batches(draw: st.DrawFn) -> PackedBatch:
    num_rows = draw(st.integers(1, 7))
    masks = [draw(st.lists(st.booleans(), min_size=1, max_size=6)) for _ in range(num_rows)]
    weights = [draw(st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0])) for _ in range(num_rows)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    losses = [torch.randn(len(m), generator=generator, dtype=torch.double) for m in masks]
    features = [torch.randn(len(m), 3, generator=generator, dtype=torch.double) for m in masks]
    return pack(
        {"loss": losses, "loss_mask": masks, "x": features},
        rows={"row_weight": weights},
        dtypes={"loss_mask": torch.bool, "row_weight": torch.float32},
    )


def gradient(batch: PackedBatch) -> torch.Tensor:
    """Gradient of the weighted sum of a small non-linear model's losses; the model is the same for every caller."""
    theta = torch.tensor([0.3, -0.2, 0.5], dtype=torch.double, requires_grad=True)
    per_item = torch.tanh(batch.items["x"] @ theta) * batch.items["loss"]
    loss = (per_item * batch.items["item_weight"].double()).sum()
    return torch.autograd.grad(loss, theta)[0]


def weights_on_ranks(parts: Sequence[PackedBatch], mode: LossAggMode) -> list[torch.Tensor]:
    """What each of several data parallel ranks computes; ``reduce`` is a real sum over all of them."""
    sent: list[list[float]] = []

    def record(values: Sequence[float], op: str) -> list[float]:
        assert op == "sum"
        sent.append(list(values))
        return list(values)

    for part in parts:
        item_weights(part, mode, reduce=record, norm_length=L)
    totals = [math.fsum(column) for column in zip(*sent, strict=True)]
    return [item_weights(part, mode, reduce=lambda _values, _op: totals, norm_length=L) for part in parts]


@pytest.mark.parametrize("mode", MODES)
@given(batch=batches())
@settings(max_examples=60, deadline=None)
def test_weights_give_the_plain_definition(mode: LossAggMode, batch: PackedBatch) -> None:
    weights = item_weights(batch, mode, norm_length=L)
    assert weights.dtype == torch.float32
    assert weights.shape == (batch.num_items,)
    expected = slow_loss(
        [t.tolist() for t in batch.split_items(batch.items["loss"])],
        [t.tolist() for t in batch.split_items(batch.items["loss_mask"])],
        batch.rows["row_weight"].tolist(),
        mode,
    )
    got = float((weights.double() * batch.items["loss"]).sum())
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert not weights[~batch.items["loss_mask"]].any()


@pytest.mark.parametrize("mode", MODES)
@given(batch=batches(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_gradient_does_not_change_with_any_split(mode: LossAggMode, batch: PackedBatch, data: st.DataObject) -> None:
    whole = gradient(batch.with_items(item_weight=item_weights(batch, mode, norm_length=L)))
    dp = data.draw(st.integers(1, 4))
    rank_of = [data.draw(st.integers(0, dp - 1)) for _ in range(batch.num_rows)]
    parts = [batch.select([i for i, r in enumerate(rank_of) if r == rank]) for rank in range(dp)]
    plan = data.draw(
        st.one_of(
            st.builds(MicroBatchPlan, max_rows=st.integers(1, 4)),
            st.builds(MicroBatchPlan, max_tokens=st.integers(6, 20)),
        )
    )
    count = max(min_count(p.lengths, plan) for p in parts)
    total = torch.zeros(3, dtype=torch.double)
    for part, weights in zip(parts, weights_on_ranks(parts, mode), strict=True):
        part = part.with_items(item_weight=weights)
        for rows in assign(part.lengths, plan, count):
            total += gradient(part.select(rows) if rows else padding_like(part))
    assert torch.allclose(total, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", [m for m in MODES if m is not LossAggMode.TOKEN_SUM])
def test_local_counts_would_be_seen(mode: LossAggMode) -> None:
    """The test above can fail: with counts of each rank alone the gradient is another one."""
    batch = pack(
        {
            "loss": [torch.ones(n, dtype=torch.double) for n in (1, 6, 5, 6)],
            "loss_mask": [[True] * n for n in (1, 6, 5, 6)],
            "x": [torch.full((n, 3), float(n), dtype=torch.double) for n in (1, 6, 5, 6)],
        }
    )
    whole = gradient(batch.with_items(item_weight=item_weights(batch, mode, norm_length=L)))
    parts = [batch.select([0]), batch.select([1, 2, 3])]
    right = sum(
        gradient(p.with_items(item_weight=w)) for p, w in zip(parts, weights_on_ranks(parts, mode), strict=True)
    )
    local = sum(gradient(p.with_items(item_weight=item_weights(p, mode, norm_length=L))) for p in parts)
    assert isinstance(right, torch.Tensor)
    assert isinstance(local, torch.Tensor)
    assert torch.allclose(right, whole)
    assert (local - whole).norm() > 0.3 * whole.norm()


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_weight_zero_are_as_if_absent(mode: LossAggMode) -> None:
    items = {"loss_mask": [[False, True, True], [True], [True, True]]}
    batch = pack(items, rows={"row_weight": [1.0, 0.0, 1.0]})
    without = pack({"loss_mask": [items["loss_mask"][0], items["loss_mask"][2]]})
    kept = item_weights(batch, mode, norm_length=L)
    assert kept[3] == 0
    assert torch.equal(torch.cat([kept[:3], kept[4:]]), item_weights(without, mode, norm_length=L))


@pytest.mark.parametrize("mode", MODES)
def test_a_row_of_weight_two_counts_twice(mode: LossAggMode) -> None:
    once = pack({"loss_mask": [[True, True], [True]]}, rows={"row_weight": [2.0, 1.0]})
    twice = pack({"loss_mask": [[True, True], [True, True], [True]]})
    a = item_weights(once, mode, norm_length=L)
    b = item_weights(twice, mode, norm_length=L)
    assert torch.allclose(a[:2], b[:2] + b[2:4])
    assert torch.allclose(a[2:], b[4:])


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_learn_gives_zeros(mode: LossAggMode) -> None:
    batch = pack({"loss_mask": [[False, False]]})
    assert item_weights(batch, mode, norm_length=L).tolist() == [0.0, 0.0]
    assert item_weights(batch.select([]), mode, norm_length=L).tolist() == []


def test_modes_by_name_and_unknown_modes() -> None:
    batch = pack({"loss_mask": [[True, True]]})
    assert item_weights(batch, "token-mean").tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="seq-mean"):
        item_weights(batch, "seq-mean")
