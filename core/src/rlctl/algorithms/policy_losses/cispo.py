"""CISPO: "MiniMax-M1" (arXiv 2506.13585), eqs. 4 and 5: the importance weight is clipped, and no token loses its gradient."""

from __future__ import annotations

import torch

from rlctl.algorithms.policy_losses.base import TokenPolicyLoss, log_ratio


def cispo_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_ratio_low: float = 1.0,
    clip_ratio_high: float = 0.2,
) -> TokenPolicyLoss:
    """``-sg(clip(r, 1 - low, 1 + high)) A logp`` with r = exp(logp - old), where sg stops the gradient.

    All arguments are ``[N]``. A ``low`` of 1 is no lower bound, as in the paper. Clipped are the tokens whose weight is at a
    bound; they keep a gradient.
    """
    ratio = log_ratio(log_probs.detach(), old_log_probs).exp()
    weight = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return TokenPolicyLoss(-weight * advantages * log_probs, clipped=weight != ratio)
