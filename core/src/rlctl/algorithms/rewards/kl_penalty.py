"""The KL to the reference as a part of the reward: Ouyang et al. 2022 (arXiv 2203.02155), eq. 2, at each token.

R rows, N tokens. Estimators of the KL are :func:`rlctl.algorithms.kl.kl_estimate`'s.
"""

from __future__ import annotations

import torch


def penalised_token_rewards(
    token_rewards: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, coef: float
) -> torch.Tensor:
    """``r_t - coef KL_t`` ``[N]`` at the trained tokens, zero elsewhere.

    Args:
        token_rewards: ``[N]``, mostly the row's reward at its last trained token.
        kl: ``[N]`` in nats. Like the rewards not read where ``mask`` is False.
        mask: ``[N]`` bool.
    """
    return torch.where(mask, token_rewards - coef * torch.where(mask, kl, 0.0), 0.0)


def row_sums(values: torch.Tensor, mask: torch.Tensor, row_ids: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``[R]`` the sum of ``values`` ``[N]`` over the trained tokens of each row; 0 for a row without one."""
    return torch.zeros(num_rows, dtype=values.dtype).index_add_(0, row_ids, torch.where(mask, values, 0.0))


def mean_kl(kl: torch.Tensor, mask: torch.Tensor, row_ids: torch.Tensor, num_rows: int) -> float | None:
    """The mean over rows of a row's mean KL over its trained tokens: what a controller is told.

    Rows without a trained token do not count; None where no row has one.
    """
    counts = row_sums(torch.ones_like(kl), mask, row_ids, num_rows)
    there = counts > 0
    if not bool(there.any()):
        return None
    return float((row_sums(kl, mask, row_ids, num_rows)[there] / counts[there]).mean())
