"""What must hold on every rank before the next collective, refused on all of them at once.

A rank that stops alone leaves the others in a collective that never ends. So each tells first whether it can go on, in one
small reduction over all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from rlctl.batch import PackedBatch
from rlctl.errors import BatchError, RlctlError
from rlctl_megatron import layout
from rlctl_megatron.mesh import Place

T = TypeVar("T")


def agree(problem: Exception | None, place: Place, other: type[RlctlError], what: str) -> None:
    """Go on if no rank has a problem. Collective over all ranks.

    Args:
        problem: this rank's own; it is raised as it is.
        other, what: raised where another rank has one.
    """
    (failed,) = _largest([float(problem is not None)], place)
    if problem is not None:
        raise problem
    if failed:
        raise other(what, found="a problem on another rank", next="see that rank's own message")


def together(doing: Callable[[], T], place: Place, other: type[RlctlError], what: str) -> T:
    """What ``doing`` returns, once it has ended well on all ranks. Collective over all ranks.

    Where it runs collectives itself, what one rank may find alone must have been agreed on before.

    Args:
        other, what: raised where another rank failed.
    """
    problem: Exception | None = None
    result: T | None = None
    try:
        result = doing()
    except Exception as error:
        # Whatever it is: the others wait. It is raised by agree.
        problem = error
    agree(problem, place, other, what)
    return cast(T, result)


def check_micro_batches(micro_batches: Sequence[PackedBatch], vocab_size: int, place: Place) -> None:
    """Refuse bad rows on every rank, so that none waits in a collective for one that stopped. Collective over all ranks.

    Raises:
        BatchError: see :func:`rlctl_megatron.layout.check`; or ranks were given other numbers of micro-batches; or ranks that
            hold parts of one replica were given different rows.
    """
    problem: BatchError | None = None
    try:
        for batch in micro_batches:
            layout.check(batch, vocab_size)
    except BatchError as error:
        problem = error
    t = place.topology
    if t.world_size == 1:
        if problem is not None:
            raise problem
        return
    count, digest = float(len(micro_batches)), float(_digest(micro_batches))
    # Each replica has a pair of places of its own; ranks of other replicas say nothing there.
    digests = [-float("inf")] * (2 * t.dp_size)
    mine = t.dp_rank(dist.get_rank())
    digests[2 * mine : 2 * mine + 2] = digest, -digest
    failed, most, least, *seen = _largest([float(problem is not None), count, -count, *digests], place)
    if problem is not None:
        raise problem
    if failed:
        raise BatchError("another rank refused its rows", found="see that rank's own message")
    if most != -least:
        raise BatchError(
            "the ranks were given different numbers of micro-batches",
            found=f"{-least:.0f} to {most:.0f}, {count:.0f} here",
            wanted="the same number on every rank; each micro-batch is one round of collectives",
        )
    # Of every replica, so that those of another one do not go on alone either.
    apart = [rank for rank in range(t.dp_size) if seen[2 * rank] != -seen[2 * rank + 1]]
    if apart:
        raise BatchError(
            "the ranks that share rows were given different ones",
            found=f"other tokens, masks or weights among the ranks of dp_rank {apart[0]}",
            wanted="the same micro-batches on all ranks of one dp_rank",
        )


def _largest(values: list[float], place: Place) -> list[float]:
    """Of each number, the largest of all ranks."""
    if place.topology.world_size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=place.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def _digest(micro_batches: Sequence[PackedBatch]) -> int:
    """A checksum of what decides a loss: boundaries, every field with its name, and the temperature."""
    total = 0
    for batch in micro_batches:
        total = zlib.crc32(str(batch.meta.get("temperature")).encode(), total)
        for name, value in (("", batch.cu_seqlens), *sorted(batch.items.items()), *sorted(batch.rows.items())):
            # As bytes through torch: numpy has no bfloat16.
            raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            total = zlib.crc32(raw.numpy().tobytes(), zlib.crc32(name.encode(), total))
    return total
