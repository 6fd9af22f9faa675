"""The reward math: equal by math-verify (extra ``math``).

math-verify limits its own time with ``signal.alarm``, which works in the main thread of a process only, and can still
spend long in C. So it runs in a process of its own with a hard limit; a completion that meets the limit scores 0.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

from rlctl.data.faults import excerpt
from rlctl.data.rewards.base import RewardContext, RewardInput
from rlctl.data.rewards.process import (
    JobDiedError,
    JobFailedError,
    JobLoadError,
    JobProcess,
    JobTimeoutError,
    unexpected,
)
from rlctl.errors import ConfigError, DataError

EXTRA = "pip install 'rlctl-core[math]'"


class MathReward:
    """Compares in the child. ``timeouts`` counts completions that met the limit."""

    compares = True

    def __init__(self, job: JobProcess) -> None:
        self._job = job
        self.timeouts = 0

    def __call__(self, item: RewardInput) -> float:
        try:
            return self._job.call((item.answer, item.text))
        except (JobTimeoutError, JobDiedError):
            # The completion is to blame: the answer alone was parsed by the data check.
            self.timeouts += 1
            return 0.0
        except JobFailedError as error:
            if error.fields.get("kind") != "answer":
                raise unexpected("math", error) from None
            raise DataError(
                f"math-verify cannot read the answer of {item.row.source} (row {item.row.index})",
                found=repr(excerpt(item.answer)),
                wanted="a number, an expression or LaTeX",
                next="correct the row, or use the reward exact_match",
            ) from None

        except JobLoadError as error:
            raise unexpected("math", error) from None

    def close(self) -> None:
        self._job.close()


def math(*, float_rounding: int = 6, strict: bool = True, context: RewardContext) -> MathReward:
    """1.0 when math-verify finds the completion's last expression equal to the answer, else 0.0.

    Args:
        float_rounding: decimals that are compared.
        strict: math-verify's ``strict``: variables and sets must agree in kind.

    Raises:
        ConfigError: a negative number of decimals, which would compare tens or hundreds.
        DataError: math-verify is not installed.
    """
    if float_rounding < 0:
        raise ConfigError(
            "the reward math compares 0 decimals or more",
            found=f"float_rounding {float_rounding}",
            next="args.float_rounding=6",
        )
    if importlib.util.find_spec("math_verify") is None:
        raise DataError("the reward math needs math-verify, which is not installed", next=EXTRA)
    args = {"float_rounding": float_rounding, "strict": strict, "timeout_s": context.timeout_s}
    return MathReward(JobProcess("rlctl.data.rewards.math:load_job", args, context.timeout_s))


def load_job(float_rounding: int, strict: bool, timeout_s: float) -> Callable[[tuple[str, str]], float]:
    """Child side: a job from (answer, completion) to 0.0 or 1.0."""
    from math_verify import parse, verify

    from rlctl.data.rewards.worker import JobError

    # It logs a line for each expression that it gives up on.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # Its own alarm comes before the hard limit, which costs a fresh process.
    alarm_s = max(1, int(timeout_s / 3))

    @functools.lru_cache(maxsize=4096)
    def gold(answer: str) -> Any:
        # An answer column holds bare LaTeX or an expression, of which the parser, left alone, takes the last number.
        for text in (f"\\boxed{{{answer}}}", answer):
            parsed = parse(text, parsing_timeout=alarm_s)
            if parsed:
                return parsed
        raise JobError(kind="answer")

    def job(payload: tuple[str, str]) -> float:
        answer, text = payload
        wanted = gold(answer)
        got = parse(text, parsing_timeout=alarm_s)
        equal = verify(wanted, got, float_rounding=float_rounding, strict=strict, timeout_seconds=alarm_s)
        return float(bool(got) and equal)

    return job
