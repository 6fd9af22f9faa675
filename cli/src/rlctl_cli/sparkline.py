"""A curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-:=+*#"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """``values`` as at most ``width`` characters, each the mean of its share; lowest value to highest.

    Values that are not finite leave a gap. A flat curve is drawn in the middle.
    """
    marks = ASCII if ascii_only else BLOCKS
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    means: list[float | None] = []
    for i in range(count):
        share = values[i * len(values) // count : (i + 1) * len(values) // count]
        finite = [v for v in share if v == v and abs(v) != float("inf")]
        means.append(sum(finite) / len(finite) if finite else None)
    known = [m for m in means if m is not None]
    if not known:
        return " " * count
    low, span = min(known), max(known) - min(known)
    return "".join(" " if m is None else marks[3 if span == 0 else min(7, int((m - low) / span * 8))] for m in means)
