"""The clipped value loss against its definition in plain numbers, and what its loss function hands back."""

from __future__ import annotations

import math

import pytest
import torch
from algorithm_cases import flat
from hypothesis import given
from hypothesis import strategies as st
from oracle import basics
from oracle import value as reference
from oracle.cases import cases

from rlctl.algorithms.value_loss import ValueLoss, clipped_value_loss
from rlctl.batch import PackedBatch, pack, padding_like
from rlctl.readers import DenseValueReader

numbers = st.floats(-3, 3)
triples = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=8)


def slow(value: float, goal: float, old: float, clip: float | None) -> float:
    if clip is None:
        return 0.5 * (value - goal) ** 2
    near = min(max(value, old - clip), old + clip)
    return 0.5 * max((value - goal) ** 2, (near - goal) ** 2)


@given(triples, st.sampled_from([None, 0.2, 0.5]))
def test_value_loss_is_its_definition(rows: list[tuple[float, float, float]], clip: float | None) -> None:
    value, goal, old = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    found = clipped_value_loss(value, goal, old, clip)
    assert found.loss.tolist() == pytest.approx([slow(v, g, o, clip) for v, g, o in rows], rel=1e-12, abs=1e-12)
    assert [bool(c) for c in found.clipped] == [
        clip is not None and abs(min(max(v, o - clip), o + clip) - g) > abs(v - g) for v, g, o in rows
    ]


def test_value_loss_has_the_gradient_of_its_definition() -> None:
    # Within the bound; beyond it and better than at the bound; beyond it and worse.
    value = torch.tensor([0.3, 1.0, -1.0], dtype=torch.float64, requires_grad=True)
    goal = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    old = torch.zeros(3, dtype=torch.float64)
    found = clipped_value_loss(value, goal, old, 0.5)
    assert found.clipped.tolist() == [False, True, False]
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, goal, old, 0.5).loss, value)
    found.loss.sum().backward()
    assert value.grad is not None
    # Where the error at the bound counts, nothing pulls.
    assert value.grad.tolist() == pytest.approx([0.3 - 1.0, 0.0, -1.0 - 2.0])


@pytest.mark.parametrize("clip", [0.5, 0.1, None])
def test_value_loss_and_its_gradient_are_those_of_the_reference(clip: float | None) -> None:
    bitten = 0
    for case in cases(150):
        mask, leaves = flat(case.masks).bool(), basics.leaves(case.values)
        terms = reference.value_loss(leaves, case.old_values, case.returns, case.masks, cliprange=clip)
        total = sum((term for row in terms for term in row), torch.zeros((), dtype=torch.float64))
        values = flat(case.values).requires_grad_()
        found = clipped_value_loss(values, flat(case.returns), flat(case.old_values), clip)
        loss = torch.where(mask, found.loss, 0.0)
        assert (loss.detach() - flat(basics.floats(terms))).abs().max() < 1e-6, case.seed
        loss.sum().backward()
        assert values.grad is not None
        assert (values.grad - flat(basics.gradients(total, leaves))).abs().max() < 1e-6, case.seed
        bitten += int(found.clipped[mask].sum())
    assert (bitten > 0) == (clip is not None)


def made(**more: list[list[float]]) -> PackedBatch:
    fields = {
        "input_ids": [[1, 2, 3], [4, 5]],
        "loss_mask": [[False, True, True], [False, True]],
        "returns": [[9.0, 1.0, 0.5], [9.0, -1.0]],
        "old_values": [[9.0, 0.2, 0.1], [9.0, 0.0]],
        "item_weight": [[0.0, 0.25, 0.25], [0.0, 0.5]],
        **more,
    }
    floats = dict.fromkeys(("returns", "old_values", "item_weight"), torch.float32)
    return pack(fields, dtypes={"loss_mask": torch.bool, **floats})


def test_value_loss_function_weights_and_names_what_it_saw() -> None:
    batch = made()
    outputs = torch.tensor([0.1, 0.9, 7.0, -0.8, 7.0], requires_grad=True)
    out = ValueLoss(clip_range=0.5)(DenseValueReader(outputs, batch), batch)
    # The head's number at the token before stands for the state in which a token is chosen.
    seen = [(0.1, 1.0, 0.2, 0.25), (0.9, 0.5, 0.1, 0.25), (-0.8, -1.0, 0.0, 0.5)]
    assert out.loss.item() == pytest.approx(sum(w * slow(v, g, o, 0.5) for v, g, o, w in seen))
    assert {k: float(v) for k, v in out.sums.items()} == pytest.approx(
        {
            "critic/vf_loss": out.loss.item(),
            # 0.9 has moved beyond 0.6, which lies nearer to its return; -0.8 beyond -0.5, which lies farther off.
            "critic/vf_clipfrac": 0.5,
            "critic/vpred_mean": 0.25 * 0.1 + 0.25 * 0.9 - 0.5 * 0.8,
            "_weight": 1.0,
        }
    )
    out.loss.backward()
    assert outputs.grad is not None
    assert outputs.grad.tolist() == pytest.approx([0.25 * (0.1 - 1.0), 0.25 * (0.9 - 0.5), 0.0, 0.0, 0.0])


def test_value_loss_does_not_see_what_is_masked() -> None:
    batch = made(returns=[[math.nan, 1.0, math.inf], [math.nan, -1.0]])
    batch = batch.with_items(loss_mask=torch.tensor([False, True, False, False, True]))
    outputs = torch.zeros(5, requires_grad=True)
    out = ValueLoss()(DenseValueReader(outputs, batch), batch)
    out.loss.backward()
    assert math.isfinite(out.loss.item())
    assert outputs.grad is not None
    assert bool(outputs.grad.isfinite().all())
    padding = padding_like(batch)
    nothing = ValueLoss()(DenseValueReader(torch.zeros(padding.num_items, requires_grad=True), padding), padding)
    assert set(nothing.sums) == set(out.sums)
    assert (nothing.loss.item(), nothing.loss.requires_grad) == (0.0, True)


def test_value_loss_without_a_bound_needs_no_old_values() -> None:
    batch = made()
    batch = PackedBatch(batch.cu_seqlens, {k: v for k, v in batch.items.items() if k != "old_values"})
    outputs = torch.tensor([0.1, 0.9, 7.0, -0.8, 7.0])
    out = ValueLoss(clip_range=None)(DenseValueReader(outputs, batch), batch)
    assert float(out.sums["critic/vf_clipfrac"]) == 0.0
    assert float(out.loss) == pytest.approx(0.125 * 0.81 + 0.125 * 0.16 + 0.25 * 0.04)
    with pytest.raises(AssertionError, match="before the update"):
        ValueLoss()(DenseValueReader(outputs, batch), batch)
