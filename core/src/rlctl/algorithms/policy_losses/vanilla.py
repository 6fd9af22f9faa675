"""PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with separate bounds (DAPO, arXiv 2503.14476) and dual clip
(arXiv 1912.09729, eq. 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenPolicyLoss:
    """``loss`` ``[N]``; ``clipped`` and ``dual_clipped`` ``[N]`` bool: where each bound was active."""

    loss: torch.Tensor
    clipped: torch.Tensor
    dual_clipped: torch.Tensor


def vanilla_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> TokenPolicyLoss:
    """Per-token loss ``max(-A r, -A clip(r, 1 - low, 1 + high))``, for A < 0 at most ``-A c``; r = exp(logp - old).

    All arguments are ``[N]``. The log-ratio is bounded to 20 nats so that one broken token cannot make an infinity.
    """
    log_ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss = torch.maximum(plain, bounded)
    limit = -advantages * clip_ratio_c
    negative = advantages < 0
    return TokenPolicyLoss(
        loss=torch.where(negative, torch.minimum(loss, limit), loss),
        clipped=bounded > plain,
        dual_clipped=negative & (loss > limit),
    )
