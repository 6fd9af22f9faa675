"""The hinge of SLiC-HF (Zhao et al., arXiv 2305.10425) on log-ratios, as in RSO (Liu et al., arXiv 2309.06657)."""

from __future__ import annotations

import torch


def hinge(gap: torch.Tensor, *, beta: float) -> torch.Tensor:
    """``[P]`` losses ``max(0, 1 - beta h)``; a pair that is won by more than 1 / beta has no gradient.

    Args:
        gap: ``[P]`` h, see :func:`rlctl.algorithms.preference.base.log_ratio_gap`.
    """
    return torch.relu(1 - beta * gap)
