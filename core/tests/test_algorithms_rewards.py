"""Rewards between the task and the advantages: the KL in them and its control, scaling, overlong responses; against the references."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
import torch
from algorithm_cases import flat, packed
from hypothesis import given
from hypothesis import strategies as st
from oracle import dapo
from oracle import kl as reference
from oracle.basics import floats
from oracle.cases import cases

from rlctl.algorithms.kl import kl_estimate
from rlctl.algorithms.rewards.kl_control import next_kl_coef
from rlctl.algorithms.rewards.kl_penalty import mean_kl, penalised_token_rewards, row_sums
from rlctl.algorithms.rewards.overlong import overlong_mask, overlong_penalty
from rlctl.algorithms.rewards.running import Moments, scaled

CASES = cases(80)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_kl_in_the_reward_is_that_of_the_paper(kind: str, dtype: torch.dtype) -> None:
    for one in CASES:
        batch = packed(one)
        mask, rows = batch.items["loss_mask"], batch.row_ids()
        kls = floats(reference.per_token(one.old_log_probs, one.ref_log_probs, one.masks, kind))
        kl = kl_estimate(flat(one.old_log_probs, dtype), flat(one.ref_log_probs, dtype), kind).double()
        scale = max(1.0, *(abs(k) for row in kls for k in row))
        wanted = flat(reference.penalised_rewards(one.token_rewards, kls, one.masks, 0.3))
        found = penalised_token_rewards(flat(one.token_rewards), kl, mask, 0.3)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-6 * scale)
        mean = mean_kl(kl, mask, rows, batch.num_rows)
        if mean is None:
            assert not bool(mask.any())
        else:
            assert mean == pytest.approx(reference.batch_kl(kls, one.masks), abs=1e-6 * scale)
        sums = row_sums(kl, mask, rows, batch.num_rows)
        assert torch.allclose(sums, torch.tensor([math.fsum(row) for row in kls]).double(), rtol=0, atol=1e-5 * scale)


def test_what_is_not_trained_is_not_read() -> None:
    mask, bad = torch.tensor([True, False, True]), torch.tensor([1.0, math.nan, 2.0]).double()
    found = penalised_token_rewards(bad, bad, mask, 0.5)
    assert found.tolist() == [0.5, 0.0, 1.0]
    assert mean_kl(bad, mask, torch.tensor([0, 0, 0]), 1) == 1.5
    assert mean_kl(bad, mask & False, torch.tensor([0, 0, 0]), 1) is None


@given(
    coef=st.floats(1e-4, 10),
    target=st.floats(0.01, 10),
    horizon=st.integers(10, 100_000),
    kls=st.lists(st.floats(-1, 20), max_size=6),
)
def test_the_adaptive_coefficient_is_that_of_the_paper(
    coef: float, target: float, horizon: int, kls: list[float]
) -> None:
    slow, fast = reference.AdaptiveController(coef, target, horizon), coef
    for kl in kls:
        fast = next_kl_coef(fast, kl, 8, target=target, horizon=horizon)
        assert fast == pytest.approx(slow.update(kl, 8), rel=1e-12)
        assert fast > 0
    assert next_kl_coef(coef, target, 8, target=target, horizon=horizon) == coef
    assert next_kl_coef(coef, 2 * target, 8, target=target, horizon=horizon) > coef
    assert next_kl_coef(coef, 0.5 * target, 8, target=target, horizon=horizon) < coef
    # A batch of many horizons takes 9 tenths away at most: never all, and never more than all.
    assert next_kl_coef(coef, 0.0, 100 * horizon, target=target, horizon=horizon) == coef * 0.1


@given(
    batches=st.lists(st.lists(st.floats(-1e3, 1e3), max_size=8), max_size=5),
    shift=st.sampled_from([0.0, 1e6]),
)
def test_running_moments_are_those_of_all_numbers_together(batches: list[list[float]], shift: float) -> None:
    """Also far from zero, where sums of squares would cancel."""
    seen: list[float] = []
    moments = Moments()
    for batch in batches:
        moved = [value + shift for value in batch]
        seen += moved
        moments = moments.merged(moved)
    assert moments.count == len(seen)
    if seen:
        assert moments.mean == pytest.approx(fmean(seen), rel=1e-9, abs=1e-9)
    if len(seen) > 1:
        assert moments.std == pytest.approx(stdev(seen), rel=1e-6, abs=1e-6 if shift else 1e-9)
    else:
        assert moments.std == 0.0


def test_scaled_rewards_have_mean_0_and_deviation_1_or_stay_where_nothing_differs() -> None:
    values = torch.tensor([3.0, 5.0, 10.0, -2.0]).double()
    found = scaled(values, Moments().merged(values), centre=True)
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(found.std()) == pytest.approx(1.0, abs=1e-12)
    halves = scaled(values, Moments().merged(values), centre=False) * float(values.std())
    assert torch.allclose(halves, values, rtol=0, atol=1e-12)
    same = torch.full((3,), 0.1).double()
    assert scaled(same, Moments().merged(same), centre=True).abs().max() < 1e-12
    assert torch.equal(scaled(same, Moments().merged(same), centre=False), same)
    assert torch.equal(scaled(same[:1], Moments(), centre=True), same[:1])
    assert len(scaled(same[:0], Moments().merged(same[:0]), centre=True)) == 0


@given(
    max_length=st.integers(1, 60),
    share=st.floats(0, 1),
    factor=st.floats(0.1, 3),
    lengths=st.lists(st.integers(0, 80), max_size=12),
)
def test_the_overlong_penalty_is_that_of_the_paper(
    max_length: int, share: float, factor: float, lengths: list[int]
) -> None:
    buffer = max(1, int(share * max_length))
    found = overlong_penalty(torch.tensor(lengths), max_length=max_length, buffer_length=buffer, factor=factor)
    wanted = [dapo.soft_overlong_punishment(n, max_len=max_length, cache=buffer, factor=factor) for n in lengths]
    assert found.tolist() == pytest.approx(wanted, abs=1e-9)


def test_truncated_rows_do_not_train() -> None:
    for one in CASES:
        batch = packed(one)
        found = overlong_mask(batch.items["loss_mask"], torch.tensor(one.truncated), batch.row_ids())
        wanted = dapo.overlong_filter(one.masks, one.truncated)
        assert found.tolist() == [kept for row in wanted for kept in row]
