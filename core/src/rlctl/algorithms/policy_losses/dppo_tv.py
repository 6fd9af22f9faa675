"""DPPO with total variation over two outcomes (arXiv 2602.04879, section 4)."""

from __future__ import annotations

import torch

from rlctl.algorithms.policy_losses.base import TokenPolicyLoss
from rlctl.algorithms.policy_losses.dppo import within_trust_region


def dppo_tv_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_ratio_low: float = 0.15,
    clip_ratio_high: float = 0.15,
    clip_ratio_c: float = 20.0,
) -> TokenPolicyLoss:
    """:func:`~rlctl.algorithms.policy_losses.dppo.within_trust_region` with the divergence ``|p - p_old|``.

    All tensors are ``[N]``. ``clip_ratio_low`` and ``clip_ratio_high`` bound the divergence, ``clip_ratio_c`` the ratio.
    """
    divergence = (log_probs.detach().exp() - old_log_probs.exp()).abs()
    return within_trust_region(
        log_probs,
        old_log_probs,
        advantages,
        divergence,
        low=clip_ratio_low,
        high=clip_ratio_high,
        ratio_max=clip_ratio_c,
    )
