"""The reward on every row, without a model: its own answer must score, an empty completion must not break it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rlctl.data.columns import Row
from rlctl.data.faults import Fault, excerpt
from rlctl.data.report import RewardReport
from rlctl.data.rewards import RewardInput, RewardScorer
from rlctl.errors import DataError

GOOD = 0.99
MAX_ERRORS = 5
"""Failing rows after which a dry run stops: a broken function fails on each."""


@dataclass
class DryRun:
    """What the dry run of one set of rows found."""

    report: RewardReport = field(default_factory=RewardReport)
    faults: list[Fault] = field(default_factory=list)
    warnings: list[Fault] = field(default_factory=list)


def dry_run(
    rows: Sequence[Row],
    scorer: RewardScorer,
    *,
    limit_s: float,
    progress: Callable[[int], None] | None = None,
) -> DryRun:
    """Score each row's own answer and an empty completion.

    A component that compares with the answer must give the answer itself a full score, in one of the forms that models
    are asked for (bare, the whole response, after ``####``, boxed). What others give is only reported.

    Args:
        limit_s: time after which the rest of the rows is left out, with a warning.
    """
    run = DryRun()
    start = time.monotonic()
    parts = [
        (name, weight, RewardScorer([(name, 1.0, reward)], scorer.sources), reward.compares)
        for name, weight, reward in scorer.components
        if not getattr(reward, "of_conversations", False)
    ]
    if not parts:
        return run
    sums = {name: 0.0 for name, *_ in parts}
    errors = 0
    for number, row in enumerate(rows):
        if time.monotonic() - start > limit_s:
            what = (
                f"the dry run of the reward stopped after {number} of {len(rows)} rows, at its limit of {limit_s:g} s"
            )
            run.warnings.append(Fault("reward_time", "reward", what, "--reward-limit SECONDS for more"))
            break
        try:
            truth, empty, low = _row(row, parts, sums)
        except DataError as error:
            run.faults.append(_fault(row, error))
            errors += 1
            if errors >= MAX_ERRORS:
                break
            continue
        run.faults += low
        run.report.rows += 1
        run.report.truth += truth
        run.report.empty += empty
        if progress is not None and number % 64 == 0:
            progress(number)
    done = max(1, run.report.rows)
    run.report.truth /= done
    run.report.empty /= done
    run.report.components = {name: value / done for name, value in sums.items()}
    run.report.seconds = time.monotonic() - start
    if run.report.rows and not run.faults and run.report.truth <= run.report.empty:
        what = (
            f"the rows' own answers score no better ({run.report.truth:.3f} in the mean) than an empty completion "
            f"({run.report.empty:.3f})"
        )
        hint = "give the reward a completion of the form it wants by hand, and look at its value"
        run.warnings.append(Fault("reward_flat", "reward", what, hint))
    return run


def _row(
    row: Row, parts: Sequence[tuple[str, float, RewardScorer, bool]], sums: dict[str, float]
) -> tuple[float, float, list[Fault]]:
    """(score of the answer, score of nothing, faults) of one row; adds the components' values to ``sums``."""
    truth = empty = 0.0
    low: list[Fault] = []
    for name, weight, part, compares in parts:
        if not part.scores(name, row):
            continue
        empty += weight * part.score_one(RewardInput(row, "", "stop", 1)).score
        best = float("-inf")
        for text in _candidates(row, compares):
            best = max(best, part.score_one(RewardInput(row, text, "stop", max(1, len(text) // 4))).score)
            if best >= GOOD:
                break
        truth += weight * best
        sums[name] += best
        # Some reasoning-gym tasks judge an answer without knowing one.
        if compares and best < GOOD and row.answer is not None:
            what = f"its own answer {excerpt(row.answer, 40)!r} scores {best:g} under the reward {name}"
            low.append(Fault("reward", row.source, what, "correct the row, or take a reward that fits it", row.index))
    return truth, empty, low


def _candidates(row: Row, compares: bool) -> Iterator[str]:
    """Completions that a model might rightly give."""
    texts = [text for text in (row.answer, row.response) if text is not None] or [""]
    yield from texts if compares else texts[:1]
    if compares and row.answer is not None:
        yield f"#### {row.answer}"
        yield f"\\boxed{{{row.answer}}}"


def _fault(row: Row, error: DataError) -> Fault:
    what = " ".join((error.what, *(line.strip() for line in error.details)))
    return Fault(
        "reward",
        row.source,
        what + (f" ({error.found})" if error.found else ""),
        error.next or "correct the reward",
        row.index,
    )
