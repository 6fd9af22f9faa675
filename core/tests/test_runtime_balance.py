"""Rows over ranks: every row once, equal counts, near-equal tokens, whole groups where they cost next to nothing."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.balance import SLACK, karmarkar_karp, num_pieces, seqlen_metrics, split_rows

weights_strategy = st.lists(st.integers(0, 60), max_size=40)


def sums(weights: list[int], sets: list[list[int]]) -> list[int]:
    return [sum(weights[i] for i in s) for s in sets]


@given(weights_strategy, st.integers(1, 12), st.booleans())
def test_karmarkar_karp_partitions_within_the_largest_weight(weights: list[int], k: int, equal_size: bool) -> None:
    sets = karmarkar_karp(weights, k, equal_size=equal_size)
    assert len(sets) == k
    assert sorted(i for s in sets for i in s) == list(range(len(weights)))
    assert all(s == sorted(s) for s in sets)
    if equal_size:
        sizes = [len(s) for s in sets]
        assert max(sizes) - min(sizes) <= 1
    # Merging the largest set of one partition with the smallest of another never makes a larger spread than they had.
    assert max(sums(weights, sets)) - min(sums(weights, sets)) <= max(weights, default=0)


def test_karmarkar_karp_on_its_textbook_example() -> None:
    """8, 7, 6, 5, 4 in two sets: differencing comes to 16 | 14, where 15 | 15 is the optimum."""
    assert sorted(sums([8, 7, 6, 5, 4], karmarkar_karp([8, 7, 6, 5, 4], 2))) == [14, 16]


@given(st.lists(st.integers(1, 60), min_size=2, max_size=9))
def test_karmarkar_karp_is_near_the_best_two_sets(weights: list[int]) -> None:
    """For two sets it is at most 7/6 of the optimum (Fischetti and Martello 1987)."""
    found = max(sums(weights, karmarkar_karp(weights, 2)))
    halves = (combinations(range(len(weights)), r) for r in range(len(weights) + 1))
    best = min(max(s, sum(weights) - s) for c in halves for s in [sum(weights[i] for i in h) for h in c])
    assert best <= found <= 7 / 6 * best


def test_many_light_items_are_laid_out_without_recursion() -> None:
    random = Random(1)
    weights = [random.randrange(1, 9) for _ in range(5000)]
    for k in (2, 3):
        found = sums(weights, karmarkar_karp(weights, k))
        assert max(found) - min(found) <= 1


@pytest.mark.parametrize("num_parts", [64, 256, 1024])
def test_a_large_batch_is_balanced_to_a_few_tokens(num_parts: int) -> None:
    random = Random(0)
    lengths = [max(50, min(1500, int(random.gauss(600, 250)))) for _ in range(4096)]
    parts = split_rows(lengths, num_parts)
    assert {len(p) for p in parts} == {4096 // num_parts}
    limit = {64: 1.001, 256: 1.005, 1024: 1.07}[num_parts]
    assert max(sums(lengths, parts)) <= limit * sum(lengths) / num_parts


@given(weights_strategy, st.integers(1, 9), st.booleans())
def test_split_rows_never_makes_the_longest_part_longer(lengths: list[int], num_parts: int, balance: bool) -> None:
    parts = split_rows(lengths, num_parts, balance=balance)
    assert sorted(i for p in parts for i in p) == list(range(len(lengths)))
    assert {len(p) for p in parts} <= {len(lengths) // num_parts, -(-len(lengths) // num_parts)}
    plain = split_rows(lengths, num_parts, balance=False)
    assert [i for p in plain for i in p] == list(range(len(lengths)))
    assert max(sums(lengths, parts)) <= max(sums(lengths, plain))


def test_rows_stay_in_order_where_that_is_balanced() -> None:
    assert split_rows([5] * 6, 3) == [[0, 1], [2, 3], [4, 5]]
    assert split_rows([9, 1, 1, 9], 2) == [[0, 1], [2, 3]]


def test_fewer_rows_than_parts() -> None:
    parts = split_rows([3, 4], 4)
    assert sorted(parts) == [[], [], [0], [1]]
    assert split_rows([], 2) == [[], []]


@given(weights_strategy, st.integers(1, 9), st.randoms(use_true_random=False))
def test_equal_rows_give_equal_splits(lengths: list[int], num_parts: int, random: Random) -> None:
    """Ranks plan alike, whatever kind of sequence they hold the lengths in."""
    groups = [random.randrange(5) for _ in lengths]
    for kind in (tuple, list):
        assert split_rows(kind(lengths), num_parts) == split_rows(lengths, num_parts)
        assert split_rows(kind(lengths), num_parts, groups=kind(groups)) == split_rows(
            lengths, num_parts, groups=groups
        )


# ---- groups ----------------------------------------------------------------------------------------------------------
@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 6)), max_size=50), st.integers(1, 9))
def test_groups_cost_little_balance_and_no_row(rows: list[tuple[int, int]], num_parts: int) -> None:
    lengths, groups = [n for n, _ in rows], [g for _, g in rows]
    parts = split_rows(lengths, num_parts, groups=groups)
    assert sorted(i for p in parts for i in p) == list(range(len(lengths)))
    assert {len(p) for p in parts} <= {len(lengths) // num_parts, -(-len(lengths) // num_parts)}
    plain = split_rows(lengths, num_parts)
    assert max(sums(lengths, parts)) <= (1 + SLACK) * max(sums(lengths, plain))
    if max(sums(lengths, parts)) > max(sums(lengths, plain)):
        assert num_pieces(groups, parts) < num_pieces(groups, plain), "balance is given up for whole groups alone"


def grpo(num_groups: int, n: int, seed: int = 0, prompt: int = 150, response: int = 450) -> tuple[list[int], list[int]]:
    """Lengths and groups of samples: answers to one prompt are of like lengths."""
    random = Random(seed)
    lengths, groups = [], []
    for group in range(num_groups):
        base = random.lognormvariate(0, 0.3)
        for _ in range(n):
            lengths.append(prompt + int(base * random.lognormvariate(0, 0.5) * response))
            groups.append(group)
    return lengths, groups


@pytest.mark.parametrize(("num_groups", "n", "num_parts"), [(128, 8, 8), (128, 8, 16), (64, 16, 8), (32, 4, 8)])
def test_whole_groups_where_they_divide(num_groups: int, n: int, num_parts: int) -> None:
    lengths, groups = grpo(num_groups, n)
    order = list(range(len(lengths)))
    for _ in range(2):
        parts = split_rows([lengths[i] for i in order], num_parts, groups=[groups[i] for i in order])
        assert num_pieces([groups[i] for i in order], parts) == num_groups
        Random(1).shuffle(order)  # a later epoch has the rows mixed


def test_groups_that_do_not_divide_are_cut_few_times() -> None:
    lengths, groups = grpo(13, 8)
    parts = split_rows(lengths, 4, groups=groups)
    assert {len(p) for p in parts} == {26}
    # Three cuts between four parts; by tokens alone nearly every part has rows of every group.
    assert num_pieces(groups, parts) == 13 + 3
    assert num_pieces(groups, split_rows(lengths, 4)) > 40


def test_groups_give_way_to_balance() -> None:
    """One long group a part would make that part twice as long: its rows are spread."""
    lengths, groups = [100] * 4 + [50] * 12, [i // 4 for i in range(16)]
    parts = split_rows(lengths, 4, groups=groups)
    assert sums(lengths, parts) == [250] * 4
    assert num_pieces(groups, parts) > 4


def test_without_balance_groups_change_nothing() -> None:
    lengths, groups = grpo(8, 3)
    assert split_rows(lengths, 5, balance=False, groups=groups) == split_rows(lengths, 5, balance=False)


# ---- metrics ---------------------------------------------------------------------------------------------------------
def test_seqlen_metrics_tell_both_splits() -> None:
    lengths = [9, 8, 1, 2]
    metrics = seqlen_metrics(lengths, split_rows(lengths, 2))
    assert metrics == {
        "global_seqlen/min": 3.0,
        "global_seqlen/max": 17.0,
        "global_seqlen/minmax_diff": 14.0,
        "global_seqlen/balanced_min": 10.0,
        "global_seqlen/balanced_max": 10.0,
        "global_seqlen/mean": 10.0,
    }
    off = seqlen_metrics(lengths, split_rows(lengths, 2, balance=False))
    assert (off["global_seqlen/balanced_max"], off["global_seqlen/max"]) == (17.0, 17.0)
