"""Group-relative advantages: GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2) and Dr. GRPO (arXiv 2503.20783)."""

from __future__ import annotations

import torch


def grpo_advantages(
    scores: torch.Tensor, groups: torch.Tensor, *, norm_by_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """Advantage of each row against the other samples of its prompt.

    ``A_i = (r_i - mean(r)) / (std(r) + eps)`` over the group of row i, with the unbiased standard deviation; without
    ``norm_by_std`` the mean is subtracted only (Dr. GRPO). A group of one row has advantage 0: nothing to compare with.

    Args:
        scores: ``[R]`` one reward a row.
        groups: ``[R]`` integer group of each row, 0 .. G-1.

    Returns:
        ``[R]`` float32. Rows of a group whose scores are all equal get exactly 0.
    """
    scores = scores.double()
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    count = torch.zeros(num_groups, dtype=torch.double).index_add_(0, groups, torch.ones_like(scores))
    mean = torch.zeros(num_groups, dtype=torch.double).index_add_(0, groups, scores) / count.clamp(min=1)
    centred = scores - mean[groups]
    variance = torch.zeros(num_groups, dtype=torch.double).index_add_(0, groups, centred**2) / (count - 1).clamp(min=1)
    # Rounding of the mean must not turn "all equal" into a tiny advantage that the division by eps blows up.
    spread = torch.zeros(num_groups, dtype=torch.double).scatter_reduce_(0, groups, scores, "amax", include_self=False)
    low = torch.zeros(num_groups, dtype=torch.double).scatter_reduce_(0, groups, scores, "amin", include_self=False)
    centred = torch.where((spread == low)[groups], 0.0, centred)
    if norm_by_std:
        centred = centred / (variance.sqrt()[groups] + eps)
    return centred.float()
