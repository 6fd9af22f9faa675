"""Every advantage estimator against the references, and what must not change an advantage."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import advantages, flat, offered
from hypothesis import given
from hypothesis import strategies as st
from oracle import advantages as reference
from oracle import token_advantages as token_reference
from oracle.cases import Case, case, cases

from rlctl.algorithms.table import ADVANTAGES

CASES = cases(150, min_group=2)
Wanted = Callable[[Case], Any]

REFERENCES: dict[str, tuple[dict[str, Any], Wanted]] = {
    "grpo": ({}, lambda c: reference.grpo(c.rewards, c.masks, c.groups)),
    "grpo without std": (
        {"norm_adv_by_std_in_grpo": False},
        lambda c: reference.grpo(c.rewards, c.masks, c.groups, norm_by_std=False),
    ),
    "dr_grpo": ({}, lambda c: reference.dr_grpo(c.rewards, c.masks, c.groups)),
    "grpo_passk": ({}, lambda c: reference.grpo_passk(c.rewards, c.masks, c.groups)),
    "grpo_passk without std": (
        {"norm_adv_by_std_in_grpo": False},
        lambda c: reference.grpo_passk(c.rewards, c.masks, c.groups, norm_by_std=False),
    ),
    "rloo": ({}, lambda c: reference.rloo(c.rewards, c.masks, c.groups)),
    "reinforce_plus_plus": ({}, lambda c: token_reference.reinforce_plus_plus(c.token_rewards, c.masks, gamma=1.0)),
    "reinforce_plus_plus discounted": (
        {"gamma": 0.9},
        lambda c: token_reference.reinforce_plus_plus(c.token_rewards, c.masks, gamma=0.9),
    ),
    "reinforce_plus_plus_baseline": (
        {},
        lambda c: reference.reinforce_plus_plus_baseline(c.rewards, c.masks, c.groups),
    ),
    "remax": ({}, lambda c: token_reference.remax(c.token_rewards, c.masks, c.greedy_rewards)),
    "opo": ({}, lambda c: reference.opo(c.rewards, c.masks, c.groups)),
    "gpg": ({}, lambda c: reference.gpg(c.rewards, c.masks, c.groups)),
    "gdpo": (
        {},
        lambda c: reference.gdpo(c.components, c.masks, c.groups, weights=c.component_weights),
    ),
    "optimal_token_baseline": (
        {},
        lambda c: token_reference.optimal_token_baseline(
            c.token_rewards, c.masks, c.groups, c.old_log_probs, c.sum_pi_squared
        ),
    ),
}


def test_every_estimator_is_compared() -> None:
    # gae has a file and tests of its own.
    assert {name.partition(" ")[0] for name in REFERENCES} == set(ADVANTAGES) - {"gae"}


@pytest.mark.parametrize("variant", REFERENCES)
def test_an_estimator_equals_its_paper(variant: str) -> None:
    settings, wanted = REFERENCES[variant]
    name = variant.partition(" ")[0]
    for one in CASES:
        found = advantages(name, {**offered(one), "token_rewards": flat(one.token_rewards)}, **settings)
        want = wanted(one)
        parts = want if isinstance(want, tuple) else (want,)
        assert set(found) == ({"advantages", "returns"} if len(parts) == 2 else {"advantages"})
        for got, numbers in zip(found.values(), parts, strict=True):
            # The estimators work in float64; what is handed on is float32, half an ulp of which is 6e-8 relative.
            torch.testing.assert_close(got.double(), flat(numbers), rtol=1e-7, atol=1e-7, msg=f"{variant} {one.seed}")


def test_outcome_rewards_lie_at_the_last_trained_token() -> None:
    """With nothing but scores, the returns of a row are its score, wherever its trained tokens are."""
    for one in CASES[:30]:
        sparse = [[0.0] * len(row) for row in one.masks]
        for row, mask in enumerate(one.masks):
            if any(mask):
                sparse[row][max(t for t, kept in enumerate(mask) if kept)] = one.rewards[row]
        inputs = offered(one)
        assert torch.equal(inputs["token_rewards"], flat(sparse))
        found = advantages("remax", inputs)
        per_row = torch.tensor(one.rewards)[inputs["row_ids"]]
        assert torch.equal(found["returns"], torch.where(inputs["mask"], per_row, 0.0))


GROUPED = [name for name, spec in ADVANTAGES.items() if spec.groups]


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_has_no_advantage(name: str) -> None:
    """It has nothing to be compared with, and leaves the other groups as they are where these do not share a scale."""
    for one in cases(20, start=500, max_group=1):
        assert not advantages(name, {**offered(one), "token_rewards": flat(one.token_rewards)})["advantages"].any()
    if name in ("gpg", "gdpo", "reinforce_plus_plus_baseline"):
        return  # a batch-wide scale
    for one in cases(40, start=600):
        alone = {g for g in one.groups if one.groups.count(g) == 1}
        rows = [i for i, g in enumerate(one.groups) if g not in alone]
        if not rows or not alone:
            continue
        whole = advantages(name, offered(one))["advantages"].split(one.lengths)
        part = advantages(name, offered(rows_of(one, rows)))["advantages"]
        assert torch.equal(torch.cat([whole[i] for i in rows]), part), one.seed


def rows_of(one: Case, rows: list[int]) -> Case:
    """The case with these rows in this order."""
    values = {}
    for name, value in vars(one).items():
        if isinstance(value, list) and name not in ("components", "component_weights"):
            values[name] = [value[i] for i in rows]
    return replace(one, components=[[c[i] for i in rows] for c in one.components], **values)


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"gae"}))
def test_the_order_of_rows_changes_nothing(name: str) -> None:
    for one in CASES[:40]:
        order = list(range(len(one.rewards)))
        random.Random(one.seed).shuffle(order)
        before = advantages(name, offered(one))["advantages"].split(one.lengths)
        after = advantages(name, offered(rows_of(one, order)))["advantages"]
        torch.testing.assert_close(after, torch.cat([before[i] for i in order]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"gae"}))
def test_tokens_that_are_not_trained_change_nothing(name: str) -> None:
    """Some behind each row, as filling is, and whatever stands there."""
    for one in CASES[:40]:
        longer = {}
        for field, value in vars(one).items():
            if (
                isinstance(value, list)
                and isinstance(value[0], list)
                and field not in ("components", "logits", "ref_logits")
            ):
                end = [False] * 3 if field == "masks" else [-7.0, -0.5, -3.0]
                longer[field] = [[*row, *end] for row in value]
        before = advantages(name, offered(one))["advantages"].split(one.lengths)
        after = advantages(name, offered(replace(one, **longer)))["advantages"].split([n + 3 for n in one.lengths])
        for a, b in zip(before, after, strict=True):
            assert not b[len(a) :].any()
            torch.testing.assert_close(b[: len(a)], a, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "grpo_passk", "opo"])
@given(seed=st.integers(0, 10**6), steps=st.integers(-800, 800))
def test_a_shift_of_all_rewards_changes_nothing(name: str, seed: int, steps: int) -> None:
    one = case(seed, min_group=2)
    moved = replace(one, rewards=[r + steps / 8 for r in one.rewards])
    before, after = (advantages(name, offered(c))["advantages"] for c in (one, moved))
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_the_scale_of_a_reward_matters_only_where_no_deviation_divides(seed: int, scale: float) -> None:
    one = case(seed, min_group=2)
    scaled = replace(
        one,
        rewards=[scale * r for r in one.rewards],
        components=[[scale * r for r in one.components[0]], *one.components[1:]],
    )
    for name in ("grpo", "gdpo"):
        before, after = (advantages(name, offered(c))["advantages"] for c in (one, scaled))
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)  # eps stands beside the deviation
    before, after = (advantages("rloo", offered(c))["advantages"] for c in (one, scaled))
    torch.testing.assert_close(after, scale * before, rtol=1e-6, atol=1e-7)


def test_rows_without_a_trained_token_and_batches_of_nothing_are_defined() -> None:
    one = case(3, min_group=2)
    nothing = replace(one, masks=[[False] * n for n in one.lengths])
    for name in ADVANTAGES.keys() - {"gae"}:
        assert not advantages(name, offered(nothing))["advantages"].any(), name
