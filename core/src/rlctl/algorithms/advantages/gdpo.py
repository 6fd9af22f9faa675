"""GDPO: "Group reward-Decoupled Normalization Policy Optimization" (arXiv 2601.05242), eqs. 4 to 6: each reward on its own."""

from __future__ import annotations

import torch

from rlctl.algorithms.advantages.groups import group_stats


def gdpo_advantages(
    components: torch.Tensor, component_weights: torch.Tensor, groups: torch.Tensor, *, eps: float = 1e-6
) -> torch.Tensor:
    """``S_i = sum_k w_k (r_ki - mean(r_k)) / (std(r_k) + eps)`` over the group of row i, then ``(S_i - mean(S)) / (std(S) + eps)``
    over the rows of the batch.

    Adding the rewards first, as GRPO does, gives rows of unlike merits the same advantage when their sums agree.

    Args:
        components: ``[C, R]`` each reward of each row, without its weight.
        component_weights: ``[C]``.
        groups: ``[R]`` integers.

    Returns:
        ``[R]`` float64.
    """
    total = torch.zeros(len(groups), dtype=torch.float64)
    for weight, values in zip(component_weights.double(), components, strict=True):
        found = group_stats(values, groups)
        total += weight * found.centred / (found.std + eps)
    if len(total) < 2:
        return torch.zeros_like(total)
    return (total - total.mean()) / (total.std() + eps)
