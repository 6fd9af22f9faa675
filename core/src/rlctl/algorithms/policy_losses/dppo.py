"""What the two forms of DPPO share, "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879).

The divergence of a token is that of two outcomes, the sampled token and all the others together: a lower bound of the divergence
over the vocabulary, and known from the token's own probability.
"""

from __future__ import annotations

import torch

from rlctl.algorithms.policy_losses.base import TokenPolicyLoss, log_ratio


def within_trust_region(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    divergence: torch.Tensor,
    *,
    low: float,
    high: float,
    ratio_max: float,
) -> TokenPolicyLoss:
    """``-sg(min(r, ratio_max)) A logp``, but zero where the policy is out of the trust region and the advantage drives it on.

    All tensors are ``[N]``. Out of it is a token whose divergence exceeds ``high`` with A > 0 and a probability that has grown,
    or ``low`` with A <= 0 and one that has shrunk. Clipped are the tokens left out, dual-clipped those whose r is bounded.
    """
    ratio = log_ratio(log_probs.detach(), old_log_probs).exp()
    grown = log_probs.detach() > old_log_probs
    shrunk = log_probs.detach() < old_log_probs
    positive = advantages > 0
    out = (positive & grown & (divergence > high)) | (~positive & shrunk & (divergence > low))
    loss = -ratio.clamp(max=ratio_max) * advantages * log_probs
    return TokenPolicyLoss(torch.where(out, 0.0, loss), clipped=out, dual_clipped=~out & (ratio > ratio_max))
