"""ReMax (arXiv 2310.10505), algorithm 1: the baseline is the reward of a greedy completion of the same prompt."""

from __future__ import annotations

import torch

from rlctl.algorithms.advantages.tokens import TrainedTokens


def remax_advantages(
    token_rewards: torch.Tensor, mask: torch.Tensor, row_ids: torch.Tensor, greedy_scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``A_t = sum_{k >= t} r_k - r(greedy)`` over the trained tokens of the row.

    Args:
        token_rewards, mask, row_ids: ``[N]``.
        greedy_scores: ``[R]``, alike for the rows of one prompt.

    Returns:
        advantages and returns, ``[N]`` float64.
    """
    returns = TrainedTokens.of(mask, row_ids).to_go(token_rewards)
    return torch.where(mask, returns - greedy_scores[row_ids], 0.0), returns
