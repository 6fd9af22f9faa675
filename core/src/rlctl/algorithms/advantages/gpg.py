"""GPG: "Group Policy Gradient" (arXiv 2504.02546): no deviation, and a correction for rows that give no gradient."""

from __future__ import annotations

import torch

from rlctl.algorithms.advantages.groups import group_stats

_ROUNDING = 1e-12
"""A score so near the mean of its group, relative to the largest score, is the mean."""


def gpg_advantages(scores: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """``A_i = alpha (r_i - mean(r))`` over the group of row i, with ``alpha = N / (N - M)``.

    N are the rows of the batch and M those without a gradient, whose advantage is zero: a batch of which half says nothing
    steps as far as one without them. The paper divides by a constant F_norm too, which is 1 here.

    Args:
        scores, groups: ``[R]``.

    Returns:
        ``[R]`` float64.
    """
    centred = group_stats(scores, groups).centred
    limit = _ROUNDING * float(scores.abs().max()) if len(scores) else 0.0
    centred = torch.where(centred.abs() <= limit, 0.0, centred)
    return centred * (len(centred) / max(int((centred != 0).sum()), 1))
