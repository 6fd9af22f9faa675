"""What a trainer tells the person who waits: messages, phases with progress, steps with their numbers.

Trainers know this protocol only; the command line brings a richer one. Nothing here writes to stdout.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

from rlctl.tracking.headline import headline_text, write_duration


class Phase(Protocol):
    """A piece of work in progress."""

    def advance(self, n: int = 1) -> None:
        """``n`` more units are done."""
        ...


class Reporter(Protocol):
    """How a trainer speaks. Phases do not nest deeper than the screen shows: the innermost open one is shown.

    ``phase`` names are short nouns: start-up, generation, reward, update, validation, saving. ``total`` is the number of
    units, or None where nobody knows. ``step`` is called once after each step with all metrics of that step.
    """

    def message(self, text: str) -> None: ...
    def phase(self, name: str, total: int | None = None) -> AbstractContextManager[Phase]: ...
    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class _Silent:
    def advance(self, n: int = 1) -> None:
        return None


class NullReporter:
    """Says nothing (ranks other than the first, ``--quiet``, tests)."""

    def message(self, text: str) -> None:
        return None

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        yield _Silent()

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        return None

    def close(self) -> None:
        return None


class PlainReporter:
    """Single lines for logs and pipes: one a step, one for a phase that took long, nothing that redraws.

    Args:
        stream: where the lines go; stderr by default.
        slow_s: a phase shorter than this many seconds is not worth a line.
        every_s: a phase that goes on for longer says how far it is this often.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        slow_s: float = 5.0,
        every_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._slow_s = slow_s
        self._every_s = every_s
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def message(self, text: str) -> None:
        print(text, file=self._stream or sys.stderr, flush=True)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        phase = _PlainPhase(self, name, total)
        yield phase
        if phase.elapsed >= self._slow_s:
            self.message(f"{name}: {phase.amount()}{write_duration(phase.elapsed)}")

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        moment = self._clock()
        if self._first is None or step <= self._first[1]:
            self._first = (moment, step)
        eta = ""
        started, first = self._first
        if step > first and total > step:
            eta = f"  eta {write_duration((moment - started) / (step - first) * (total - step))}"
        self.message(f"step {step}/{total}  {headline_text(metrics)}{eta}".rstrip())

    def close(self) -> None:
        return None


class _PlainPhase:
    def __init__(self, reporter: PlainReporter, name: str, total: int | None) -> None:
        self._reporter = reporter
        self._name = name
        self._total = total
        self._done = 0
        self._start = self._said = reporter._clock()

    @property
    def elapsed(self) -> float:
        return self._reporter._clock() - self._start

    def amount(self) -> str:
        if not self._done:
            return ""
        return f"{self._done}/{self._total}, " if self._total else f"{self._done}, "

    def advance(self, n: int = 1) -> None:
        self._done += n
        moment = self._reporter._clock()
        if moment - self._said >= self._reporter._every_s:
            self._said = moment
            self._reporter.message(f"{self._name}: {self.amount()}{write_duration(moment - self._start)} so far")
