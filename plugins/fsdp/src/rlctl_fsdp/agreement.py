"""What must hold on every rank before the first collective of a model, refused on all of them at once."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlctl import constraints
from rlctl.batch import PackedBatch
from rlctl.errors import BatchError, CapabilityError
from rlctl.hf_config import load_config
from rlctl.topology import Topology
from rlctl_fsdp import layout
from rlctl_fsdp.inspection import Inspection
from rlctl_fsdp.place import Place, reduce_values


def check_heads(topology: Topology, model: Mapping[str, Any]) -> None:
    """Compare the heads in a model's config with usp, before any weight is read.

    Raises:
        CapabilityError: the ranks cannot share them; names the nearest sizes that fit.
    """
    if topology.usp == 1:
        return
    facts = constraints.ModelFacts.from_config(load_config(model).to_dict())
    broken = constraints.check("heads_divisible_by_usp", topology, facts)
    if broken is not None:
        raise CapabilityError(
            f"this model cannot be split over usp={topology.usp}",
            found=broken.found,
            wanted=broken.words,
            next=f"set {' or '.join(f'parallel.{n}' for n in broken.nearest) or 'parallel.usp=1'}",
        )


def check_micro_batches(micro_batches: Sequence[PackedBatch], seen: Inspection, place: Place, world_size: int) -> None:
    """Refuse bad rows on every rank, so that none waits in a collective for one that stopped.

    Raises:
        BatchError: see :func:`rlctl_fsdp.layout.check`; or the ranks were given other numbers of micro-batches; or ranks
            that share rows were given different ones.
    """
    problem: BatchError | None = None
    try:
        for batch in micro_batches:
            layout.check(batch, seen.vocab_size, seen.longest_row)
    except BatchError as error:
        problem = error
    if place.ulysses is not None:
        digest = float(_digest(micro_batches))
        low, high = reduce_values([-digest, digest], "max", place.device, place.ulysses.group)
        if -low != high:
            problem = problem or BatchError(
                "the ranks that share rows were given different ones",
                found="other tokens, masks or weights on another rank of the usp group",
                wanted="the same micro-batches on all ranks of one dp_rank",
            )
    if world_size > 1:
        # Last, over all ranks: whatever one of them found, none goes on.
        count = float(len(micro_batches))
        worst, most, least = reduce_values([float(problem is not None), count, -count], "max", place.device)
        if worst and problem is None:
            raise BatchError("another rank refused its rows", found="see that rank's own message")
        # Rows that are not packed run in as many pieces as the rank with most of them has.
        if problem is None and seen.packed and most != -least:
            raise BatchError(
                "the ranks were given different numbers of micro-batches",
                found=f"{-least:.0f} to {most:.0f}, {count:.0f} here",
                wanted="the same number on every rank; each micro-batch is one round of collectives",
            )
    if problem is not None:
        raise problem


def _digest(micro_batches: Sequence[PackedBatch]) -> int:
    """A checksum of what decides a loss: boundaries, every field and the temperature."""
    total = 0
    for batch in micro_batches:
        total = zlib.crc32(str(batch.meta.get("temperature")).encode(), total)
        for value in (batch.cu_seqlens, *batch.items.values(), *batch.rows.values()):
            # As bytes through torch: numpy has no bfloat16.
            raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            total = zlib.crc32(raw.numpy().tobytes(), total)
    return total
