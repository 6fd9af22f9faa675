"""Reading metrics back: tolerant of a run that is going on, that died while writing a line, or that was resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl import files

STEP = "training/global_step"
TIME = "training/unix_time"
"""When the line was written, seconds since 1970."""


@dataclass(frozen=True)
class Series:
    """One metric over steps, without its holes; steps rise strictly."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def first(self) -> float:
        return self.values[0]

    @property
    def last(self) -> float:
        return self.values[-1]

    def tenth(self, last: bool) -> float:
        """Mean of the first or last tenth of the values (at least one)."""
        size = max(1, len(self.values) // 10)
        part = self.values[-size:] if last else self.values[:size]
        return sum(part) / len(part)


class Metrics:
    """All lines of a ``metrics.jsonl``, merged by step; where a step comes twice the later value wins.

    Args:
        rows: step -> metrics, in rising steps.
        damaged: lines that were no JSON object.
    """

    def __init__(self, rows: Mapping[int, Mapping[str, Any]], damaged: int = 0) -> None:
        self.rows = dict(sorted(rows.items()))
        self.damaged = damaged

    @property
    def last_step(self) -> int | None:
        return next(reversed(self.rows), None)

    def names(self) -> list[str]:
        """Names in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row))

    def series(self, *names: str) -> Series:
        """The first of ``names`` that has any number; an empty series of the first name otherwise."""
        for name in names:
            points = [(s, float(r[name])) for s, r in self.rows.items() if _is_number(r.get(name))]
            if points:
                steps, values = zip(*points, strict=True)
                return Series(name, steps, values)
        return Series(names[0], (), ())

    def last_values(self) -> dict[str, float]:
        """The last number of each metric, the step included."""
        out: dict[str, float] = {}
        for row in self.rows.values():
            out.update((k, v) for k, v in row.items() if _is_number(v))
        return out


def _is_number(value: Any) -> bool:
    # JSON as Python reads it has infinity, and whole numbers that no float holds.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def merge(rows: Iterable[Mapping[str, Any]], damaged: int = 0) -> Metrics:
    """Rows of a file as :class:`Metrics`; a row without a step counts as damaged."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        step = row.get(STEP)
        if _is_number(step):
            merged.setdefault(int(step), {}).update(row)  # type: ignore[arg-type]  # _is_number says so
        else:
            damaged += 1
    return Metrics(merged, damaged)


def read_metrics(path: Path) -> Metrics:
    """Read ``metrics.jsonl``; a missing file gives no rows."""
    return merge(*files.read_lines(path))


def last_values(path: Path) -> dict[str, float]:
    """Last number of each metric in a ``metrics.jsonl``."""
    return read_metrics(path).last_values()
