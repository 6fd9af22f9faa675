"""The reward reasoning_gym: a reasoning-gym task's own scorer, in a process of its own with a hard time limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlctl.data.reasoning_gym import require_reasoning_gym
from rlctl.data.rewards.base import RewardContext, RewardInput
from rlctl.data.rewards.process import (
    JobDiedError,
    JobFailedError,
    JobLoadError,
    JobProcess,
    JobTimeoutError,
    unexpected,
)
from rlctl.errors import DataError


class GymReward:
    """Scores in the child. ``timeouts`` counts completions that met the limit; they score 0."""

    compares = True

    def __init__(self, job: JobProcess) -> None:
        self._job = job
        self.timeouts = 0

    def __call__(self, item: RewardInput) -> float:
        entry = item.row.extra.get("entry")
        if not isinstance(entry, dict) or "metadata" not in entry:
            raise DataError(
                f"{item.row.source} (row {item.row.index}) is no row of a reasoning_gym task",
                wanted="data.task.name=reasoning_gym:NAME",
                next="use another reward for these rows",
            )
        try:
            return self._job.call((item.text, entry))
        except (JobTimeoutError, JobDiedError):
            self.timeouts += 1
            return 0.0
        except (JobFailedError, JobLoadError) as error:
            raise unexpected("reasoning_gym", error) from None

    def close(self) -> None:
        self._job.close()


def reasoning_gym(*, context: RewardContext) -> GymReward:
    """The value of the task's ``score_answer`` for the stripped completion, from 0 to 1.

    Raises:
        DataError: reasoning-gym is not installed.
    """
    require_reasoning_gym()
    return GymReward(JobProcess("rlctl.data.rewards.gym:load_job", {}, context.timeout_s))


def load_job() -> Callable[[tuple[str, dict[str, Any]]], float]:
    """Child side: a job from (completion, entry) to a score."""
    from reasoning_gym import get_score_answer_fn

    scorers: dict[str, Any] = {}

    def job(payload: tuple[str, dict[str, Any]]) -> float:
        text, entry = payload
        name = entry["metadata"]["source_dataset"]
        if name not in scorers:
            scorers[name] = get_score_answer_fn(name)
        try:
            return float(scorers[name](text.strip(), entry))
        except Exception:  # a third-party scorer that stumbles over a completion has judged it
            return 0.0

    return job
