"""Pass@k with k the samples of a prompt: "Optimizing Language Models for Inference Time Objectives" (arXiv 2503.19595)."""

from __future__ import annotations

import torch

from rlctl.algorithms.advantages.groups import group_extreme, group_stats


def grpo_passk_advantages(
    scores: torch.Tensor, groups: torch.Tensor, *, norm_by_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """What each row adds to the best score of its group: ``A_i = max_j r_j - max_{j != i} r_j``.

    That is zero but for the single best row, which gets its lead over the second; of two best ones neither is missed. With
    ``norm_by_std`` divided by the group's unbiased standard deviation + eps, as GRPO's is.

    Args:
        scores: ``[R]``.
        groups: ``[R]`` integers.

    Returns:
        ``[R]`` float64. A group of one has no second and gets 0.
    """
    scores = scores.double()
    best = group_extreme(scores, groups, "amax")
    is_best = scores == best
    # One of the best is the first in the order of rows; without it, the group's best is the second best.
    row = torch.arange(len(scores))
    first = row == group_extreme(torch.where(is_best, row, len(scores)), groups, "amin")
    second = group_extreme(torch.where(first, -torch.inf, scores), groups, "amax")
    lead = torch.where(first & second.isfinite(), best - second, 0.0)
    return lead / (group_stats(scores, groups).std + eps) if norm_by_std else lead
