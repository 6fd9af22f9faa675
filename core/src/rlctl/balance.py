"""Rows to data parallel ranks and micro-batches by their work: the largest differencing method.

Karmarkar and Karp, "The differencing method of set partitioning" (1982), in the form for k sets: two partial partitions
are merged by laying the largest set of the one on the smallest of the other, always the two with the largest spread.
Pure Python: a controller plans thousands of rows for a thousand ranks without torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

_DENSE = 65_536
"""Items x sets above which items enter k at a time: the work is then linear in the items."""

Partition = list[tuple[int, tuple[int, ...]]]
"""k (sum, items) in descending order of sum."""


def karmarkar_karp(weights: Sequence[int], k: int, *, equal_size: bool = False) -> list[list[int]]:
    """Indices of ``weights`` in ``k`` sets of nearly equal sums, items ascending in each; some sets may be empty.

    Args:
        equal_size: sets hold equal numbers of items, within one.
    """
    assert k >= 1, k
    if k == 1:
        return [list(range(len(weights)))]
    # Ties by index: every process that plans the same rows plans them alike.
    order: list[int | None] = sorted(range(len(weights)), key=lambda i: (-weights[i], i))  # type: ignore[assignment]
    grouped = equal_size or len(weights) * k > _DENSE
    if grouped:
        order += [None] * (-len(order) % k)  # weightless fillers: sets of equal size differ by at most one real item
    step = k if grouped else 1
    heap: list[tuple[int, int, Partition]] = []
    for start in range(0, len(order), step):
        chunk = order[start : start + step]
        sets: Partition = [(0, ()) if i is None else (weights[i], (i,)) for i in chunk]
        sets += [(0, ())] * (k - len(sets))
        heap.append((sets[-1][0] - sets[0][0], start, sets))
    if not heap:
        return [[] for _ in range(k)]
    heapq.heapify(heap)
    serial = len(order)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda s: -s[0])
        serial += 1
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
    return [sorted(items) for _, items in heap[0][2]]


def split_rows(lengths: Sequence[int], num_parts: int, *, balance: bool = True) -> list[list[int]]:
    """Rows of each data parallel rank: equal numbers of rows within one, and nearly equal tokens if ``balance``.

    Without ``balance`` rows stay in order, cut into consecutive parts.
    """
    if balance:
        return karmarkar_karp(lengths, num_parts, equal_size=True)
    short, long = divmod(len(lengths), num_parts)
    bounds = [i * short + min(i, long) for i in range(num_parts + 1)]
    return [list(range(a, b)) for a, b in pairwise(bounds)]


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
