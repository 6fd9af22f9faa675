"""Generalized advantage estimation (Schulman et al., arXiv 1506.02438, eqs. 11 and 16), for responses of tokens.

N tokens of the batch, prompts included. A token's value is that of the state in which it is chosen, before it is there
(:meth:`rlctl.logits.ValueReader.values`). The trained tokens of a row are its time steps: one that is not trained (a prompt, a
tool's answer between two turns) is skipped, so the step behind a gap follows the one before it and a gap costs no discount. The
value behind a row's last trained token is 0: the response has ended.
"""

from __future__ import annotations

import math

import torch


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
    there = mask.bool().nonzero()[:, 0]
    r, v = token_rewards[there].double(), values[there].double()
    found = _backwards(r, v, row_ids[there], gamma, gamma * lam)
    returns = torch.zeros(mask.shape[0], dtype=torch.double).index_copy_(0, there, found + v)
    advantages = torch.zeros_like(returns).index_copy_(0, there, found)
    return whiten(advantages, mask), returns


def _backwards(r: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, gamma: float, decay: float) -> torch.Tensor:
    """Advantages ``[P]`` of P trained tokens that lie row by row: all rows at once, from their last tokens to their first."""
    counts = torch.bincount(rows) if rows.numel() else torch.zeros(0, dtype=torch.long)
    ends, order = counts.cumsum(0) - 1, counts.argsort(descending=True, stable=True)
    # The longest rows first: those that have a k-th token from their end are then the first ones, ever fewer of them.
    ends, lengths = ends[order], counts[order]
    out, after, value_after = torch.zeros_like(r), torch.zeros(len(ends)).double(), torch.zeros(len(ends)).double()
    still = len(ends)
    for back in range(int(lengths[0]) if len(lengths) else 0):
        while int(lengths[still - 1]) <= back:
            still -= 1
        at = ends[:still] - back
        value = v[at]
        after = r[at] + gamma * value_after[:still] - value + decay * after[:still]
        value_after = value
        out[at] = after
    return out


def whiten(values: torch.Tensor, mask: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """``(x - mean) / sqrt(variance + eps)`` ``[N]`` over the tokens of ``mask``, zero elsewhere.

    Sample variance; each token counts one, so a long row counts more than a short one. One token alone has no variance: it is
    only centred, to 0.
    """
    there = mask.bool()
    kept = values[there].double()
    if kept.numel() == 0:
        return torch.zeros_like(values)
    variance = float(kept.var()) if kept.numel() > 1 else 0.0
    return torch.where(there, (values - kept.mean()) / math.sqrt(variance + eps), 0.0)


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
