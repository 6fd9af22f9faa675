"""PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with separate bounds (DAPO, arXiv 2503.14476) and dual clip
(arXiv 1912.09729, eq. 5)."""

from __future__ import annotations

import torch

from rlctl.algorithms.policy_losses.base import TokenPolicyLoss, clipped_surrogate, log_ratio


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

    All arguments are ``[N]``. Clipped is a token whose clipped term is the larger one, dual-clipped one at ``-A c``: neither
    has a gradient.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    limit = -advantages * clip_ratio_c
    negative = advantages < 0
    return TokenPolicyLoss(
        loss=torch.where(negative, torch.minimum(loss, limit), loss),
        clipped=clipped,
        dual_clipped=negative & (loss > limit),
    )
