"""Generalized advantage estimation (Schulman et al., arXiv 1506.02438, eqs. 11 and 16), for responses of tokens.

N tokens of the batch, prompts included. A token's value is that of the state in which it is chosen, before it is there
(:meth:`rlctl.logits.ValueReader.values`). The trained tokens of a row are its time steps: one that is not trained (a prompt, a
tool's answer between two turns) is skipped, so the step behind a gap follows the one before it and a gap costs no discount. The
value behind a row's last trained token is 0: the response has ended.
"""

from __future__ import annotations

import math

import torch

from rlctl.algorithms.advantages.tokens import TrainedTokens, whiten


def gae_advantages(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    row_ids: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``A_t = delta_t + gamma lam A_(t+1)`` with ``delta_t = r_t + gamma V_(t+1) - V_t``, whitened over the batch.

    Args:
        token_rewards: ``[N]`` r, what follows the choice of each token. Not read where ``mask`` is False.
        values: ``[N]`` V. Likewise.
        mask: ``[N]`` bool, the trained tokens.
        row_ids: ``[N]`` index of each token's row, from 0 and never falling.
        gamma: discount of a step.
        lam: 0 trusts the values (one step ahead), 1 the rewards.

    Returns:
        advantages ``[N]`` float64, of mean 0 and variance 1 over the trained tokens of the batch; and returns ``[N]`` float64,
        ``A_t + V_t`` with A before whitening: what the critic is to say. Both are zero where ``mask`` is False.
    """
    tokens = TrainedTokens.of(mask.bool(), row_ids)
    v = values.double()[tokens.index]
    # The value of the row's next trained token; none behind the last one, where the response has ended.
    following = torch.where(tokens.order == tokens.counts - 1, 0.0, v.roll(-1))
    delta = torch.zeros(tokens.num_items, dtype=torch.float64)
    delta[tokens.index] = token_rewards.double()[tokens.index] + gamma * following - v
    advantages = tokens.to_go(delta, gamma * lam)
    returns = advantages.clone()
    returns[tokens.index] += v
    return whiten(advantages, mask.bool()), returns


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """``1 - var(returns - values) / var(returns)`` over the tokens of ``mask``: 1 for a critic that knows them, 0 for one that
    says the same everywhere, negative for worse. NaN where all returns are equal, but for their rounding."""
    there = mask.bool()
    known, said = returns[there].double(), values[there].double()
    if known.numel() < 2:
        return math.nan
    spread = float(known.var())
    rounding = 1e-6 * float(known.abs().max())
    return 1.0 - float((known - said).var()) / spread if spread > rounding**2 else math.nan
