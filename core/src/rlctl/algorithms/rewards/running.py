"""Mean and deviation of all rewards seen so far, to which new ones are scaled.

A batch's moments are merged into the running ones by the pairwise rule of Chan, Golub and LeVeque 1983 ("Algorithms for
Computing the Sample Variance"), which does not cancel as sums of squares do. Dividing rewards by a running deviation is a
part of PPO as it is implemented (Engstrom et al. 2020, arXiv 2005.12729, section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Moments:
    """Of ``count`` numbers: their mean, and ``m2``, the sum of the squared distances from it."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def merged(self, values: Sequence[float] | torch.Tensor) -> Moments:
        """These moments with ``values`` ``[n]`` counted too. Of none nothing changes."""
        new = torch.as_tensor(values, dtype=torch.float64)
        n = new.numel()
        if n == 0:
            return self
        mean = float(new.mean())
        m2 = float((new - mean).square().sum())
        total = self.count + n
        delta = mean - self.mean
        return Moments(
            total,
            self.mean + delta * n / total,
            self.m2 + m2 + delta * delta * self.count * n / total,
        )

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 of fewer than two numbers."""
        return (self.m2 / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0


def scaled(values: torch.Tensor, moments: Moments, *, centre: bool) -> torch.Tensor:
    """``(v - mean) / std`` ``[n]``, or ``v / std`` without ``centre``.

    Where nothing has differed yet (no deviation, but for rounding) values are not divided.
    """
    std = moments.std
    if std <= 1e-9 * max(1.0, abs(moments.mean)):
        std = 1.0
    return (values - (moments.mean if centre else 0.0)) / std
