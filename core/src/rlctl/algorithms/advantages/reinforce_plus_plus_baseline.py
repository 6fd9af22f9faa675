"""REINFORCE++ with a baseline (arXiv 2501.03262): the group's mean goes, the scale is that of the whole batch."""

from __future__ import annotations

import torch

from rlctl.algorithms.advantages.groups import group_stats
from rlctl.algorithms.advantages.tokens import whiten


def reinforce_plus_plus_baseline_advantages(
    scores: torch.Tensor, groups: torch.Tensor, mask: torch.Tensor, row_ids: torch.Tensor
) -> torch.Tensor:
    """``r_i - mean(r)`` over the group of row i, then normalised over the trained tokens of the batch (a long row counts more).

    Args:
        scores, groups: ``[R]``.
        mask, row_ids: ``[N]``.

    Returns:
        ``[N]`` float64.
    """
    return whiten(group_stats(scores, groups).centred[row_ids], mask)
