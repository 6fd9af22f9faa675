"""What an engine reports: its place in the mesh, what it built, and the numbers of micro-batches and steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MeshInfo:
    """This rank's place, from the engine's own mesh.

    Args:
        rank, world_size: in the engine's group.
        dp_rank, dp_size: data parallel coordinates; ranks of one replica share a dp_rank.
        is_collect: output is taken from exactly one rank of each replica.
        coordinates: axis name -> index.
        device: torch device string of this rank.
        token_multiplier: factor of the token budget of a micro-batch (usp x cp).
        count_multiple: the number of micro-batches is rounded up to a multiple of it (pipeline schedules).
        handle: the engine's own mesh object, opaque to core.
    """

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    is_collect: bool = True
    coordinates: Mapping[str, int] = field(default_factory=dict)
    device: str = "cpu"
    token_multiplier: int = 1
    count_multiple: int = 1
    handle: Any = None


@dataclass(frozen=True)
class EngineInfo:
    """What was built.

    Args:
        num_parameters: total parameters of the model, over all ranks, tied ones once.
        vocab_size: size of the output vocabulary.
        model_family: ``config.model_type`` of the model.
        notes: decisions worth showing (attention path and why, reader kind, wrapping, compile).
    """

    num_parameters: int
    vocab_size: int
    model_family: str
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MicroOutput:
    """One micro-batch's numbers: python floats, and detached CPU tensors of its items."""

    loss: float
    sums: Mapping[str, float]
    maxes: Mapping[str, float]
    items: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class StepOutput:
    """``grad_norm`` before clipping, of the whole model; ``skipped`` when it was not finite."""

    grad_norm: float
    lr: float
    skipped: bool


@dataclass(frozen=True)
class TrainOutput:
    """One mini-batch: ``loss`` and ``sums`` are over the whole mini-batch and all data parallel ranks.

    Args:
        num_micro_batches: on each rank, the same on all.
        num_padding: those of them that had no weight, on this rank.
    """

    loss: float
    sums: Mapping[str, float]
    maxes: Mapping[str, float]
    step: StepOutput
    num_micro_batches: int
    num_padding: int = 0
