"""What DAPO (Yu et al. 2025, arXiv:2503.14476) adds around the loss: overlong filtering and the soft punishment.

(Its clip-higher is ``policy_losses.vanilla`` with clip_high > clip_low, its token-level loss is token-mean.)
"""

from __future__ import annotations

from collections.abc import Sequence

from oracle.basics import Masks


def soft_overlong_punishment(length: int, *, max_len: int, cache: int, factor: float = 1.0) -> float:
    """Section 3.4, eq. 13, added to the row's reward: 0 up to max_len - cache tokens, then a straight line down to -1
    at max_len, and -1 beyond (verl's line has no floor, its responses end at max_len). Times ``factor`` (verl's
    penalty_factor). ``length`` counts the response's tokens."""
    if length <= max_len - cache:
        return 0.0
    if length <= max_len:
        return factor * ((max_len - cache) - length) / cache
    return -factor


def overlong_filter(masks: Masks, truncated: Sequence[bool]) -> list[list[bool]]:
    """Section 3.4: rows that were cut off (no end of sequence within the limit) have all their tokens masked."""
    return [[kept and not cut for kept in mask] for mask, cut in zip(masks, truncated, strict=True)]
