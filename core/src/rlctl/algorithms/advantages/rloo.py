"""RLOO: "Back to Basics: Revisiting REINFORCE Style Optimization" (arXiv 2402.14740), section 3.2."""

from __future__ import annotations

import torch

from rlctl.algorithms.advantages.groups import group_stats


def rloo_advantages(scores: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """``A_i = r_i - mean of the others' r`` in the group of row i ``[R]``, which is ``n / (n - 1) (r_i - mean(r))``.

    A group of one has no others: 0.
    """
    found = group_stats(scores, groups)
    return found.centred * found.count / (found.count - 1).clamp(min=1)
