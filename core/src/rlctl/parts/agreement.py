"""What ranks settle with each other before a collective, so that none waits for one that stopped."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rlctl.batch import PackedBatch
from rlctl.errors import BatchError, EngineError, RlctlError
from rlctl.parts.ranks import reduce_values


@contextmanager
def agreed(device: torch.device, world_size: int, doing: str) -> Iterator[None]:
    """What one rank refuses inside, all ranks refuse at its end. Collective over all ranks; no collective goes inside.

    Args:
        doing: what another rank could not do, in words.

    Raises:
        EngineError: another rank failed; a rank that failed itself raises its own error.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is: the others must hear of it before it ends this rank
        problem = error
    failed = problem is not None
    if world_size > 1:
        failed = bool(reduce_values([float(failed)], "max", device)[0])
    if problem is not None:
        raise problem
    if failed:
        raise EngineError(f"another rank could not {doing}", found="see that rank's own message")


def check_micro_batches(
    micro_batches: Sequence[PackedBatch],
    check: Callable[[PackedBatch], None],
    *,
    device: torch.device,
    world_size: int,
    sharers: Sequence[dist.ProcessGroup] = (),
    same_count: bool = True,
) -> None:
    """Refuse bad rows on every rank. Collective over all ranks.

    Args:
        check: refuses one micro-batch by a :class:`~rlctl.errors.RlctlError`.
        sharers: groups of this rank whose ranks must hold the same rows.
        same_count: each micro-batch is one round of collectives, so that all ranks need as many.

    Raises:
        BatchError: what ``check`` raised; or the ranks were given other numbers of micro-batches; or ranks that share rows
            were given different ones.
    """
    problem: RlctlError | None = None
    try:
        for batch in micro_batches:
            check(batch)
    except RlctlError as error:
        problem = error
    if sharers:
        mine = float(digest(micro_batches))
        for group in sharers:
            low, high = reduce_values([-mine, mine], "max", device, group)
            if -low != high:
                problem = problem or BatchError(
                    "the ranks that share rows were given different ones",
                    found="other tokens, masks or weights on another rank of the same dp_rank",
                    wanted="the same micro-batches on all ranks of one dp_rank",
                )
    if world_size > 1:
        # Last, over all ranks: whatever one of them found, none goes on.
        count = float(len(micro_batches))
        worst, most, least = reduce_values([float(problem is not None), count, -count], "max", device)
        if worst and problem is None:
            raise BatchError("another rank refused its rows", found="see that rank's own message")
        if problem is None and same_count and most != -least:
            raise BatchError(
                "the ranks were given different numbers of micro-batches",
                found=f"{-least:.0f} to {most:.0f}, {count:.0f} here",
                wanted="the same number on every rank; each micro-batch is one round of collectives",
            )
    if problem is not None:
        raise problem


def digest(micro_batches: Sequence[PackedBatch]) -> int:
    """A checksum of what decides a loss: boundaries, every field and the temperature."""
    total = 0
    for batch in micro_batches:
        total = zlib.crc32(str(batch.meta.get("temperature")).encode(), total)
        for value in (batch.cu_seqlens, *batch.items.values(), *batch.rows.values()):
            # As bytes through torch: numpy has no bfloat16.
            raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            total = zlib.crc32(raw.numpy().tobytes(), total)
    return total
