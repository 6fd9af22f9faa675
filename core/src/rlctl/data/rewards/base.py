"""What a reward gets and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from rlctl.data.columns import Row
from rlctl.errors import DataError
from rlctl.generation import Conversation


@dataclass(frozen=True)
class RewardInput:
    """One completion to score.

    Args:
        row: the row that was prompted.
        text: the completion, without special tokens.
        finish_reason: ``stop``, ``length`` or ``abort``.
        num_tokens: tokens of the completion, the ending one included.
        conversation: all turns, with an environment; ``text`` is then that of the last one, and ``num_tokens`` counts what the
            policy has sampled in all of them.
    """

    row: Row
    text: str
    finish_reason: str
    num_tokens: int
    conversation: Conversation | None = None

    @property
    def answer(self) -> str:
        """The ground truth.

        Raises:
            DataError: the row has none.
        """
        if self.row.answer is None:
            raise DataError(
                f"{self.row.source} (row {self.row.index}) has no answer to compare the completion with",
                wanted="an answer, ground_truth or reward_model.ground_truth column",
                next="data.columns.answer=COLUMN, or a reward that needs no answer (length, format, your own function)",
            )
        return self.row.answer


@dataclass(frozen=True)
class RewardContext:
    """What a builder may ask for with a ``context`` argument: the time limit of one call, and where paths start."""

    timeout_s: float
    base_dir: Path


@runtime_checkable
class Reward(Protocol):
    """A built reward. It may also have ``close()``, called once at the end, and ``prepare(items)``, called with all completions of a
    batch that it is then called for one by one.

    ``compares`` says that the value measures agreement with the row's answer, so that a data check may expect the
    answer itself to score 1.
    """

    compares: bool

    def __call__(self, item: RewardInput) -> float | Mapping[str, float]:
        """The value of one completion; a mapping has ``score`` and further numbers to be logged."""
        ...


@dataclass(frozen=True)
class RewardResult:
    """``score`` is the weighted sum; ``components`` the unweighted value of each component by name."""

    score: float
    components: dict[str, float] = field(default_factory=dict)
