"""REINFORCE++ (arXiv 2501.03262): returns without a group, normalised over the whole batch."""

from __future__ import annotations

import torch

from rlctl.algorithms.advantages.tokens import TrainedTokens, whiten


def reinforce_plus_plus_advantages(
    token_rewards: torch.Tensor, mask: torch.Tensor, row_ids: torch.Tensor, *, gamma: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """``A_t = (G_t - mean(G)) / std(G)`` with ``G_t = r_t + gamma G_{t+1}``; mean and deviation over the batch's trained tokens.

    Args:
        token_rewards, mask, row_ids: ``[N]``.
        gamma: discount of one trained token.

    Returns:
        advantages and returns, ``[N]`` float64.
    """
    returns = TrainedTokens.of(mask, row_ids).to_go(token_rewards, gamma)
    return whiten(returns, mask), returns
