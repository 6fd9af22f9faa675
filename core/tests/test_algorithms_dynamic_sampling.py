"""Which groups teach something, against a loop over the definition."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.basics import members
from oracle.cases import cases

from rlctl.algorithms.dynamic_sampling import has_signal


def by_hand(values: list[float], groups: list[int], trained: list[bool]) -> list[bool]:
    out = [False] * len(values)
    for rows in members(groups).values():
        found = [values[i] for i in rows]
        for i in rows:
            out[i] = any(v != found[0] for v in found) and any(trained[j] for j in rows)
    return out


def found(values: list[float], groups: list[int], trained: list[bool] | None = None) -> list[bool]:
    places = torch.tensor(groups, dtype=torch.long).unique(return_inverse=True)[1]
    mask = None if trained is None else torch.tensor(trained, dtype=torch.bool)
    return has_signal(torch.tensor(values, dtype=torch.float64), places, mask).tolist()


def test_groups_of_random_batches() -> None:
    kept = 0
    for one in cases(120):
        every = [True] * len(one.groups)
        assert found(one.rewards, one.groups) == by_hand(one.rewards, one.groups, every)
        whole = [not cut for cut in one.truncated]
        assert found(one.rewards, one.groups, whole) == by_hand(one.rewards, one.groups, whole)
        kept += sum(found(one.rewards, one.groups))
    assert kept > 100


@given(
    rows=st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.3, 1.0]), st.integers(0, 3)), max_size=10),
    shift=st.integers(-4, 4),
    seed=st.integers(0, 99),
)
def test_order_and_shift_of_the_rewards_do_not_matter(rows: list[tuple[float, int]], shift: int, seed: int) -> None:
    values, groups = [v for v, _ in rows], [g for _, g in rows]
    plain = found(values, groups)
    assert plain == found([v + shift for v in values], groups)
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    assert found([values[i] for i in order], [groups[i] for i in order]) == [plain[i] for i in order]


def test_nothing_and_a_group_of_one() -> None:
    assert found([], []) == []
    assert found([0.5], [7]) == [False]
    assert found([0.5, 0.1, 0.2], [7, 3, 3]) == [False, True, True]
