"""IPO (Azar et al., arXiv 2310.12036, eq. 17): a squared distance, so that a pair that is won is not pushed further."""

from __future__ import annotations

import torch


def ipo(gap: torch.Tensor, *, beta: float) -> torch.Tensor:
    """``[P]`` losses ``(h - 1 / (2 beta))^2``; the paper's tau is ``beta``.

    Args:
        gap: ``[P]`` h, see :func:`rlctl.algorithms.preference.base.log_ratio_gap`.
    """
    return (gap - 1 / (2 * beta)).square()
