"""Advantages that differ from token to token of a row: gae, reinforce_plus_plus, remax, optimal_token_baseline.

All take ``token_rewards``; masked tokens are skipped and their rewards not read. All return ``(advantages, returns)``,
both 0.0 at masked tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from oracle.basics import Floats, Groups, Masks, members, whiten

Pair = tuple[list[list[float]], list[list[float]]]


def _kept(mask: Sequence[bool]) -> list[int]:
    return [token for token, kept in enumerate(mask) if kept]


def gae(
    token_rewards: Floats,
    values: Floats,
    masks: Masks,
    *,
    gamma: float,
    lam: float,
    whitened: bool = True,
    eps: float = 1e-8,
) -> Pair:
    """GAE (Schulman et al. 2016, arXiv:1506.02438), eqs. 11 and 16, as PPO for language models uses it.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  returns_t = A_t + V_t, from the
    unwhitened A. V after the last unmasked token is 0 (the response ends). t runs over the unmasked tokens of the row
    only: in a multi-turn row the next value is that of the next trained token, and a gap costs no discount. Then the
    advantages are whitened over the batch's unmasked tokens with the sample variance, eps 1e-8 inside the root.
    """
    advantages = [[0.0] * len(row) for row in token_rewards]
    returns = [[0.0] * len(row) for row in token_rewards]
    for row, mask in enumerate(masks):
        following_value = 0.0
        following_advantage = 0.0
        for token in reversed(_kept(mask)):
            delta = token_rewards[row][token] + gamma * following_value - values[row][token]
            advantages[row][token] = delta + gamma * lam * following_advantage
            returns[row][token] = advantages[row][token] + values[row][token]
            following_value = values[row][token]
            following_advantage = advantages[row][token]
    return (whiten(advantages, masks, eps) if whitened else advantages), returns


def _discounted(token_rewards: Floats, masks: Masks, gamma: float) -> list[list[float]]:
    """G_t = r_t + gamma G_{t+1} over the unmasked tokens of each row."""
    out = [[0.0] * len(row) for row in token_rewards]
    for row, mask in enumerate(masks):
        following = 0.0
        for token in reversed(_kept(mask)):
            following = token_rewards[row][token] + gamma * following
            out[row][token] = following
    return out


def reinforce_plus_plus(token_rewards: Floats, masks: Masks, *, gamma: float, eps: float = 1e-8) -> Pair:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): discounted returns, whitened over the batch.

    G_t = sum_{k >= t} gamma^(k - t) r_k over the row's unmasked tokens; A = whiten(G). Masked tokens are skipped, as
    in ``gae``; verl's code instead sets the running return to 0 at a masked token, which agrees for rows whose masked
    tokens all come last and cuts off the earlier turns of a multi-turn row.
    """
    returns = _discounted(token_rewards, masks, gamma)
    return whiten(returns, masks, eps), returns


def remax(token_rewards: Floats, masks: Masks, greedy_rewards: Sequence[float]) -> Pair:
    """ReMax (Li et al. 2023, arXiv:2310.10505), algorithm 1: A_t = sum_{k >= t} r_k - reward of the greedy response.

    ``greedy_rewards``: per row, the reward of the greedy decoding of the same prompt. No discount.
    """
    returns = _discounted(token_rewards, masks, 1.0)
    advantages = [[0.0] * len(row) for row in token_rewards]
    for row, mask in enumerate(masks):
        for token in _kept(mask):
            advantages[row][token] = returns[row][token] - greedy_rewards[row]
    return advantages, returns


def optimal_token_baseline(
    token_rewards: Floats,
    masks: Masks,
    groups: Groups,
    log_probs: Floats,
    sum_pi_squared: Floats,
    *,
    rollout_is_weights: Floats | None = None,
    eps: float = 1e-8,
) -> Pair:
    """The optimal token baseline (2026, arXiv:2602.07078), equations as verl's docs/algo/otb.md states them.

    W_t = sum_{j <= t} (1 - 2 pi_j + sum_v pi_j(v)^2): the squared norm of the score with respect to the logits,
    accumulated; pi_j is the sampled token's probability. B_t = sum_i G_t^i W_t^i / (sum_i W_t^i + eps) over the rows
    of the group that have an unmasked token at position t (position: index in the response, masked tokens included);
    A_t = G_t - B_t, with G_t the undiscounted reward to go. Sums over j and G skip masked tokens. A group of one has
    baseline 0. With ``rollout_is_weights`` each summand of W is multiplied by the weight squared. A group without
    weight at t (all certain) has baseline 0.
    """
    returns = _discounted(token_rewards, masks, 1.0)
    weights = [[0.0] * len(row) for row in token_rewards]
    for row, mask in enumerate(masks):
        running = 0.0
        for token in _kept(mask):
            norm = 1.0 - 2.0 * math.exp(log_probs[row][token]) + sum_pi_squared[row][token]
            if rollout_is_weights is not None:
                norm *= rollout_is_weights[row][token] ** 2
            running += norm
            weights[row][token] = running
    advantages = [[0.0] * len(row) for row in token_rewards]
    for rows in members(groups).values():
        for row in rows:
            for token in _kept(masks[row]):
                baseline = 0.0
                if len(rows) > 1:
                    there = [other for other in rows if token < len(masks[other]) and masks[other][token]]
                    above = math.fsum(returns[other][token] * weights[other][token] for other in there)
                    below = math.fsum(weights[other][token] for other in there) + eps
                    baseline = above / below
                advantages[row][token] = returns[row][token] - baseline
    return advantages, returns
