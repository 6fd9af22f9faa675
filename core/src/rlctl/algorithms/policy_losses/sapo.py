"""SAPO: "Soft Adaptive Policy Optimization" (arXiv 2511.20347), eqs. 5 and 6: a smooth gate instead of a clip."""

from __future__ import annotations

import torch

from rlctl.algorithms.policy_losses.base import TokenPolicyLoss, log_ratio


def sapo_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> TokenPolicyLoss:
    """``-A sigmoid(tau (r - 1)) 4 / tau`` with r = exp(logp - old), and tau by the sign of A.

    All arguments are ``[N]``. At r = 1 the gradient is that of ``-A r``; it dies away on both sides, the faster the larger
    tau. The value at r = 1 is ``-2 A / tau``, so ``actor/pg_loss`` is on a scale of its own. There is nothing to be clipped.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp()
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    return TokenPolicyLoss(-advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau)
