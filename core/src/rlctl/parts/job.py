"""The root module of the engine: a Hugging Face model whose loss is computed inside its own forward.

``fully_shard`` gathers the root's weights (embedding, last norm, head) for the time of the root's forward, and hooks the
backward pass onto the tensors that forward returns. The loss needs the head's weight, so it is computed in there, by a
*job*: a callable that gets the model. Everything that touches whole weights (scoring, probes) is such a job.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from rlctl.batch import PackedBatch
from rlctl.logits import LogitsReader, LossFn, LossOutput
from rlctl.parts.head import HeadSpec, decoder_of, head_of
from rlctl.parts.layout import Layout
from rlctl.parts.outputs import detached
from rlctl.parts.reader import ChunkedReader, FullReader, Head
from rlctl.parts.routing import RoutedReader, Routing


class Root(nn.Module):
    """``root(job)`` runs ``job(model)`` while the weights are whole."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, job: Callable[[PreTrainedModel], Any]) -> Any:
        return job(self.model)


class ScoreJob:
    """One micro-batch through the model and the loss; returns the loss tensor and keeps the rest in ``output``.

    Args:
        batch: on the device, in its own order.
        spec: the head's form; None lets the model make the logits of the scored positions itself.
        dtype: dtype of the head's matrix product.
        routing: of a mixture of experts, so that a loss can ask for its choices.
    """

    def __init__(
        self,
        batch: PackedBatch,
        layout: Layout,
        loss_fn: LossFn,
        spec: HeadSpec | None,
        dtype: torch.dtype,
        keep_bytes: int,
        routing: Routing | None = None,
    ) -> None:
        self._batch = batch
        self._layout = layout
        self._loss_fn = loss_fn
        self._spec = spec
        self._dtype = dtype
        self._keep_bytes = keep_bytes
        self._routing = routing
        self.output: LossOutput | None = None

    def __call__(self, model: PreTrainedModel) -> torch.Tensor:
        reader: LogitsReader = self._reader(model)
        routing = self._routing
        if routing is not None:
            experts = RoutedReader(reader, lambda: routing.chosen(self._layout, self._batch.num_items))
            reader = cast(LogitsReader, experts)
        out = self._loss_fn(reader, self._batch)
        loss = out.loss
        if torch.is_grad_enabled() and not loss.requires_grad:
            # A loss that leaves the model out (nothing to learn from here) still has to run the backward pass: the other
            # ranks do, and every gradient must be there.
            loss = loss + 0.0 * reader.log_prob().sum()
        self.output = detached(out)
        return loss

    def _reader(self, model: PreTrainedModel) -> ChunkedReader | FullReader:
        layout = self._layout
        temperature = float(self._batch.meta.get("temperature", 1.0))
        ids = self._batch.items["input_ids"]
        ulysses = None if layout.part is None else layout.part.ulysses
        if self._spec is None:
            logits = _own_logits(model, layout)
            return FullReader(logits, layout.positions, ids, temperature, layout.mine, ulysses)
        decoder, head = decoder_of(model), head_of(model)
        assert decoder is not None, "the head was probed"
        assert head is not None, "the head was probed"
        hidden = decoder(**layout.inputs).last_hidden_state.flatten(0, 1).index_select(0, layout.sources)
        weight, bias = head
        own_head = Head(weight, bias, self._spec, self._dtype, temperature)
        return ChunkedReader(hidden, layout.positions, ids, own_head, self._keep_bytes, layout.mine, ulysses)


def _own_logits(model: PreTrainedModel, layout: Layout) -> torch.Tensor:
    """``[P, V]`` from the model's own forward, at the scored positions only where it can."""
    inputs = layout.inputs
    # Asked of the signature: logits of all P tokens look like those that were asked for, but lie in another order.
    can_choose = "logits_to_keep" in inspect.signature(model.forward).parameters
    if can_choose and inputs["input_ids"].shape[0] == 1:
        return model(**inputs, logits_to_keep=layout.sources).logits[0]
    return model(**inputs).logits.flatten(0, 1).index_select(0, layout.sources)
