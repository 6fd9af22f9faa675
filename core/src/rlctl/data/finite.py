"""Numbers from a user's code."""

from __future__ import annotations

import math


def finite(value: object) -> float | None:
    """A finite float from a number, a numpy scalar or a one-element tensor; None from anything else."""
    if isinstance(value, (str, bytes)) or value is None:
        return None
    try:
        number = float(value)  # pyright: ignore[reportArgumentType] - anything with __float__
    except Exception:  # a user's type may raise anything from __float__
        return None
    return number if math.isfinite(number) else None
