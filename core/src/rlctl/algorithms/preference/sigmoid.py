"""DPO (Rafailov et al., arXiv 2305.18290, eq. 7), and cDPO: the same with labels that may be wrong (Mitchell 2023)."""

from __future__ import annotations

import torch

from rlctl.algorithms.preference.base import smoothed_log_sigmoid


def sigmoid(gap: torch.Tensor, *, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """``[P]`` losses ``-log sigmoid(beta h)``, in nats.

    Args:
        gap: ``[P]`` h, see :func:`rlctl.algorithms.preference.base.log_ratio_gap`.
        beta: how much a nat of log-ratio is worth; small values allow a longer way from the reference.
        label_smoothing: probability that a pair is the wrong way round, below 0.5.
    """
    return smoothed_log_sigmoid(beta * gap, label_smoothing)
