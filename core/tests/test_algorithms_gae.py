"""Advantages and returns of a critic's values, and what the values explain, against the references."""

from __future__ import annotations

import math
import random

import pytest
import torch
from algorithm_cases import flat, offered
from oracle import token_advantages as reference
from oracle.cases import Case, cases
from oracle.value import explained_variance as wanted_variance

from rlctl.algorithms.advantages.gae import explained_variance, gae_advantages

CASES = [c for c in cases(150) if sum(map(sum, c.masks)) > 1]
assert len(CASES) > 100


def values_of(case: Case) -> list[list[float]]:
    numbers = random.Random(len(case.masks))
    return [[numbers.uniform(-2, 2) for _ in row] for row in case.masks]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0)])
def test_gae_is_that_of_the_paper(gamma: float, lam: float) -> None:
    for case in CASES:
        values, inputs = values_of(case), offered(case)
        found = gae_advantages(
            flat(case.token_rewards), flat(values), inputs["mask"], inputs["row_ids"], gamma=gamma, lam=lam
        )
        wanted = reference.gae(case.token_rewards, values, case.masks, gamma=gamma, lam=lam)
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.allclose(mine, flat(theirs), rtol=0, atol=1e-6), case


def test_what_is_not_trained_is_not_read() -> None:
    case = next(c for c in CASES if not all(map(all, c.masks)))
    inputs, values = offered(case), flat(values_of(case))
    mask, rewards = inputs["mask"], flat(case.token_rewards)
    plain = gae_advantages(rewards, values, mask, inputs["row_ids"])
    spoilt = [torch.where(mask, tensor, math.nan) for tensor in (rewards, values)]
    for a, b in zip(plain, gae_advantages(*spoilt, mask, inputs["row_ids"]), strict=True):
        assert torch.equal(a, b)
        assert not a[~mask].any()


def test_explained_variance_is_that_of_the_definition() -> None:
    seen = 0
    for case in CASES:
        values, inputs = values_of(case), offered(case)
        returns = reference.gae(case.token_rewards, values, case.masks, gamma=1.0, lam=1.0)[1]
        found = explained_variance(flat(values), flat(returns), inputs["mask"])
        wanted = wanted_variance(values, returns, case.masks)
        if math.isfinite(wanted) and math.isfinite(found):
            assert found == pytest.approx(wanted, abs=1e-6)
            seen += 1
    assert seen > 80
    same = torch.full((4,), 0.1)
    assert math.isnan(explained_variance(torch.arange(4.0), same, torch.ones(4, dtype=torch.bool)))
