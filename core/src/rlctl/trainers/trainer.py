"""What the runner asks of a trainer, whatever it trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlctl.roles.budget import SkipBudget


@dataclass(frozen=True)
class Assessment:
    """One look at held-out rows.

    Args:
        metrics: ``val/*``.
        score: what the best checkpoint is chosen by; larger is better.
        samples: records for samples.jsonl.
    """

    metrics: dict[str, float]
    score: float
    samples: list[dict[str, Any]] = field(default_factory=list)


class Trainer(Protocol):
    """A loop's body over built roles. The runner owns steps, checkpoints, exports and reports."""

    @property
    def val_rows(self) -> Sequence[Any]:
        """The held-out rows; empty: there is nothing to assess."""
        ...

    @property
    def budget(self) -> SkipBudget:
        """Skipped steps in a row that are borne."""
        ...

    def begin(self) -> dict[str, Any]:
        """What comes before the first step, new or resumed; facts for the manifest's ``runtime``."""
        ...

    def advance(self, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """One global step, counted from 1: its metrics, and records for samples.jsonl."""
        ...

    def assess(self, step: int) -> Assessment:
        """Look at the held-out rows after ``step`` steps."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the engines' state, as JSON data."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take :meth:`state_dict`'s answer back."""
        ...
