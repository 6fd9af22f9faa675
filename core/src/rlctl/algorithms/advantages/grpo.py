"""Group-relative advantages: GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2) and Dr. GRPO (arXiv 2503.20783, section 3.1)."""

from __future__ import annotations

import torch

from rlctl.algorithms.advantages.groups import group_stats


def grpo_advantages(
    scores: torch.Tensor, groups: torch.Tensor, *, norm_by_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """``A_i = (r_i - mean(r)) / (std(r) + eps)`` over the group of row i, with the unbiased standard deviation.

    Args:
        scores: ``[R]`` one reward a row.
        groups: ``[R]`` integer group of each row.
        norm_by_std: False: the mean is subtracted only.

    Returns:
        ``[R]`` float64. Rows of a group whose scores are all equal, or of a group of one, get exactly 0.
    """
    found = group_stats(scores, groups)
    return found.centred / (found.std + eps) if norm_by_std else found.centred


def dr_grpo_advantages(scores: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """``A_i = r_i - mean(r)`` over the group of row i ``[R]``: dividing by the deviation would favour prompts that are nearly
    solved or nearly hopeless. The paper's loss divides by a constant too, not by the row's length:
    ``seq-mean-token-sum-norm``."""
    return group_stats(scores, groups).centred
