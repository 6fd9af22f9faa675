"""The optimal token baseline (arXiv 2602.07078): the baseline of least variance at each token of a group.

The squared norm of a token's score function is taken by its gradient in the logits, ``|onehot - p|^2 = 1 - 2 p(token) +
sum_v p(v)^2``: it is known from the probabilities, without a backward pass.
"""

from __future__ import annotations

import torch

from rlctl.algorithms.advantages.groups import group_sum
from rlctl.algorithms.advantages.tokens import TrainedTokens


def optimal_token_baseline_advantages(
    token_rewards: torch.Tensor,
    groups: torch.Tensor,
    mask: torch.Tensor,
    row_ids: torch.Tensor,
    positions: torch.Tensor,
    old_log_probs: torch.Tensor,
    sum_p2: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    eps: float = 1e-8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``A_t = G_t - B_t`` with ``B_t = sum_i G_t^i W_t^i / (sum_i W_t^i + eps)`` over the rows i of the group with a trained
    token at that position; ``W_t = sum_{j <= t} (1 - 2 p_j + sum_v p_j(v)^2)``, and G the sum of the rewards from t on.

    Args:
        token_rewards, mask, row_ids: ``[N]``.
        groups: ``[R]``.
        positions: ``[N]`` place of each token in its row; rows of a group begin with the same prompt.
        old_log_probs: ``[N]`` log p of the sampled tokens.
        sum_p2: ``[N]`` sum over the vocabulary of the squared probabilities.
        rollout_is_weights: ``[N]`` importance weights, whose squares weigh the summands of W.

    Returns:
        advantages and returns, ``[N]`` float64; a group of one gets 0.
    """
    tokens = TrainedTokens.of(mask, row_ids)
    returns = tokens.to_go(token_rewards)
    norms = 1.0 - 2.0 * old_log_probs.double().exp() + sum_p2.double()
    if rollout_is_weights is not None:
        norms = norms * rollout_is_weights.double() ** 2
    # Rounding of float32 probabilities near 1 must not make a negative norm.
    weights = tokens.running_sum(norms.clamp(min=0.0))
    width = int(positions.max()) + 1 if len(positions) else 1
    place = (groups[row_ids] * width + positions)[tokens.index].unique(return_inverse=True)[1]
    own_returns, own_weights = returns[tokens.index], weights[tokens.index]
    baseline = group_sum(own_returns * own_weights, place) / (group_sum(own_weights, place) + eps)
    alone = group_sum(torch.ones(len(groups)), groups)[row_ids][tokens.index] == 1
    out = torch.zeros_like(returns)
    out[tokens.index] = torch.where(alone, 0.0, own_returns - baseline)
    return out, returns
