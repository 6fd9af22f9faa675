"""OPO: "On-Policy RL with Optimal Reward Baseline" (arXiv 2505.23585): the baseline of least variance, where the squared
norm of a row's gradient is taken to grow with its length."""

from __future__ import annotations

import torch

from rlctl.algorithms.advantages.groups import group_extreme, group_sum


def opo_advantages(
    scores: torch.Tensor, groups: torch.Tensor, mask: torch.Tensor, row_ids: torch.Tensor
) -> torch.Tensor:
    """``A_i = r_i - sum_j l_j r_j / sum_j l_j`` over the group of row i; l is the number of trained tokens of a row.

    Args:
        scores, groups: ``[R]``.
        mask, row_ids: ``[N]``.

    Returns:
        ``[R]`` float64; exactly 0 where all of a group are equal, and in a group of one.
    """
    scores = scores.double()
    lengths = torch.zeros_like(scores).index_add_(0, row_ids, mask.double())
    baseline = group_sum(lengths * scores, groups) / group_sum(lengths, groups).clamp(min=1.0)
    equal = group_extreme(scores, groups, "amax") == group_extreme(scores, groups, "amin")
    return torch.where(equal, 0.0, scores - baseline)
