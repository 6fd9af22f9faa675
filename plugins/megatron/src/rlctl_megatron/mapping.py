"""Checkpoint tensors to one rank's parameter and back; which rank has which layer. Pure: no process group, no module.

Shapes: G query groups (key/value heads), R queries a group, d head size, V vocabulary, n ranks that share a parameter. A
fused qkv weight is [G (R + 2) d, hidden]: of each group its R queries, its key, its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlctl.errors import CapabilityError
from rlctl.topology import Topology
from rlctl_megatron.families import Entry, Family, Layout, Split


@dataclass(frozen=True)
class Shard:
    """One of ``size`` ranks that share a parameter."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Slice:
    """``start`` to ``stop`` of a tensor's ``axis``; the other axes are whole."""

    axis: int
    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of that slice."""
        return tensor.narrow(self.axis, self.start, self.stop - self.start)


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of the embedding and the output layer over all ranks: the next multiple of ``tp``."""
    return -(-vocab_size // tp) * tp


def check_split(family: Family, topology: Topology) -> None:
    """Refuse sizes that tp or etp do not divide (core's constraints know heads, experts and layers only).

    Raises:
        CapabilityError: names the size and the divisors that fit.
    """
    for entry in (*family.layer, *family.expert):
        size = topology.tp if entry.split is Split.TP else topology.etp
        for shape, stored in zip(family.shapes(entry), entry.stored, strict=True):
            axis = {Layout.COLUMN: 0, Layout.QKV: 0, Layout.ROW: 1}.get(entry.layout)
            if axis is not None and shape[axis] % size:
                fit = [str(n) for n in range(1, size) if shape[axis] % n == 0]
                raise CapabilityError(
                    f"this model's matrices cannot be split over {entry.split.value}={size}",
                    found=f"{shape[axis]} {'rows' if axis == 0 else 'columns'} of {stored.name.format(layer=0, expert=0)}",
                    wanted=f"a size that {entry.split.value} divides",
                    next=f"set parallel.{entry.split.value} to {' or '.join(fit[-2:])}",
                )


def slices(entry: Entry, family: Family, shard: Shard) -> tuple[Slice, ...]:
    """What the rank needs of each of the entry's checkpoint tensors. A slice may be empty (rows that only pad)."""
    return tuple(_slice(entry.layout, shape, shard) for shape in family.shapes(entry))


def _slice(layout: Layout, shape: tuple[int, ...], shard: Shard) -> Slice:
    if layout is Layout.REPLICATED:
        return Slice(0, 0, shape[0])
    if layout is Layout.VOCABULARY:
        rows = padded_vocab(shape[0], shard.size) // shard.size
        return Slice(0, min(shard.rank * rows, shape[0]), min((shard.rank + 1) * rows, shape[0]))
    axis = 1 if layout is Layout.ROW else 0
    assert shape[axis] % shard.size == 0, (shape, axis, shard.size)
    share = shape[axis] // shard.size
    return Slice(axis, shard.rank * share, (shard.rank + 1) * share)


def parameter_shape(entry: Entry, family: Family, shard: Shard) -> tuple[int, ...]:
    """Shape of one rank's parameter."""
    shapes = family.shapes(entry)
    if entry.layout is Layout.REPLICATED:
        return shapes[0]
    if entry.layout is Layout.ROW:
        return (shapes[0][0], shapes[0][1] // shard.size)
    if entry.layout is Layout.VOCABULARY:
        return (padded_vocab(shapes[0][0], shard.size) // shard.size, *shapes[0][1:])
    return (sum(s[0] for s in shapes) // shard.size, *shapes[0][1:])


def combine(entry: Entry, parts: Sequence[torch.Tensor], family: Family, shard: Shard) -> torch.Tensor:
    """One rank's parameter from its slices of the checkpoint tensors."""
    assert len(parts) == len(entry.stored), (entry.megatron, len(parts))
    if entry.layout is Layout.QKV:
        groups = _local_groups(family, shard.size)
        return torch.cat([p.reshape(groups, -1, *p.shape[1:]) for p in parts], dim=1).flatten(0, 1)
    if entry.layout is Layout.COLUMN:
        return torch.cat(list(parts), dim=0)
    (part,) = parts
    if entry.layout is Layout.VOCABULARY:
        rows = padded_vocab(family.sizes["vocab"], shard.size) // shard.size
        if len(part) < rows:
            return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])
    return part


def piece(entry: Entry, tensors: Sequence[torch.Tensor], family: Family, shard: Shard) -> torch.Tensor:
    """One rank's parameter from the whole checkpoint tensors."""
    cuts = slices(entry, family, shard)
    return combine(entry, [c.of(t) for c, t in zip(cuts, tensors, strict=True)], family, shard)


def assemble(entry: Entry, pieces: Sequence[torch.Tensor], family: Family) -> tuple[torch.Tensor, ...]:
    """The whole checkpoint tensors from every rank's parameter: the inverse of :func:`piece`.

    What one rank has whole comes back without a copy.
    """
    size = len(pieces)
    if entry.layout is Layout.REPLICATED:
        return (pieces[0],)
    if entry.layout is Layout.ROW:
        return (_join(pieces, 1),)
    if entry.layout is Layout.VOCABULARY:
        return (_join(pieces, 0)[: family.sizes["vocab"]],)
    heights = [shape[0] // size for shape in family.shapes(entry)]
    if entry.layout is Layout.QKV:
        groups = family.num_kv_heads
        assert groups % size == 0, (groups, size)
        # Ranks hold whole groups in order, so the joined pieces are the groups of the whole model.
        grouped = _join(pieces, 0).unflatten(0, (groups, -1))
        parts = grouped.split([h * size // groups for h in heights], dim=1)
        return tuple(p.flatten(0, 1) for p in parts)
    shares = [p.split(heights, dim=0) for p in pieces]
    return tuple(_join([s[i] for s in shares], 0) for i in range(len(heights)))


def _join(pieces: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=axis)


def _local_groups(family: Family, size: int) -> int:
    assert family.num_kv_heads % size == 0, (family.num_kv_heads, size)
    return family.num_kv_heads // size


# ---- layers -------------------------------------------------------------------------------------------------------
def layers_of(topology: Topology, num_layers: int, pp_rank: int, chunk: int) -> tuple[int, ...]:
    """Layers of the whole model, from 0, that chunk ``chunk`` of pipeline stage ``pp_rank`` holds.

    A microbatch goes through chunk 0 of every stage before it comes to chunk 1 of the first.
    """
    stages = topology.pp * topology.vpp
    assert num_layers % stages == 0, (num_layers, topology.pp, topology.vpp)
    each = num_layers // stages
    start = (chunk * topology.pp + pp_rank) * each
    return tuple(range(start, start + each))


def stage_of(topology: Topology, num_layers: int, layer: int) -> int:
    """The pipeline stage that holds ``layer``."""
    return layer // (num_layers // (topology.pp * topology.vpp)) % topology.pp


def local_experts(family: Family, ep_rank: int, ep_size: int) -> range:
    """Experts of each layer, counted over the whole model, that an expert rank holds."""
    assert family.num_experts % ep_size == 0, (family.num_experts, ep_size)
    each = family.num_experts // ep_size
    return range(ep_rank * each, (ep_rank + 1) * each)
