"""Statistics of the rows of a group, for rows in any order. R rows, G groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GroupStats:
    """Of a number ``[R]`` of each row; everything ``[R]`` float64 at the rows, each row seeing its own group.

    Args:
        count: rows of the group.
        centred: the number less the group's mean; exactly zero where all of the group are equal.
        std: unbiased standard deviation; zero for a group of one.
    """

    count: torch.Tensor
    centred: torch.Tensor
    std: torch.Tensor


def group_stats(values: torch.Tensor, groups: torch.Tensor) -> GroupStats:
    """Statistics of ``values`` ``[R]`` within ``groups`` ``[R]``, integers."""
    values = values.double()
    count = group_sum(torch.ones_like(values), groups)
    centred = values - group_sum(values, groups) / count
    # Rounding of the mean must not turn "all equal" into a tiny number that a division by eps blows up.
    equal = group_extreme(values, groups, "amax") == group_extreme(values, groups, "amin")
    centred = torch.where(equal, 0.0, centred)
    variance = group_sum(centred**2, groups) / (count - 1).clamp(min=1)
    return GroupStats(count, centred, variance.sqrt())


def group_sum(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """``[R]`` the sum over each row's group, at the row."""
    return torch.zeros(_size(groups), dtype=values.dtype).index_add_(0, groups, values)[groups]


def group_extreme(values: torch.Tensor, groups: torch.Tensor, kind: str) -> torch.Tensor:
    """``[R]`` the largest (``amax``) or smallest (``amin``) of each row's group, at the row."""
    out = torch.zeros(_size(groups), dtype=values.dtype)
    return out.scatter_reduce_(0, groups, values, kind, include_self=False)[groups]


def _size(groups: torch.Tensor) -> int:
    return int(groups.max()) + 1 if groups.numel() else 0
