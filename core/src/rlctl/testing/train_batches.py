"""Rows, losses and the arithmetic of the training suite. N tokens of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlctl.batch import PackedBatch, pack
from rlctl.engine import Engine, MicroOutput
from rlctl.logits import LogitsReader, LossFn, LossOutput
from rlctl.normalizer import item_weights
from rlctl.testing.backend import Weights

LENGTHS = (7, 3, 12, 2, 5, 9)
LONGEST = max(LENGTHS)

PROBE_EPS = 1.0
PROBE_OPTIM: dict[str, Any] = {"lr": 1.0, "eps": PROBE_EPS, "weight_decay": 0.0, "clip_grad": 0.0}
"""AdamW whose first step tells the gradient: with moments corrected for their start it moves a weight by
``lr * g / (|g| + eps)`` (Adam, arXiv 1412.6980, algorithm 1), which :func:`first_gradient` turns round."""


def rows(vocab_size: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> PackedBatch:
    """Random rows, about two thirds of each scored; the third row has no scored token at all. Carries ``item_weight``."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, vocab_size, (n,), generator=generator) for n in lengths]
    masks = [[t > n // 3 and i != 2 for t in range(n)] for i, n in enumerate(lengths)]
    # A row of two tokens has one that something predicts.
    masks = [[t > 0 for t in range(len(m))] if len(m) == 2 else m for m in masks]
    batch = pack({"input_ids": ids, "loss_mask": masks}, dtypes={"loss_mask": torch.bool})
    return batch.with_items(item_weight=item_weights(batch, "token-mean"))


def weighted(batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """Sum of ``values`` ``[N]`` under the batch's item weights."""
    return (batch.items["item_weight"].to(values.device) * values).sum()


def cross_entropy(reader: LogitsReader, batch: PackedBatch) -> LossOutput:
    """Minus the mean log-prob; hands the log-probs back."""
    log_probs = reader.log_prob()
    loss = -weighted(batch, log_probs)
    return LossOutput(loss, {"loss": loss.detach()}, items={"log_probs": log_probs.detach()})


def negative_entropy(reader: LogitsReader, batch: PackedBatch) -> LossOutput:
    """Minus the mean entropy."""
    return LossOutput(-weighted(batch, reader.entropy()))


def alternatives(reader: LogitsReader, batch: PackedBatch) -> LossOutput:
    """Mean log-prob of two fixed tokens at each position."""
    ids = torch.stack([torch.zeros_like(batch.items["input_ids"]), batch.items["input_ids"]], dim=1)
    return LossOutput(-weighted(batch, reader.log_prob_at(ids).mean(-1)))


def mixed(reader: LogitsReader, batch: PackedBatch) -> LossOutput:
    """Log-prob and entropy of one pass, as a policy loss with an entropy bonus uses them."""
    log_probs, entropy = reader.log_prob_and_entropy()
    return LossOutput(-weighted(batch, log_probs + 0.5 * entropy))


@dataclass(frozen=True)
class Broken:
    """Cross-entropy times a number that is not finite."""

    factor: float

    def __call__(self, reader: LogitsReader, batch: PackedBatch) -> LossOutput:
        return LossOutput(cross_entropy(reader, batch).loss * self.factor)


LOSSES: dict[str, LossFn] = {
    "log_prob": cross_entropy,
    "entropy": negative_entropy,
    "log_prob_at": alternatives,
    "log_prob_and_entropy": mixed,
}


def read(engine: Engine, batch: PackedBatch, look: Any) -> dict[str, torch.Tensor]:
    """What a reader says, without gradients: ``look(reader, batch) -> {name: [N, ...]}``."""

    def loss(reader: LogitsReader, micro_batch: PackedBatch) -> LossOutput:
        items = {name: value.detach() for name, value in look(reader, micro_batch).items()}
        return LossOutput(reader.log_prob().sum(), items=items)

    return dict(engine.forward_backward([batch], loss, forward_only=True)[0].items)


def total_loss(outputs: Sequence[MicroOutput]) -> float:
    """Loss of a mini-batch."""
    return math.fsum(out.loss for out in outputs)


def first_gradient(before: Weights, after: Weights, lr: float = 1.0) -> Weights:
    """The gradient behind the first step of an engine with ``PROBE_OPTIM``, by exported name; float64."""
    gradients: Weights = {}
    for name in before:
        moved = before[name].double() - after[name].double()
        gradients[name] = moved * PROBE_EPS / (lr - moved.abs()).clamp(min=1e-12)
    return gradients


def untied(weights: Weights, gradient: Weights) -> list[str]:
    """Names with tied weights once: exports may hold one parameter under two names."""
    names: list[str] = []
    for name in weights:
        twins = (
            weights[name].shape == weights[other].shape
            and torch.equal(weights[name], weights[other])
            and torch.equal(gradient[name], gradient[other])
            for other in names
        )
        if not any(twins):
            names.append(name)
    return names


def apart(a: Weights, b: Weights) -> float:
    """Largest difference of any element."""
    assert a.keys() == b.keys(), "other names"
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a if a[k].numel())


def largest(tensors: Weights) -> float:
    """Largest absolute element."""
    return max(float(t.abs().max()) for t in tensors.values() if t.numel())
