"""A local mini-batch into micro-batches: fixed rows, or a token budget that is a hard bound. Pure Python.

The number of micro-batches must be the same on every data parallel rank, or one rank runs a collective that its peers
do not. So planning has two steps: :func:`min_count` on each rank, an agreement on the largest, then
:func:`assign`; a rank short of rows gets empty micro-batches, which run with zero weight.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rlctl.balance import karmarkar_karp
from rlctl.errors import BatchError


@dataclass(frozen=True)
class MicroBatchPlan:
    """Bounds of one micro-batch; exactly one of the two is set.

    Args:
        max_rows: at most this many rows.
        max_tokens: at most this many tokens on this rank's replica (already multiplied by usp and cp). A hard bound.
    """

    max_rows: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        assert (self.max_rows is None) != (self.max_tokens is None), "set exactly one of max_rows and max_tokens"
        assert (self.max_rows or self.max_tokens or 0) > 0, "the bound must be positive"


def check_lengths(lengths: Sequence[int], plan: MicroBatchPlan) -> None:
    """Refuse rows that no micro-batch can hold.

    Raises:
        BatchError: names the indices of the rows over the token bound.
    """
    if plan.max_tokens is None:
        return
    over = [i for i, n in enumerate(lengths) if n > plan.max_tokens]
    if over:
        shown = ", ".join(f"{i} ({lengths[i]} tokens)" for i in over[:8])
        raise BatchError(
            f"{len(over)} {'row is' if len(over) == 1 else 'rows are'} longer than a micro-batch may be",
            found=f"rows {shown}{' ...' if len(over) > 8 else ''}",
            wanted=f"at most {plan.max_tokens} tokens a row",
            next="raise actor.max_tokens_per_device, or lower data.max_prompt_length / data.max_response_length",
        )


def _first_fit_decreasing(lengths: Sequence[int], bound: int) -> list[list[int]]:
    """Bins of items, the longest first into the first bin with room.

    At most 11/9 of the fewest possible bins plus 6/9 (Dosa 2007): sometimes one more micro-batch than is needed, never one
    over the bound.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    shortest = min(lengths, default=0)
    first = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        while first < len(bins) and room[first] < shortest:
            first += 1  # nothing fits there any more
        at = next((b for b in range(first, len(bins)) if room[b] >= lengths[i]), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(bound)
        bins[at].append(i)
        room[at] -= lengths[i]
    return bins


def min_count(lengths: Sequence[int], plan: MicroBatchPlan) -> int:
    """Micro-batches that this rank needs: as few as first-fit-decreasing finds (0 without rows).

    Raises:
        BatchError: a row is over the token bound.
    """
    check_lengths(lengths, plan)
    if plan.max_rows is not None:
        return -(-len(lengths) // plan.max_rows)
    assert plan.max_tokens is not None
    return len(_first_fit_decreasing(lengths, plan.max_tokens))


def assign(
    lengths: Sequence[int],
    plan: MicroBatchPlan,
    count: int,
    multiple_of: int = 1,
    groups: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Row indices of each micro-batch, ``count`` rounded up to ``multiple_of``; some may be empty.

    Fixed rows stay in order. Under a token bound, rows are balanced by tokens when that keeps the bound, else packed
    first-fit-decreasing, which defined the count.

    Args:
        groups: what each row belongs to (rows with one prompt). Groups are then kept in one micro-batch as far as bound
            and count allow; they never make it more micro-batches.
    """
    count = max(1, -(-max(count, 1) // multiple_of) * multiple_of)
    assert count >= min_count(lengths, plan), "fewer micro-batches than the bound allows"
    if plan.max_rows is not None:
        order = list(range(len(lengths)))
        if groups is not None:
            first = {group: row for row, group in reversed(list(enumerate(groups)))}
            order.sort(key=lambda row: first[groups[row]])
        bins = [order[start : start + plan.max_rows] for start in range(0, len(order), plan.max_rows)]
    else:
        assert plan.max_tokens is not None
        bins = None if groups is None else _whole_groups(lengths, groups, plan.max_tokens, count)
        if bins is None:
            bins = karmarkar_karp(lengths, count)
        if _heaviest(lengths, bins) > plan.max_tokens:
            bins = _first_fit_decreasing(lengths, plan.max_tokens)
        assert _heaviest(lengths, bins) <= plan.max_tokens, "the token bound is a hard one"
    bins = [sorted(rows) for rows in bins] + [[] for _ in range(count - len(bins))]
    # The longest first: an out-of-memory error then comes in the first step, not hours later.
    return sorted(bins, key=lambda rows: -sum(lengths[i] for i in rows))


def _heaviest(lengths: Sequence[int], bins: Sequence[Sequence[int]]) -> int:
    return max((sum(lengths[i] for i in rows) for rows in bins), default=0)


def _whole_groups(lengths: Sequence[int], groups: Sequence[Hashable], bound: int, count: int) -> list[list[int]] | None:
    """``count`` bins of whole groups, balanced; where that breaks the bound, packed with as few groups taken apart as
    first-fit-decreasing comes to. None where the rows of those do not fit in."""
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    # A group longer than a micro-batch is several.
    units = [
        [rows[i] for i in piece]
        for rows in members.values()
        for piece in _first_fit_decreasing([lengths[row] for row in rows], bound)
    ]
    weights = [sum(lengths[row] for row in rows) for rows in units]
    bins = [[row for i in part for row in units[i]] for part in karmarkar_karp(weights, count)]
    if _heaviest(lengths, bins) <= bound:
        return bins
    bins, room = [[] for _ in range(count)], [bound] * count
    loose: list[int] = []
    for i in sorted(range(len(units)), key=lambda i: (-weights[i], i)):
        at = next((b for b in range(count) if room[b] >= weights[i]), None)
        if at is None:
            loose += units[i]
        else:
            bins[at] += units[i]
            room[at] -= weights[i]
    for row in sorted(loose, key=lambda row: (-lengths[row], row)):
        at = next((b for b in range(count) if room[b] >= lengths[row]), None)
        if at is None:
            return None
        bins[at].append(row)
        room[at] -= lengths[row]
    return bins
