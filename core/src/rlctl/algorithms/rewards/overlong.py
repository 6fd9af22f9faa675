"""What DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.4) does about responses that run into the length limit. R rows, N tokens."""

from __future__ import annotations

import torch


def overlong_penalty(
    lengths: torch.Tensor, *, max_length: int, buffer_length: int, factor: float = 1.0
) -> torch.Tensor:
    """The soft punishment of eq. 13, ``[R]`` float64, added to a row's reward: 0 up to ``max_length - buffer_length`` tokens,
    from there a straight line down to ``-factor`` at ``max_length``, and ``-factor`` beyond.

    Args:
        lengths: ``[R]`` tokens of each response.
        buffer_length: at least 1, at most ``max_length``.
        factor: 1 in the paper.
    """
    over = lengths.double() - (max_length - buffer_length)
    return -factor * (over / buffer_length).clamp(0.0, 1.0)


def overlong_mask(mask: torch.Tensor, truncated: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
    """Overlong filtering: ``mask`` ``[N]`` without the tokens of rows that were cut off.

    The row's reward still counts in its group's statistics.

    Args:
        truncated: ``[R]`` bool, no end within the limit.
        row_ids: ``[N]``.
    """
    return mask & ~truncated[row_ids]
