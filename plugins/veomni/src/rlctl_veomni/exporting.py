"""Weights under the names that a Hugging Face checkpoint has, one parameter at a time, whole on every rank.

A parameter of experts is a DTensor over the ranks that share each expert; made whole it has the experts of its own rank alone.
The shares of all ranks are sent around one after another, so that beyond its own weights a rank holds two shares of one
parameter, whatever the number of experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlctl_veomni.families import is_fused, stored
from rlctl_veomni.mesh import Place


@torch.no_grad()
def export_weights(model: nn.Module, place: Place, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (checkpoint name, whole tensor on the device). Every rank must iterate to the end: gathering is collective.

    Args:
        dtype: of the tensors; None keeps that of the master weights.
    """
    for name, parameter in model.named_parameters():
        mine = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        if dtype is not None:
            mine = mine.to(dtype)
        if not is_fused(name):
            yield name, mine
            continue
        for share in range(place.topology.ep):
            yield from _experts(name, _sent(mine, share, place), share * mine.shape[0])


def _sent(mine: torch.Tensor, share: int, place: Place) -> torch.Tensor:
    """The experts of one rank, on all ranks of the replica that have others."""
    if place.experts is None:
        return mine
    sent = (
        mine.contiguous() if place.ep_rank == share else torch.empty_like(mine, memory_format=torch.contiguous_format)
    )
    dist.broadcast(sent, group=place.experts, group_src=share)
    return sent


def _experts(name: str, held: torch.Tensor, first: int) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = list(stored(name, tuple(held.shape), first))
    rows = held.reshape(len(tensors), *tensors[0].shape)
    for tensor, values in zip(tensors, rows, strict=True):
        # A copy: who keeps one expert must not keep the memory of all.
        yield tensor.name, values.clone()
