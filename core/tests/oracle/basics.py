"""What the references share: types, float64 scalars with gradients, group membership, whitening."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch

Number = float | torch.Tensor
"""A float, or a float64 torch scalar whose gradient is wanted."""
Rows = Sequence[Sequence[Number]]
Floats = Sequence[Sequence[float]]
Masks = Sequence[Sequence[bool]]
Groups = Sequence[Hashable]


def scalar(number: Number) -> torch.Tensor:
    """``number`` as a float64 torch scalar; a tensor keeps its graph."""
    return number if isinstance(number, torch.Tensor) else torch.tensor(number, dtype=torch.float64)


def value(number: Number) -> float:
    """The number without its graph."""
    return float(number.detach()) if isinstance(number, torch.Tensor) else float(number)


def leaves(rows: Floats) -> list[list[torch.Tensor]]:
    """One float64 leaf a token, ready for ``gradients``."""
    return [[torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in row] for row in rows]


def floats(rows: Rows) -> list[list[float]]:
    return [[value(number) for number in row] for row in rows]


def gradients(total: torch.Tensor, rows: Sequence[Sequence[torch.Tensor]]) -> list[list[float]]:
    """d total / d token for each leaf of ``rows``; 0.0 where ``total`` does not depend on it."""
    flat = [leaf for row in rows for leaf in row]
    if not flat or not total.requires_grad:
        return [[0.0 for _ in row] for row in rows]
    found = iter(torch.autograd.grad(total, flat, allow_unused=True, retain_graph=True))
    out = []
    for row in rows:
        of_row = []
        for _ in row:
            gradient = next(found)
            of_row.append(0.0 if gradient is None else float(gradient))
        out.append(of_row)
    return out


def ratio(new: Number, old: Number, log_ratio_bound: float | None = None) -> torch.Tensor:
    """pi / pi_old of one token. ``log_ratio_bound``: clamp the log ratio to +-bound first (no gradient outside)."""
    log_ratio = scalar(new) - value(old)
    if log_ratio_bound is not None and abs(value(log_ratio)) > log_ratio_bound:
        log_ratio = scalar(math.copysign(log_ratio_bound, value(log_ratio)))
    return torch.exp(log_ratio)


def members(groups: Groups) -> dict[Hashable, list[int]]:
    """The row indices of each group."""
    found: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        found.setdefault(group, []).append(row)
    return found


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def sample_variance(values: Sequence[float]) -> float:
    """With n - 1; needs at least two values."""
    centre = mean(values)
    return math.fsum((x - centre) ** 2 for x in values) / (len(values) - 1)


def spread(per_row: Sequence[float], masks: Masks) -> list[list[float]]:
    """A row's value at each of its unmasked tokens, 0.0 at the masked ones."""
    out = []
    for of_row, mask in zip(per_row, masks, strict=True):
        out.append([of_row if kept else 0.0 for kept in mask])
    return out


def unmasked(rows: Floats, masks: Masks) -> list[float]:
    """All unmasked values of the batch in one list."""
    found = []
    for row, mask in zip(rows, masks, strict=True):
        for number, kept in zip(row, mask, strict=True):
            if kept:
                found.append(number)
    return found


def whiten(rows: Floats, masks: Masks, eps: float = 1e-8) -> list[list[float]]:
    """(x - mean) / sqrt(var + eps) over the unmasked tokens of the batch; 0.0 at masked tokens.

    The variance is the sample variance (n - 1), which is what PPO implementations of this field use. A token weighs
    one, so a long row weighs more than a short one. Fewer than two unmasked tokens have no such variance: refused.
    """
    values = unmasked(rows, masks)
    if len(values) < 2:
        raise ValueError(f"whitening needs at least two unmasked tokens, found {len(values)}")
    centre = mean(values)
    scale = math.sqrt(sample_variance(values) + eps)
    out = []
    for row, mask in zip(rows, masks, strict=True):
        out.append([(x - centre) / scale if kept else 0.0 for x, kept in zip(row, mask, strict=True)])
    return out
