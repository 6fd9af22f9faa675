"""Rows to data parallel ranks and micro-batches by their work: the largest differencing method.

Karmarkar and Karp, "The differencing method of set partitioning" (1982), in the form for k sets: two partial partitions
are merged by laying the largest set of the one on the smallest of the other, always the two with the largest spread.
Pure Python: a controller plans thousands of rows for a thousand ranks without torch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

_DENSE = 16_384
"""Items x sets above which items enter k at a time: the work is then linear in the items."""

SLACK = 0.05
"""How much longer than the best balance the longest part may become so that groups of rows stay whole: what an engine
loses that does not compute a shared prompt once. One that does saves more (docs/benchmarks.md has figures)."""

_Partition = list[tuple[int, Any]]
"""k (sum, items) in descending order of sum; the items as a tree of pairs, None where there is none."""


def karmarkar_karp(weights: Sequence[int], k: int, *, equal_size: bool = False) -> list[list[int]]:
    """Indices of ``weights`` in ``k`` sets of nearly equal sums, items ascending in each; some sets may be empty.

    The same weights give the same sets in every process. There is no guarantee to be near the optimum: with
    ``equal_size`` a difference of the largest weight can remain.

    Args:
        equal_size: sets hold equal numbers of items, within one.
    """
    return [sorted(_leaves(tree)) for _, tree in _difference(weights, k, equal_size)]


def _difference(weights: Sequence[int], k: int, equal_size: bool) -> _Partition:
    assert k >= 1, k
    # A reversed sort is stable too: ties go by index, so every process that plans the same rows plans them alike.
    order: list[int | None] = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)  # type: ignore[assignment]
    grouped = equal_size or len(weights) * k > _DENSE
    if grouped:
        order += [None] * (-len(order) % k)  # weightless fillers: sets of equal size differ by at most one real item
    step = k if grouped else 1
    heap: list[tuple[int, int, _Partition]] = []
    for start in range(0, len(order), step):
        sets: _Partition = [(0, None) if i is None else (weights[i], i) for i in order[start : start + step]]
        sets += [(0, None)] * (k - len(sets))
        heap.append((sets[-1][0] - sets[0][0], start, sets))
    if not heap:
        return [(0, None)] * k
    heapq.heapify(heap)
    serial = len(order)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged: _Partition = [(x + y, (s, t)) for (x, s), (y, t) in zip(a, reversed(b), strict=True)]
        merged.sort(key=itemgetter(0), reverse=True)
        serial += 1
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
    return heap[0][2]


def _leaves(tree: Any) -> list[int]:
    """The items of a tree. Without recursion: the tree of many light items is as deep as they are many."""
    found: list[int] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack += node
        elif node is not None:
            found.append(node)
    return found


def split_rows(
    lengths: Sequence[int], num_parts: int, *, balance: bool = True, groups: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Rows of each data parallel rank, ascending: equal numbers of rows within one.

    Without ``balance`` rows stay in order, cut into consecutive parts. With it tokens are balanced too: the longest part
    is never longer than in that cut.

    Args:
        groups: what each row belongs to (rows with one prompt). Groups then stay whole as far as the longest part
            becomes at most ``SLACK`` longer for it.
    """
    bounds = list(accumulate(_sizes(len(lengths), num_parts), initial=0))
    in_order = lambda: [list(range(a, b)) for a, b in pairwise(bounds)]
    if not balance or num_parts == 1:
        return in_order()
    before = list(accumulate(lengths, initial=0))
    plain = max(before[b] - before[a] for a, b in pairwise(bounds))
    sets = _difference(lengths, num_parts, equal_size=True)
    by_tokens = lambda: [sorted(_leaves(tree)) for _, tree in sets]
    if groups is None:
        return in_order() if plain <= sets[0][0] else by_tokens()
    candidates = [(plain, in_order), (sets[0][0], by_tokens)]
    by_groups = _by_groups(lengths, groups, num_parts)
    if by_groups is not None:
        candidates.append((_longest(lengths, by_groups), lambda: by_groups))
    limit = min(most for most, _ in candidates) * (1 + SLACK)
    fitting = [(most, make()) for most, make in candidates if most <= limit]
    if len(fitting) == 1:
        return fitting[0][1]
    return min(fitting, key=lambda found: (num_pieces(groups, found[1]), found[0]))[1]


def num_pieces(groups: Sequence[Hashable], parts: Iterable[Iterable[int]]) -> int:
    """Into how many pieces ``parts`` cut the groups, over all: what each part has of a group is one piece."""
    return sum(len(set(map(groups.__getitem__, part))) for part in parts)


def _by_groups(lengths: Sequence[int], groups: Sequence[Hashable], num_parts: int) -> list[list[int]] | None:
    """Whole groups of the commonest size balanced over the parts, as many as every part has room for; the rest of the
    rows fill up, in order of their groups, the shortest consecutive piece to the part that is longest so far. None where
    no part has room for a group."""
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    sizes = _sizes(len(lengths), num_parts)
    common = Counter(map(len, members.values())).most_common(1)[0][0] if members else 1
    whole = [rows for rows in members.values() if len(rows) == common]
    each = min(len(whole) // num_parts, sizes[-1] // common)
    if each == 0:
        return None
    whole = whole[: each * num_parts]
    tokens = lambda rows: sum(map(lengths.__getitem__, rows))
    totals = [tokens(rows) for rows in whole]
    dealt = karmarkar_karp(totals, num_parts, equal_size=True)
    parts = [[row for i in part for row in whole[i]] for part in dealt]
    taken = {row for rows in whole for row in rows}
    rest = [row for rows in members.values() for row in rows if row not in taken]
    pieces = _cut(rest, [size - each * common for size in sizes])
    parts.sort(key=tokens, reverse=True)
    pieces.sort(key=tokens)
    return [sorted(part + piece) for part, piece in zip(parts, pieces, strict=True)]


def _sizes(total: int, num_parts: int) -> list[int]:
    """``total`` as ``num_parts`` numbers that differ by at most one, the larger first."""
    short, more = divmod(total, num_parts)
    return [short + (i < more) for i in range(num_parts)]


def _cut(rows: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    return [list(rows[a:b]) for a, b in pairwise(accumulate(sizes, initial=0))]


def _longest(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> int:
    return max(sum(map(lengths.__getitem__, part)) for part in parts)


def seqlen_metrics(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> dict[str, float]:
    """``global_seqlen/*``: tokens a data parallel rank gets, cut in order (``min``, ``max``, ``minmax_diff``) and as
    they were split (``balanced_min``, ``balanced_max``); ``mean`` is what perfect balance would give."""
    plain = [sum(lengths[i] for i in part) for part in split_rows(lengths, len(parts), balance=False)]
    balanced = [sum(lengths[i] for i in part) for part in parts]
    return {
        "global_seqlen/min": float(min(plain)),
        "global_seqlen/max": float(max(plain)),
        "global_seqlen/minmax_diff": float(max(plain) - min(plain)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": sum(balanced) / len(balanced),
    }
