"""The environment reasoning_gym: several attempts at a row of a ``reasoning_gym:NAME`` task, judged by the task's own scorer."""

from __future__ import annotations

import importlib.util
from typing import Any

from rlctl.data.reasoning_gym import EXTRA
from rlctl.data.rewards.gym import load_job
from rlctl.data.rewards.worker import JobError

FEEDBACK = "That is not right. Try again."


class ReasoningGym:
    """A wrong answer is told so, and another one is asked for.

    Args:
        attempts: answers in one conversation.
        enough: score that ends it; the scorers give 1 for a right answer and may give less for a part of it.
        discount: factor of the reward for each attempt before the one that counts, the last.
        feedback: what the policy is told.
    """

    def __init__(self, attempts: int = 3, enough: float = 1.0, discount: float = 1.0, feedback: str = FEEDBACK) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise JobError(kind="construct", error="the reasoning-gym library is not installed", next=EXTRA)
        self._attempts, self._enough, self._discount, self._feedback = attempts, enough, discount, feedback
        self._score = load_job()
        self._entry: dict[str, Any] = {}
        self._made = 0

    def reset(self, row: dict[str, Any]) -> None:
        entry = row["extra_info"].get("entry")
        if not isinstance(entry, dict) or "metadata" not in entry:
            raise ValueError("the row is of no reasoning_gym:NAME task (data.task.name)")
        self._entry = entry

    def step(self, text: str) -> tuple[str | None, float, bool, dict[str, float]]:
        self._made += 1
        score = self._score((text, self._entry))
        if score < self._enough and self._made < self._attempts:
            return self._feedback, 0.0, False, {"attempts": self._made}
        return None, score * self._discount ** (self._made - 1), True, {"attempts": self._made}
