"""What a loss sees of a model: one reader that hides where logits live.

A loss function is called as ``loss_fn(reader, micro_batch)`` and returns a :class:`LossOutput`. It names no backend
and no vocabulary shard; full, chunked and vocab-parallel readers give the same numbers. A language model is read through a
:class:`LogitsReader`, a value model through a :class:`ValueReader`.

Shapes: N tokens of the micro-batch, P of them *scored* (``loss_mask`` True), K alternatives, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from rlctl.batch import PackedBatch


class LogitsReader(Protocol):
    """Per-token quantities at the scored positions of one micro-batch.

    Every method returns ``[N]`` or ``[N, K]`` float32 tensors on the engine's device that are zero where ``loss_mask``
    is False. Logits are divided by ``micro_batch.meta['temperature']`` (default 1) first. Values are in nats.

    A reader may have more methods. ``sum_p2()``, ``[N]``: the sum over the vocabulary of the squared probabilities at each
    scored token, without gradient. For a mixture of experts ``experts()``, ``[N, L, K]``: the K experts that each of L layers
    chose at the position that predicts each scored token, -1 elsewhere; an engine that has it says so in its notes
    (``experts``).
    """

    def log_prob(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """log p(ids[t] | tokens before t) at each scored t; ``ids`` defaults to the batch's own ``input_ids``."""
        ...

    def entropy(self) -> torch.Tensor:
        """Entropy of the distribution that predicts each scored token."""
        ...

    def log_prob_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both from one pass over the logits."""
        ...

    def log_prob_at(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` ``[N, K]`` -> log-probs ``[N, K]`` of those tokens at each scored position."""
        ...

    def topk(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs ``[N, k]``, ids ``[N, k]``) of the most probable tokens; no gradient."""
        ...


class ValueReader(Protocol):
    """What a value model says at the scored positions of one micro-batch."""

    def values(self) -> torch.Tensor:
        """``[N]`` float32 on the engine's device, zero where ``loss_mask`` is False, with gradient in training.

        ``values()[t]`` is the value of the state in which token t is chosen: the head's output at position t - 1, computed
        from the tokens before t and not from t itself. So it stands beside ``log_prob()[t]`` of the policy, and
        ``returns[t]`` and ``advantages[t]`` speak of the same moment. The state behind a row's last token has no entry.
        No temperature divides it.
        """
        ...


@dataclass
class LossOutput:
    """Result of a loss on one micro-batch.

    Args:
        loss: scalar, already the globally weighted sum over this micro-batch's items.
        sums: metrics that add up over micro-batches and data parallel ranks. Weighted with the same global item
            weights, such a sum *is* the mean over the mini-batch.
        maxes: metrics whose maximum is meant.
        items: per-item results ``[N, ...]`` to hand back, detached.
    """

    loss: torch.Tensor
    sums: Mapping[str, torch.Tensor | float] = field(default_factory=dict)
    maxes: Mapping[str, torch.Tensor | float] = field(default_factory=dict)
    items: Mapping[str, torch.Tensor] = field(default_factory=dict)


# Any: a loss takes the reader of the head that it is for, and an engine hands it the one that it has.
LossFn: TypeAlias = "Callable[[Any, PackedBatch], LossOutput]"
"""``loss_fn(reader, micro_batch)``; the reader is a :class:`LogitsReader`, or of a value model a :class:`ValueReader`."""


def to_logits_scale(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits ``[..., V]`` in float32, divided by ``temperature``."""
    logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature
