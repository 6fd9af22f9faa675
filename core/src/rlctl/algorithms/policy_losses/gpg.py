"""GPG: "Group Policy Gradient" (arXiv 2504.02546), eq. 6: the plain policy gradient (REINFORCE)."""

from __future__ import annotations

import torch

from rlctl.algorithms.policy_losses.base import TokenPolicyLoss


def gpg_policy_loss(log_probs: torch.Tensor, advantages: torch.Tensor) -> TokenPolicyLoss:
    """``-A logp`` ``[N]``: no ratio and no clip, so nothing holds the policy near the one that sampled when a batch makes
    several steps."""
    return TokenPolicyLoss(-advantages * log_probs)
