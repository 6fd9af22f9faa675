"""What this process is doing right now, for the messages of crashes, hangs and out-of-memory errors.

A rank enters phases (:class:`phase`), which nest, and says within a long one that it goes on (:func:`beat`). A sink, put
in by the transport, makes the newest status readable from outside, also while the rank hangs in native code.

Phases belong to a thread. What is shown is the phase of one thread, the one that runs the calls; what others do counts as
progress only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

Scalar = int | float | str


@dataclass(frozen=True)
class Status:
    """One moment of one rank.

    Args:
        phase: innermost phase, ``idle`` outside of every one.
        detail: numbers that belong to it and to the phases around it. ``rows`` and ``tokens`` are this rank's mini-batch;
            ``micro_batch`` counts from 1, ``micro_rows`` and ``micro_tokens`` are its size, ``micro_batches`` their number.
        beats: how often anything was said since the process began; a number that stands still is a rank that does.
        since: when the phase began, seconds since the epoch.
    """

    phase: str = "idle"
    detail: Mapping[str, Scalar] = field(default_factory=dict)
    beats: int = 0
    since: float = 0.0

    def words(self) -> str:
        """``backward (micro-batch 2 of 3: 1 row, 40 tokens; mini-batch of this rank: 3 rows, 120 tokens) for 31 s``."""
        inner = "; ".join(_detail_words(dict(self.detail)))
        age = f" for {max(0.0, time.time() - self.since):.0f} s" if self.since else ""
        return f"{self.phase}{f' ({inner})' if inner else ''}{age}"


def _detail_words(detail: dict[str, Scalar]) -> list[str]:
    pieces: list[str] = []
    number, count = detail.pop("micro_batch", None), detail.pop("micro_batches", None)
    size = _sizes(detail, "micro_rows", "micro_tokens")
    if number is not None:
        pieces.append(f"micro-batch {number}{f' of {count}' if count is not None else ''}{f': {size}' if size else ''}")
    elif count is not None:
        pieces.append(f"{count} micro-batches")
    if size := _sizes(detail, "rows", "tokens"):
        pieces.append(f"mini-batch of this rank: {size}")
    return pieces + [f"{name} {value}" for name, value in detail.items()]


def _sizes(detail: dict[str, Scalar], rows: str, tokens: str) -> str:
    found = [(detail.pop(rows, None), "row"), (detail.pop(tokens, None), "token")]
    return ", ".join(f"{n} {unit if n == 1 else unit + 's'}" for n, unit in found if n is not None)


Sink = Callable[[Status], None]


class _Here(threading.local):
    """A thread's own status."""

    def __init__(self) -> None:
        self.status = Status(since=time.time())


class _Process:
    """What this process shows."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.beats = 0
        self.shown = Status(since=time.time())
        self.shown_thread = threading.main_thread().ident
        self.sink: Sink | None = None


_here = _Here()
_process = _Process()


def _put(phase: str, detail: Mapping[str, Scalar], since: float) -> None:
    process = _process
    with process.lock:
        process.beats += 1
        status = Status(phase, detail, process.beats, since)
        _here.status = status
        if threading.get_ident() != process.shown_thread:
            shown = process.shown
            status = Status(shown.phase, shown.detail, process.beats, shown.since)
        process.shown = status
        if process.sink is not None:
            process.sink(status)


def install_sink(sink: Sink | None) -> None:
    """Tell ``sink`` every status from here on, the present one first; None takes it out. One a process.

    From here on the calling thread is the one whose phases are shown.
    """
    with _process.lock:
        _process.sink = sink
        _process.shown_thread = threading.get_ident()
    beat()


def installed_sink() -> Sink | None:
    """The sink that is in place, for one that wants to stand before it."""
    return _process.sink


def current() -> Status:
    """The newest status that this process shows."""
    return _process.shown


def beat(**detail: Scalar) -> None:
    """Say that the present phase goes on, with new numbers if there are any."""
    now = _here.status
    _put(now.phase, {**now.detail, **detail} if detail else now.detail, now.since)


class phase:  # noqa: N801  (used like a function, in a with statement)
    """Inside, this thread is in phase ``name``; numbers of the phases around it stay visible.

    When an error leaves the phase, its status at that moment is kept on the error (``rlctl_status``), so that the one
    who reports it can say where it began.
    """

    __slots__ = ("_detail", "_name", "_outer")

    def __init__(self, name: str, **detail: Scalar) -> None:
        self._name = name
        self._detail = detail

    def __enter__(self) -> None:
        self._outer = outer = _here.status
        _put(self._name, {**outer.detail, **self._detail}, time.time())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not hasattr(error, "rlctl_status"):
            with suppress(AttributeError):  # an exception class with slots keeps nothing more
                error.rlctl_status = _here.status  # type: ignore[attr-defined]
        outer = self._outer
        _put(outer.phase, outer.detail, outer.since)
