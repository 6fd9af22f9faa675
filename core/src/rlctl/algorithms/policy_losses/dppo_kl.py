"""DPPO with the KL over two outcomes (arXiv 2602.04879, section 4)."""

from __future__ import annotations

import torch

from rlctl.algorithms.policy_losses.base import TokenPolicyLoss
from rlctl.algorithms.policy_losses.dppo import within_trust_region


def binary_kl(old_log_probs: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """``[N]`` KL of Bernoulli(p_old) to Bernoulli(p), in nats; finite, though huge, where p is 0 or 1 and p_old is not.

    1 - p is taken as ``-expm1(log p)``: in float32 the difference would be rounded away for p near 1, where policies are sure.
    """
    tiny = torch.finfo(log_probs.dtype).tiny
    old, old_rest = old_log_probs.exp(), -torch.expm1(old_log_probs)
    rest = (-torch.expm1(log_probs)).clamp(min=tiny)
    second = old_rest * (old_rest.clamp(min=tiny).log() - rest.log())
    return torch.where(old > 0, old * (old_log_probs - log_probs), 0.0) + second


def dppo_kl_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_ratio_low: float = 0.05,
    clip_ratio_high: float = 0.05,
    clip_ratio_c: float = 20.0,
) -> TokenPolicyLoss:
    """:func:`~rlctl.algorithms.policy_losses.dppo.within_trust_region` with the divergence ``KL(p_old || p)`` of two outcomes.

    All tensors are ``[N]``. ``clip_ratio_low`` and ``clip_ratio_high`` bound the divergence, ``clip_ratio_c`` the ratio.
    """
    return within_trust_region(
        log_probs,
        old_log_probs,
        advantages,
        binary_kl(old_log_probs, log_probs.detach()),
        low=clip_ratio_low,
        high=clip_ratio_high,
        ratio_max=clip_ratio_c,
    )
