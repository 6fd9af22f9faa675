"""KL-Cov (arXiv 2505.22617), eqs. 12 and 13: the tokens of highest covariance are held near the policy before the update."""

from __future__ import annotations

import torch

from rlctl.algorithms.policy_losses.base import TokenPolicyLoss, log_ratio
from rlctl.algorithms.policy_losses.covariance import chosen_at, covariances, number_chosen


def choose_kl_cov(
    old_log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *, kl_cov_ratio: float = 2e-4
) -> dict[str, torch.Tensor]:
    """``cov_chosen`` ``[N]``: the ``kl_cov_ratio`` of the mini-batch's trained tokens (at least one) with the highest covariance
    (see :mod:`rlctl.algorithms.policy_losses.covariance`); of equal ones the first.

    Args:
        old_log_probs, advantages, mask: ``[N]`` of the whole mini-batch.
    """
    found = covariances(old_log_probs, advantages, mask)
    order = found.sort(descending=True, stable=True).indices
    return {"cov_chosen": chosen_at(order[: number_chosen(kl_cov_ratio, len(found))], mask)}


def kl_cov_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    cov_chosen: torch.Tensor,
    *,
    ppo_kl_coef: float = 1.0,
) -> TokenPolicyLoss:
    """``-A r`` with r = exp(logp - old), plus ``ppo_kl_coef |logp - old|`` at the chosen tokens. Nothing is clipped.

    All arguments are ``[N]``. A chosen token whose advantage is zero has a gradient all the same.
    """
    moved = log_ratio(log_probs, old_log_probs)
    penalty = torch.where(cov_chosen.bool(), ppo_kl_coef * (log_probs - old_log_probs).abs(), 0.0)
    return TokenPolicyLoss(-advantages * moved.exp() + penalty)
