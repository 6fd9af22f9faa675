"""What estimators do along the trained tokens of each row, and over all of them. N tokens, T of them trained, R rows.

Tokens that are not trained (a prompt, a tool's answer between two turns) are passed over as if they were not there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TrainedTokens:
    """Where the trained tokens of a packed batch are.

    Args:
        index: ``[T]`` their places among the N tokens.
        rows: ``[T]`` number of their row, counted among the rows that have any.
        order: ``[T]`` how many trained tokens of the row come before.
        counts: ``[T]`` trained tokens of the row.
        num_items: N.
    """

    index: torch.Tensor
    rows: torch.Tensor
    order: torch.Tensor
    counts: torch.Tensor
    num_items: int

    @classmethod
    def of(cls, mask: torch.Tensor, row_ids: torch.Tensor) -> TrainedTokens:
        """From ``mask`` ``[N]`` and ``row_ids`` ``[N]``, ascending."""
        index = mask.nonzero()[:, 0]
        rows, counts = row_ids[index].unique_consecutive(return_inverse=True, return_counts=True)[1:]
        starts = counts.cumsum(0) - counts
        return cls(index, rows, torch.arange(len(index)) - starts[rows], counts[rows], len(mask))

    def running_sum(self, values: torch.Tensor) -> torch.Tensor:
        """``[N]`` -> ``[N]`` the sum over the row's trained tokens up to each, itself included; zero elsewhere."""
        return self._back(self._grid(values, self.order).cumsum(1), self.order)

    def to_go(self, values: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
        """``[N]`` -> ``[N]`` ``G_t = v_t + gamma G_{t+1}`` over the row's trained tokens; zero elsewhere."""
        from_end = self.counts - 1 - self.order
        grid = self._grid(values, from_end)
        if gamma == 1.0:
            grid = grid.cumsum(1)
        else:
            for k in range(1, grid.shape[1]):
                grid[:, k] += gamma * grid[:, k - 1]
        return self._back(grid, from_end)

    def _grid(self, values: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """``[rows with trained tokens, most of them in one]``, zero where a row is shorter."""
        shape = (int(self.rows[-1]) + 1, int(self.counts.max())) if len(self.index) else (0, 0)
        grid = torch.zeros(shape, dtype=torch.float64)
        grid[self.rows, column] = values.double()[self.index]
        return grid

    def _back(self, grid: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(self.num_items, dtype=grid.dtype)
        out[self.index] = grid[self.rows, column]
        return out


def whiten(values: torch.Tensor, mask: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """``(v - mean) / sqrt(var + eps)`` over the entries in ``mask``, with the unbiased variance; zero elsewhere.

    A single entry has no deviation, and comes out as zero.

    Args:
        values, mask: ``[N]``, of tokens or of rows.
    """
    kept = values.double()[mask]
    out = torch.zeros(len(mask), dtype=torch.float64)
    if len(kept) > 1:
        out[mask] = (kept - kept.mean()) / (kept.var() + eps).sqrt()
    return out
