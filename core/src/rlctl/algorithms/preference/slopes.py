"""A loss of pairs as a weighted sum over tokens: exact, and the same whatever way rows are split.

A pair's loss L is no sum over tokens: it depends on both rows as a whole. But its gradient is one,

    grad L = sum_rows (dL / ds(row)) sum_t grad s_t,    s(row) = sum_t s_t,

with s_t the log-prob of a token (or the score at the last one). So a pass without gradients finds every s(row), these slopes
follow from P numbers in float64, and the pass with gradients is that of the plain weighted sum, with the slope of its row as
the weight of each token. Rows of one pair may then lie in different micro-batches, or on different ranks.

Shapes: P pairs, 2 P rows in the order chosen, rejected, chosen, ...; N tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlctl.algorithms.preference.base import PairLosses
from rlctl.batch import PackedBatch
from rlctl.logits import LossOutput

PairFunction = Callable[[torch.Tensor], PairLosses]
"""``[2 P]`` numbers of rows -> the losses of their pairs."""

SCORED = "scored"
"""Item field ``[N]``: what the pass without gradients said of each token."""


def row_sums(batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """``[N]`` of tokens -> ``[2 P]`` float64: the sum over the unmasked tokens of each row."""
    kept = torch.where(batch.items["loss_mask"].bool(), values.double(), 0.0)
    return torch.zeros(batch.num_rows, dtype=torch.float64).index_add(0, batch.row_ids(), kept)


def slopes(losses: PairFunction, rows: torch.Tensor) -> tuple[PairLosses, torch.Tensor]:
    """The losses at ``rows`` ``[2 P]``, and ``[2 P]`` the derivative of their mean with respect to each."""
    with torch.enable_grad():
        point = rows.detach().double().requires_grad_()
        found = losses(point)
        (slope,) = torch.autograd.grad(found.loss.mean(), point)
    return PairLosses(found.loss.detach(), found.chosen_rewards, found.rejected_rewards), slope


def linearised(batch: PackedBatch, slope: torch.Tensor, scored: torch.Tensor) -> PackedBatch:
    """``batch`` for :class:`SlopeLoss`: its ``item_weight`` is the slope of the token's row, 0 where nothing is trained."""
    mask = batch.items["loss_mask"].bool()
    weight = torch.where(mask, batch.spread(slope.float()), 0.0)
    return batch.with_items(item_weight=weight, **{SCORED: scored})


@dataclass(frozen=True)
class SlopeLoss:
    """``sum_t item_weight[t] s_t``: its gradient is that of the pairs' mean loss; its value means nothing.

    Args:
        of_values: s_t is what a value model says; else the log-prob of the token.
    """

    of_values: bool = False

    def __call__(self, reader: object, batch: PackedBatch) -> LossOutput:
        read = getattr(reader, "values" if self.of_values else "log_prob")
        now: torch.Tensor = read()
        field = {k: batch.items[k].to(now.device) for k in ("item_weight", "loss_mask", SCORED)}
        mask = field["loss_mask"].bool()
        loss = torch.where(mask, now * field["item_weight"], 0.0).sum()
        # The slopes belong to the numbers of the first pass: where the second one finds others (dropout, a kernel that is not
        # deterministic) the gradient is that of a nearby point, and this says how near.
        gap = torch.where(mask, (now.detach() - field[SCORED]).abs(), 0.0).max()
        return LossOutput(loss, {}, {"train/rescored_diff_max": gap})
