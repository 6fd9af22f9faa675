"""A local mini-batch into micro-batches: fixed rows, or a token budget that is a hard bound. Pure Python.

The number of micro-batches must be the same on every data parallel rank, or one rank runs a collective that its peers
do not. So planning has two steps: :func:`min_count` on each rank, an agreement on the largest, then
:func:`assign`; a rank short of rows gets empty micro-batches, which run with zero weight.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    bins: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for b, (load, rows) in enumerate(bins):
            if load + lengths[i] <= bound:
                bins[b] = (load + lengths[i], [*rows, i])
                break
        else:
            bins.append((lengths[i], [i]))
    return [rows for _, rows in bins]


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


def assign(lengths: Sequence[int], plan: MicroBatchPlan, count: int, multiple_of: int = 1) -> list[list[int]]:
    """Row indices of each micro-batch, ``count`` rounded up to ``multiple_of``; some may be empty.

    Rows are balanced by tokens when that keeps the bound, else packed first-fit-decreasing, which defined the count.
    """
    count = max(1, -(-max(count, 1) // multiple_of) * multiple_of)
    assert count >= min_count(lengths, plan), "fewer micro-batches than the bound allows"
    if plan.max_rows is not None:
        bins = [list(range(s, min(s + plan.max_rows, len(lengths)))) for s in range(0, len(lengths), plan.max_rows)]
    else:
        assert plan.max_tokens is not None
        bins = karmarkar_karp(lengths, count)
        if any(sum(lengths[i] for i in rows) > plan.max_tokens for rows in bins):
            bins = _first_fit_decreasing(lengths, plan.max_tokens)
        bins = [sorted(rows) for rows in bins]
    bins += [[] for _ in range(count - len(bins))]
    # The longest first: an out-of-memory error then comes in the first step, not hours later.
    return sorted(bins, key=lambda rows: -sum(lengths[i] for i in rows))
