"""Micro-batches: the token bound is hard, each row runs once, every rank runs the same number."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.errors import BatchError
from rlctl.microbatch import MicroBatchPlan, assign, check_lengths, min_count

lengths_strategy = st.lists(st.integers(1, 50), max_size=40)
plans = st.one_of(
    st.builds(MicroBatchPlan, max_rows=st.integers(1, 9)), st.builds(MicroBatchPlan, max_tokens=st.integers(50, 200))
)


@given(lengths_strategy, plans, st.integers(0, 5), st.integers(1, 4), st.data())
def test_bound_rows_and_count(
    lengths: list[int], plan: MicroBatchPlan, more: int, multiple_of: int, data: st.DataObject
) -> None:
    count = min_count(lengths, plan) + more
    prompts = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    groups = assign(lengths, plan, count, multiple_of, prompts)
    assert sorted(i for rows in groups for i in rows) == list(range(len(lengths)))
    assert len(groups) % multiple_of == 0
    assert max(count, 1) <= len(groups) < max(count, 1) + multiple_of
    for rows in groups:
        if plan.max_tokens is not None:
            assert sum(lengths[i] for i in rows) <= plan.max_tokens
        else:
            assert plan.max_rows is not None
            assert len(rows) <= plan.max_rows
    loads = [sum(lengths[i] for i in rows) for rows in groups]
    assert loads == sorted(loads, reverse=True), "the longest micro-batch runs first"


def test_balancing_never_breaks_the_bound() -> None:
    """Longest-first onto the lightest gives 3+2+2 | 3+2 here: over the bound, though 3+3 | 2+2+2 fits."""
    lengths = [3, 3, 2, 2, 2]
    plan = MicroBatchPlan(max_tokens=6)
    assert min_count(lengths, plan) == 2
    groups = assign(lengths, plan, 2)
    assert sorted(sorted(lengths[i] for i in rows) for rows in groups) == [[2, 2, 2], [3, 3]]


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=6), st.randoms())
def test_rows_that_fill_the_bound_exactly(bins: list[list[int]], random: Random) -> None:
    """Instances whose best packing leaves no room at all: the bound holds to the token."""
    bound = max(sum(b) for b in bins)
    lengths = [n for b in bins for n in [*b, *([bound - sum(b)] if sum(b) < bound else [])]]
    random.shuffle(lengths)
    plan = MicroBatchPlan(max_tokens=bound)
    for more in (0, 1):
        for rows in assign(lengths, plan, min_count(lengths, plan) + more):
            assert sum(lengths[i] for i in rows) <= bound


@given(st.lists(lengths_strategy, min_size=1, max_size=5), plans, st.integers(1, 4))
def test_ranks_agree_on_the_number(ranks: list[list[int]], plan: MicroBatchPlan, multiple_of: int) -> None:
    agreed = max(min_count(lengths, plan) for lengths in ranks)
    counts = {len(assign(lengths, plan, agreed, multiple_of)) for lengths in ranks}
    assert len(counts) == 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(50, 200))
def test_token_count_is_near_the_fewest_possible(lengths: list[int], bound: int) -> None:
    found = min_count(lengths, MicroBatchPlan(max_tokens=bound))
    fewest = -(-sum(lengths) // bound)
    # First-fit-decreasing needs at most 11/9 OPT + 6/9 bins (Dosa 2007), and OPT <= 2 * ceil(total / bound).
    assert fewest <= found <= 11 / 9 * (2 * fewest) + 1


def test_first_fit_decreasing_may_need_one_more() -> None:
    """44+24+22+10 fills 100 three times over; the longest first makes 44+44+10, and in the end a fourth."""
    plan = MicroBatchPlan(max_tokens=100)
    lengths = [44, 24, 22, 10] * 3
    assert min_count(lengths, plan) == 4
    assert all(sum(lengths[i] for i in rows) <= 100 for rows in assign(lengths, plan, 4))


def test_bins_with_room_for_nothing_are_passed_over() -> None:
    """What first-fit-decreasing skips for speed changes no answer."""
    random = Random(3)
    for _ in range(200):
        bound = random.randrange(20, 60)
        lengths = [random.randrange(1, bound + 1) for _ in range(random.randrange(40))]
        room: list[int] = []
        for n in sorted(lengths, reverse=True):
            at = next((b for b in range(len(room)) if room[b] >= n), None)
            if at is None:
                room.append(bound - n)
            else:
                room[at] -= n
        assert min_count(lengths, MicroBatchPlan(max_tokens=bound)) == len(room)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 3))
def test_groups_stay_in_one_micro_batch(sizes: list[int], per_batch: int, more: int) -> None:
    """Groups of rows that fit whole are whole: here no micro-batch is ever too full for them."""
    prompts = [g for g, size in enumerate(sizes) for _ in range(size)]
    lengths = [5] * len(prompts)
    plan = MicroBatchPlan(max_tokens=5 * max(sizes) * per_batch)
    bins = assign(lengths, plan, max(min_count(lengths, plan) + more, len(sizes)), groups=prompts)
    assert sum(len({prompts[i] for i in rows}) for rows in bins) == len(sizes)


def test_groups_are_taken_apart_for_the_bound_alone() -> None:
    """Three groups of four rows in two micro-batches of six rows: two are whole, the third is split."""
    prompts = [0, 1, 2] * 4
    plan = MicroBatchPlan(max_tokens=60)
    bins = assign([10] * 12, plan, 2, groups=prompts)
    assert [len(rows) for rows in bins] == [6, 6]
    assert sum(len({prompts[i] for i in rows}) for rows in bins) == 4
    # A group longer than a micro-batch is cut into as few as it needs.
    bins = assign([10] * 13, MicroBatchPlan(max_tokens=60), 3, groups=[7] * 13)
    assert sorted(len(rows) for rows in bins) == [1, 6, 6]


def test_groups_that_fit_nowhere_leave_it_to_the_rows() -> None:
    """Whole groups first leaves no room for the loose rows here; the rows by themselves fit."""
    lengths, prompts = [3, 3, 2, 2, 2], [0, 1, 2, 2, 0]
    bins = assign(lengths, MicroBatchPlan(max_tokens=6), 2, groups=prompts)
    assert sorted(sorted(lengths[i] for i in rows) for rows in bins) == [[2, 2, 2], [3, 3]]


def test_fixed_rows_bring_groups_together() -> None:
    plan = MicroBatchPlan(max_rows=2)
    assert assign([5] * 6, plan, 3, groups=[0, 1, 2, 2, 1, 0]) == [[0, 5], [1, 4], [2, 3]]
    assert assign([5] * 6, plan, 3) == [[0, 1], [2, 3], [4, 5]]


def test_a_rank_without_rows_still_runs() -> None:
    plan = MicroBatchPlan(max_tokens=10)
    assert min_count([], plan) == 0
    assert assign([], plan, 3) == [[], [], []]
    assert assign([], plan, 0) == [[]]


def test_fixed_rows_stay_in_order() -> None:
    groups = assign([5, 5, 5, 5, 5], MicroBatchPlan(max_rows=2), 3)
    assert groups == [[0, 1], [2, 3], [4]]


def test_over_long_rows_are_named() -> None:
    plan = MicroBatchPlan(max_tokens=8)
    check_lengths([8, 1], plan)
    with pytest.raises(BatchError, match="2 rows are longer") as caught:
        min_count([3, 9, 8, 12], plan)
    assert "1 (9 tokens)" in str(caught.value)
    assert "3 (12 tokens)" in str(caught.value)
    assert "at most 8" in str(caught.value)
    assert caught.value.next
    with pytest.raises(BatchError, match="1 row is longer"):
        check_lengths([9], plan)


def test_a_plan_has_exactly_one_bound() -> None:
    for bounds in ({}, {"max_rows": 2, "max_tokens": 5}, {"max_rows": 0}, {"max_tokens": -1}):
        with pytest.raises(AssertionError):
            MicroBatchPlan(**bounds)


def test_too_few_micro_batches_are_our_own_fault() -> None:
    with pytest.raises(AssertionError):
        assign([5, 5, 5], MicroBatchPlan(max_tokens=5), 2)
