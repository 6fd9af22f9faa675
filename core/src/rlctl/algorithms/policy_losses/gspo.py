"""GSPO: "Group Sequence Policy Optimization" (arXiv 2507.18071), eqs. 5 to 7, in its token form (eqs. 13 and 14)."""

from __future__ import annotations

import torch

from rlctl.algorithms.policy_losses.base import TokenPolicyLoss, clipped_surrogate, row_means

LOG_RATIO_MAX = 10.0
"""Bound on the log of a row's ratio, in nats a token."""


def gspo_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    row_ids: torch.Tensor,
    num_rows: int,
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
) -> TokenPolicyLoss:
    """PPO's clipped surrogate with the ratio of whole rows, ``s = exp(mean over the row's tokens of (logp - old))``.

    At each token the value of the ratio is s while its gradient flows through that token alone. With one advantage a row and
    ``seq-mean-token-mean`` the loss is the paper's, in value and gradient; with another ``loss_agg_mode`` rows weigh otherwise.

    Args:
        log_probs, old_log_probs, advantages, mask, row_ids: ``[N]``.
        num_rows: R.
        clip_ratio_low, clip_ratio_high: the bounds of s; means of log-ratios are small, and so are these.

    Returns:
        Clipped are the tokens of rows whose clipped term is the larger one.
    """
    moved = row_means((log_probs - old_log_probs).detach(), mask, row_ids, num_rows)[row_ids]
    # The difference is zero; taken first, since beside a log-prob of -10 a log-ratio of 1e-4 would lose its digits.
    ratio = (moved + (log_probs - log_probs.detach())).clamp(max=LOG_RATIO_MAX).exp()
    return TokenPolicyLoss(*clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high))
