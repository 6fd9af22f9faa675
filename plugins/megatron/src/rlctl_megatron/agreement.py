"""What must hold on every rank before the next collective, refused on all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rlctl.batch import PackedBatch
from rlctl.parts import agreement
from rlctl_megatron import layout
from rlctl_megatron.mesh import Place

T = TypeVar("T")


def together(place: Place, words: str, doing: Callable[[], T]) -> T:
    """What ``doing`` returns, once it has ended well on all ranks. Collective over all ranks.

    Where it runs collectives itself, what one rank may find alone must have been agreed on before.

    Args:
        words: what another rank could not do.

    Raises:
        EngineError: another rank failed; a rank that failed itself raises its own error.
    """
    box: list[T] = []
    with agreement.agreed(place.device, place.topology.world_size, words):
        box.append(doing())
    return box[0]


def check_micro_batches(micro_batches: Sequence[PackedBatch], vocab_size: int, place: Place) -> None:
    """Refuse bad rows on every rank. Collective over all ranks.

    Raises:
        BatchError: see :func:`rlctl_megatron.layout.check`; or ranks were given other numbers of micro-batches; or ranks that
            hold parts of one replica were given different rows.
    """
    parts = (place.tp_group, place.pp_group, place.cp_group)
    agreement.check_micro_batches(
        micro_batches,
        lambda batch: layout.check(batch, vocab_size),
        device=place.device,
        world_size=place.topology.world_size,
        sharers=[group for group in parts if group is not None],
    )
