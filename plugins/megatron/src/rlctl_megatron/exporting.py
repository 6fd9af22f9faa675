"""Weights under the names that a Hugging Face checkpoint has, one parameter at a time, whole on every rank.

What tensor parallel ranks share is gathered where the parameter lives, experts are sent to the other expert ranks of the
stage, and the whole tensors go from their pipeline stage to the others. Beyond its own weights a
rank holds a few copies of one parameter's tensors (pieces, joined, taken apart), whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from rlctl_megatron import mapping
from rlctl_megatron.families import Entry, Family, Layout, Site, Split
from rlctl_megatron.loading import Chunk, parameters, shard_of

if TYPE_CHECKING:
    from rlctl_megatron.mesh import Place


@torch.no_grad()
def export_weights(
    chunks: Sequence[Chunk],
    family: Family,
    place: Place,
    dtype: torch.dtype | None,
    value_of: Callable[[nn.Parameter], torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (checkpoint name, whole tensor on ``place.device``): embedding, layers, final norm, head.

    Every rank must iterate to the end: gathering is collective. A tied model has no ``lm_head.weight``, as in the
    directories that transformers saves. On one rank, and without ``dtype``, tensors may share memory with the live weights.

    Args:
        dtype: of the tensors; None keeps the parameters'.
        value_of: what to export of a parameter, in its shape; may be collective. None: the parameter itself.
    """
    held = parameters(chunks, family, place)
    kinds = {p.dtype for p in held.values()}
    # The other stages make room for a tensor before it comes, so all must know its dtype.
    assert len(kinds) == 1, f"parameters of several dtypes: {kinds}"
    wanted = dtype or kinds.pop()
    for site in family.sites():
        if not site.entry.exported:
            continue
        parameter = held.get(site)
        value = parameter if parameter is None or value_of is None else value_of(parameter)
        whole = _whole(site, value, family, place, wanted)
        names = list(site.names())
        while names:
            # Given away one by one, so that nothing here keeps a tensor that the reader has let go.
            yield names.pop(0), whole.pop(0)


def _whole(
    site: Site, mine: torch.Tensor | None, family: Family, place: Place, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The checkpoint tensors of one parameter, on every rank."""
    topology = place.topology
    stage = _stage(site, family, place)
    tensors: list[torch.Tensor] | None = None
    if mine is not None:
        tensors = _assembled(site.entry, mine.to(place.device, dtype), family, place)
    assert place.pp_rank != stage or mine is not None or site.expert is not None, f"{site} is not where it should be"
    shapes = family.shapes(site.entry)
    if site.expert is not None and topology.ep > 1 and place.pp_rank == stage:
        owner = site.expert // (family.num_experts // topology.ep)
        assert (tensors is not None) == (place.ep_rank == owner), site
        tensors = _sent(tensors, shapes, dtype, owner, place.ep_group, place.device)
    if topology.pp > 1:
        tensors = _sent(tensors, shapes, dtype, stage, place.pp_group, place.device)
    assert tensors is not None, site
    return tensors


def _stage(site: Site, family: Family, place: Place) -> int:
    if site.layer is not None:
        return mapping.stage_of(place.topology, family.num_layers, site.layer)
    return 0 if site.entry in family.first else place.topology.pp - 1


def _assembled(entry: Entry, mine: torch.Tensor, family: Family, place: Place) -> list[torch.Tensor]:
    size = shard_of(entry, place).size
    pieces = [mine]
    if size > 1 and entry.layout is not Layout.REPLICATED:
        pieces = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(pieces, mine.contiguous(), place.etp_group if entry.split is Split.ETP else place.tp_group)
    return list(mapping.assemble(entry, pieces, family))


def _sent(
    tensors: list[torch.Tensor] | None,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    source: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> list[torch.Tensor]:
    """The tensors of rank ``source`` of ``group``, on all its ranks."""
    assert group is not None, "an axis of several ranks has a group"
    if dist.get_rank(group) == source:
        assert tensors is not None, "nothing to send"
        tensors = [t.contiguous() for t in tensors]
    else:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=source)
    return tensors
