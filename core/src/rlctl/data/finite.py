"""Numbers from a user's code or data: finite, and what float32 holds."""

from __future__ import annotations

import math

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest float32: advantages and scores are in float32, which holds nothing beyond."""


def finite(value: object) -> float | None:
    """A finite float from a number, a numpy scalar or a one-element tensor; None from anything else."""
    if isinstance(value, (str, bytes)) or value is None:
        return None
    try:
        number = float(value)  # pyright: ignore[reportArgumentType] - anything with __float__
    except Exception:  # a user's type may raise anything from __float__
        return None
    return number if math.isfinite(number) else None


def as_float(value: float) -> float:
    """``value`` as a float; infinite for a whole number of more than 308 digits."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
