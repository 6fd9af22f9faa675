"""What a data check found, as data. Only the command line prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlctl.data.faults import Fault, raise_faults

BINS = 10


@dataclass(frozen=True)
class LengthStats:
    """Lengths of one kind. ``histogram``: (from, to, rows), both ends included."""

    unit: str
    count: int
    mean: float
    p50: int
    p95: int
    min: int
    max: int
    histogram: tuple[tuple[int, int, int], ...]


@dataclass
class SplitReport:
    """One split: rows read, where from, how long they are."""

    rows: int
    sources: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, LengthStats] = field(default_factory=dict)
    duplicates: int = 0


@dataclass
class RewardReport:
    """The dry run. ``truth`` and ``empty``: mean score of the rows' own answers, and of an empty completion."""

    rows: int = 0
    truth: float = 0.0
    empty: float = 0.0
    components: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class DataReport:
    """All of a check. ``faults`` make it fail; ``warnings`` do not."""

    target: str
    splits: dict[str, SplitReport] = field(default_factory=dict)
    reward: RewardReport | None = None
    faults: list[Fault] = field(default_factory=list)
    warnings: list[Fault] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.faults

    def raise_for_faults(self, ignore: Sequence[str] = ()) -> None:
        """Raise one DataError for the faults whose kind is not in ``ignore``."""
        raise_faults(f"The data of {self.target} is not usable", [f for f in self.faults if f.kind not in ignore])

    def to_json(self) -> dict[str, Any]:
        """The report as the ``--json`` output shows it."""
        plain = asdict(self)
        for split in plain["splits"].values():
            for stats in split["lengths"].values():
                stats["histogram"] = [{"from": low, "to": high, "rows": rows} for low, high, rows in stats["histogram"]]
        return {"ok": self.ok, **plain}


def describe_lengths(values: Sequence[int], unit: str) -> LengthStats | None:
    """Statistics of lengths, None without any."""
    if not values:
        return None
    ordered = sorted(values)
    count, low, high = len(ordered), ordered[0], ordered[-1]
    width = max(1, -(-(high - low + 1) // BINS))
    bins = Counter((value - low) // width for value in ordered)
    histogram = tuple(
        (low + place * width, min(high, low + (place + 1) * width - 1), bins[place])
        for place in range((high - low) // width + 1)
    )
    return LengthStats(
        unit=unit,
        count=count,
        mean=sum(ordered) / count,
        p50=ordered[(count - 1) // 2],
        p95=ordered[(count - 1) * 95 // 100],
        min=low,
        max=high,
        histogram=histogram,
    )
