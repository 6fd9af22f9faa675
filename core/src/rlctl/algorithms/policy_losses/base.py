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
