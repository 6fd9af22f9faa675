"""GMPO: "Geometric-Mean Policy Optimization" (arXiv 2507.20673), eq. 4 and algorithm 1."""

from __future__ import annotations

import torch

from rlctl.algorithms.policy_losses.base import TokenPolicyLoss, log_ratio, row_means


def geo_mean_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    row_ids: torch.Tensor,
    num_rows: int,
    *,
    clip_ratio_low: float = 0.4,
    clip_ratio_high: float = 0.4,
) -> TokenPolicyLoss:
    """``-A exp(mean over the row's tokens of d)``: the geometric mean of a row's ratios, d = logp - old of each token clipped
    on the side to which the advantage pushes: at most ``high`` for A > 0, at least ``-low`` for A < 0.

    The bounds are of log-ratios, and wider than PPO's, since one token moves the mean little. Every token of a row has the
    row's loss, with a gradient in all of its tokens: with ``seq-mean-token-mean`` the loss is the paper's. A is the mean of the
    row's advantages.

    Args:
        log_probs, old_log_probs, advantages, mask, row_ids: ``[N]``.
        num_rows: R.

    Returns:
        Clipped are the tokens whose log-ratio is at its bound; they have no gradient.
    """
    moved = log_ratio(log_probs, old_log_probs)
    advantage = row_means(advantages, mask, row_ids, num_rows)
    sign = advantage.sign()[row_ids]
    bounded = torch.where(sign > 0, moved.clamp(max=clip_ratio_high), moved)
    bounded = torch.where(sign < 0, bounded.clamp(min=-clip_ratio_low), bounded)
    loss = -advantage * row_means(bounded, mask, row_ids, num_rows).exp()
    return TokenPolicyLoss(loss[row_ids], clipped=(bounded != moved).detach())
