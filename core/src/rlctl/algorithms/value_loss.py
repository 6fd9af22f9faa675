"""PPO's clipped value loss, and the loss function that a critic trains with.

The squared error of the value to the return, where a value that has moved away from the old one by more than a bound is taken
at the bound, and the larger of the two errors counts: what implementations of PPO (Schulman et al., arXiv 1707.06347) do to
keep the critic's steps small, as the clip of the ratio keeps the policy's. The paper itself has the plain squared error (its
eq. 9), which ``clip_range`` None gives. N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlctl.batch import PackedBatch
from rlctl.logits import LossOutput, ValueReader


@dataclass(frozen=True)
class TokenValueLoss:
    """``loss`` ``[N]``; ``clipped`` ``[N]`` bool: where the error at the bound is the larger one, so the gradient is zero."""

    loss: torch.Tensor
    clipped: torch.Tensor


def clipped_value_loss(
    values: torch.Tensor, returns: torch.Tensor, old_values: torch.Tensor | None, clip_range: float | None
) -> TokenValueLoss:
    """Per-token loss ``max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2) / 2``.

    Args:
        values: ``[N]`` v, with gradient.
        returns: ``[N]`` R.
        old_values: ``[N]`` v_old, of the critic before the update; not read without a bound.
        clip_range: eps, in the unit of the values; None for the plain squared error.
    """
    plain = (values - returns).square()
    if clip_range is None:
        return TokenValueLoss(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    assert clip_range > 0, clip_range
    assert old_values is not None, "a bound needs the values before the update"
    near = torch.clamp(values, old_values - clip_range, old_values + clip_range)
    bounded = (near - returns).square()
    return TokenValueLoss(0.5 * torch.maximum(plain, bounded), bounded > plain)


@dataclass(frozen=True)
class ValueLoss:
    """The clipped value loss over ``loss_mask``, weighted by ``item_weight``.

    Fields read, each ``[N]``: ``item_weight``, ``loss_mask``, ``returns`` and, with a bound, ``old_values``; all of them speak
    of the state before their token (see :meth:`rlctl.logits.ValueReader.values`).

    Args:
        clip_range: see :func:`clipped_value_loss`.
    """

    clip_range: float | None = 0.5

    def __call__(self, reader: ValueReader, batch: PackedBatch) -> LossOutput:
        values = reader.values()
        field = {k: v.to(values.device) for k, v in batch.items.items()}
        weight, mask = field["item_weight"], field["loss_mask"].bool()
        result = clipped_value_loss(values, field["returns"], field.get("old_values"), self.clip_range)

        def total(value: torch.Tensor) -> torch.Tensor:
            # where, not a product: an infinity at a masked position must not become NaN.
            return torch.where(mask, value * weight, 0.0).sum()

        loss = total(result.loss)
        sums: dict[str, torch.Tensor | float] = {
            "critic/vf_loss": loss.detach(),
            "critic/vf_clipfrac": total(result.clipped.float()),
            "critic/vpred_mean": total(values.detach()),
            "_weight": total(torch.ones_like(weight)),
        }
        return LossOutput(loss, sums)
