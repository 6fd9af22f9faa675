"""Clip-Cov (arXiv 2505.22617), eqs. 10 and 11: a few tokens of high covariance are left out of the update."""

from __future__ import annotations

import torch

from rlctl.algorithms.policy_losses.base import TokenPolicyLoss, clipped_surrogate, log_ratio
from rlctl.algorithms.policy_losses.covariance import chosen_at, covariances, number_chosen


def choose_clip_cov(
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    generator: torch.Generator,
    *,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> dict[str, torch.Tensor]:
    """``cov_chosen`` ``[N]``: a random ``clip_cov_ratio`` of the mini-batch's trained tokens (at least one), out of those whose
    covariance lies strictly between the two bounds (see :mod:`rlctl.algorithms.policy_losses.covariance`).

    Args:
        old_log_probs, advantages, mask: ``[N]`` of the whole mini-batch.
    """
    found = covariances(old_log_probs, advantages, mask)
    candidates = ((found > clip_cov_lb) & (found < clip_cov_ub)).nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=generator)[: number_chosen(clip_cov_ratio, len(found))]
    return {"cov_chosen": chosen_at(candidates[order], mask)}


def clip_cov_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    cov_chosen: torch.Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> TokenPolicyLoss:
    """PPO's clipped surrogate without dual clip; zero, in value and gradient, at the chosen tokens.

    All arguments are ``[N]``. Clipped are the chosen tokens and those whose clipped term is the larger one.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    chosen = cov_chosen.bool()
    return TokenPolicyLoss(torch.where(chosen, 0.0, loss), clipped=clipped | chosen)
