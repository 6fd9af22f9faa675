"""A value model's head on a Hugging Face decoder: one number a token, read where log-probs are read.

The head is ``score.weight`` ``[1, D]`` on the last hidden states, what transformers calls a token classifier with one label.

Shapes: N tokens of the micro-batch, P scored tokens, p of them predicted by this rank, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from rlctl.batch import PackedBatch
from rlctl.logits import LossFn, LossOutput
from rlctl.models import VALUE_BIAS as VALUE_BIAS
from rlctl.parts.layout import Layout
from rlctl.parts.outputs import detached
from rlctl.parts.ulysses import assemble

VALUE_HEAD = "score.weight"
"""Checkpoint name of the head's weight."""

_STREAM = 0x76616C7565
"""Keeps the head's random numbers apart from those that the embedding is drawn from."""


def draw_value_head(hidden_size: int, std: float, seed: int) -> torch.Tensor:
    """A fresh head ``[1, D]`` in float32 from ``seed`` alone, so that every backend draws the same one."""
    generator = torch.Generator().manual_seed(seed ^ _STREAM)
    return torch.randn(1, hidden_size, generator=generator) * std


class HeadValues:
    """:class:`rlctl.logits.ValueReader` over hidden states and a head.

    Args:
        hidden: ``[p, D]`` hidden states that predict this rank's scored tokens.
        layout: the micro-batch as this rank runs it.
        num_items: N.
        weight: ``[1, D]``.
        bias: ``[1]``, or None.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        layout: Layout,
        num_items: int,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        assert weight.shape == (1, hidden.shape[1]), weight.shape
        self._hidden = hidden
        self._layout = layout
        self._num_items = num_items
        self._weight = weight
        self._bias = bias

    def values(self) -> torch.Tensor:
        """See :meth:`rlctl.logits.ValueReader.values`. One collective where ranks hold slices."""
        laid = self._layout
        with torch.autocast(self._hidden.device.type, enabled=False):
            bias = None if self._bias is None else self._bias.float()
            own = F.linear(self._hidden.float(), self._weight.float(), bias)[:, 0]
        if laid.mine is not None and laid.part is not None:
            own = assemble(own, laid.mine, laid.positions.numel(), laid.part.ulysses)
        return own.new_zeros(self._num_items).index_copy(0, laid.positions, own)


class ValueJob:
    """One micro-batch through a value model and the loss; returns the loss tensor and keeps the rest in ``output``.

    A job of :class:`rlctl.parts.job.Root`: it is called with a model whose ``base_model`` makes hidden states and whose
    ``score`` is the head, its weights whole.
    """

    def __init__(self, batch: PackedBatch, layout: Layout, loss_fn: LossFn) -> None:
        self._batch = batch
        self._layout = layout
        self._loss_fn = loss_fn
        self.output: LossOutput | None = None

    def __call__(self, model: Any) -> torch.Tensor:
        hidden = model.base_model(**self._layout.inputs).last_hidden_state.flatten(0, 1)
        own = hidden.index_select(0, self._layout.sources)
        reader = HeadValues(own, self._layout, self._batch.num_items, model.score.weight, model.score.bias)
        out = self._loss_fn(reader, self._batch)
        loss = out.loss
        if torch.is_grad_enabled() and not loss.requires_grad:
            # The other ranks run the backward pass, and every gradient must be there.
            loss = loss + 0.0 * reader.values().sum()
        self.output = detached(out)
        return loss
