"""SimPO (Meng et al., arXiv 2405.14734, eq. 6): no reference; the reward of a response is its mean log-prob a token."""

from __future__ import annotations

import torch

from rlctl.algorithms.preference.base import smoothed_log_sigmoid


def simpo(
    chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float, gamma: float, label_smoothing: float = 0.0
) -> torch.Tensor:
    """``[P]`` losses ``-log sigmoid(beta log pi(w) / |w| - beta log pi(l) / |l| - gamma)``, in nats.

    Args:
        chosen, rejected: ``[P]`` log pi(y) / |y|: means over the tokens of a response.
        gamma: the margin by which a chosen response should win.
        label_smoothing: see :func:`rlctl.algorithms.preference.sigmoid.sigmoid`.
    """
    return smoothed_log_sigmoid(beta * (chosen - rejected) - gamma, label_smoothing)
