"""What a policy loss returns, and the guarded ratio."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG_RATIO_MAX = 20.0
"""Bound on a log-ratio in nats."""


@dataclass(frozen=True)
class TokenPolicyLoss:
    """``loss`` ``[N]``; ``clipped`` and ``dual_clipped`` ``[N]`` bool: where each bound was active (each loss says what that
    means for it); None: it has no such bound."""

    loss: torch.Tensor
    clipped: torch.Tensor | None = None
    dual_clipped: torch.Tensor | None = None


def log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """``[N]`` log of the ratio of the two policies, bounded."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``max(-A r, -A clip(r, 1 - low, 1 + high))`` ``[N]``, and where its clipped term, which has no gradient, is the larger one."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(plain, bounded), bounded > plain


def row_means(values: torch.Tensor, mask: torch.Tensor, row_ids: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``[R]`` mean of ``values`` ``[N]`` over the tokens of each row that are in the mask; 0 where none is. Has a gradient."""
    counts = torch.zeros(num_rows, dtype=values.dtype, device=values.device).index_add(
        0, row_ids, mask.to(values.dtype)
    )
    # where, not a product: an infinity at a masked position must not become NaN.
    sums = torch.zeros_like(counts).index_add(0, row_ids, torch.where(mask, values, 0.0))
    return sums / counts.clamp(min=1.0)
