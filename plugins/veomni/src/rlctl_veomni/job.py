"""Work inside the model's own forward, where its weights are whole.

VeOmni shards the model itself: its embedding, last norm and head are gathered for the time of its forward. The loss needs the
head, so it is computed in there, by a job (see :mod:`rlctl.parts.job`) that is handed to the forward.

Shapes: N tokens of the micro-batch, P scored tokens, p of them predicted here, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rlctl.batch import PackedBatch
from rlctl.logits import LossFn, LossOutput
from rlctl.parts.layout import Layout
from rlctl.parts.outputs import detached
from rlctl.parts.ulysses import assemble


class Inside:
    """A model as a job sees it. Called, it runs its own code at once: through the module, FSDP's hooks would run again."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self._model = model
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def take_jobs(model: nn.Module) -> None:
    """From now on ``model(job=job)`` returns ``job(model)`` of whole weights; any other call stays what it was."""
    own = model.forward

    def forward(*args: Any, job: Callable[[Any], Any] | None = None, **kwargs: Any) -> Any:
        return own(*args, **kwargs) if job is None else job(Inside(model, own))

    model.forward = forward  # type: ignore[method-assign]


class ValueReader:
    """Values of states: what the value head makes of the hidden state that predicts each scored token.

    Args:
        hidden: ``[p, D]`` hidden states that predict this rank's scored tokens.
        layout: the micro-batch as this rank runs it.
        num_items: N.
        weight: ``[1, D]``.
    """

    def __init__(self, hidden: torch.Tensor, layout: Layout, num_items: int, weight: torch.Tensor) -> None:
        assert weight.shape == (1, hidden.shape[1]), weight.shape
        self._hidden = hidden
        self._layout = layout
        self._num_items = num_items
        self._weight = weight

    def values(self) -> torch.Tensor:
        """``[N]`` in float32, zero where nothing is scored; aligned like ``log_prob``. One collective under Ulysses."""
        laid = self._layout
        own = F.linear(self._hidden.float(), self._weight.float())[:, 0]
        if laid.mine is not None and laid.part is not None:
            own = assemble(own, laid.mine, laid.positions.numel(), laid.part.ulysses)
        return own.new_zeros(self._num_items).index_copy(0, laid.positions, own)


class ValueJob:
    """One micro-batch through a value model and the loss; returns the loss tensor and keeps the rest in ``output``."""

    def __init__(self, batch: PackedBatch, layout: Layout, loss_fn: LossFn) -> None:
        self._batch = batch
        self._layout = layout
        self._loss_fn = loss_fn
        self.output: LossOutput | None = None

    def __call__(self, model: Any) -> torch.Tensor:
        hidden = model.base_model(**self._layout.inputs).last_hidden_state.flatten(0, 1)
        own = hidden.index_select(0, self._layout.sources)
        reader = ValueReader(own, self._layout, self._batch.num_items, model.score.weight)
        out = self._loss_fn(reader, self._batch)
        loss = out.loss
        if torch.is_grad_enabled() and not loss.requires_grad:
            # The other ranks run the backward pass, and every gradient must be there.
            loss = loss + 0.0 * reader.values().sum()
        self.output = detached(out)
        return loss
