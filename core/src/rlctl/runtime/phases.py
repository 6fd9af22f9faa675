"""What this process is doing right now, for the messages of crashes, hangs and out-of-memory errors.

A rank enters phases (:func:`phase`), which nest, and says within a long one that it goes on (:func:`beat`). A sink, put
in by the transport, makes the newest status readable from outside, also while the rank hangs in native code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

Scalar = int | float | str


@dataclass(frozen=True)
class Status:
    """One moment of one rank.

    Args:
        phase: innermost phase, ``idle`` outside of every one.
        detail: numbers that belong to it and to the phases around it (``rows``, ``tokens``, ``micro_batch`` ...).
        beats: how often anything was said since the process began; a number that stands still is a rank that does.
        since: when the phase began, seconds since the epoch.
    """

    phase: str = "idle"
    detail: Mapping[str, Scalar] = field(default_factory=dict)
    beats: int = 0
    since: float = 0.0

    def words(self) -> str:
        """``backward (micro_batch 2, tokens 512) for 31 s``."""
        inner = ", ".join(f"{k} {v}" for k, v in self.detail.items())
        age = f" for {max(0.0, time.time() - self.since):.0f} s" if self.since else ""
        return f"{self.phase}{f' ({inner})' if inner else ''}{age}"


Sink = Callable[[Status], None]


class _Marker:
    def __init__(self) -> None:
        self.status = Status(since=time.time())
        self.sink: Sink | None = None
        self.lock = threading.Lock()

    def put(self, phase: str, detail: Mapping[str, Scalar], since: float) -> None:
        with self.lock:
            self.status = Status(phase, detail, self.status.beats + 1, since)
            if self.sink is not None:
                self.sink(self.status)


_marker = _Marker()


def install_sink(sink: Sink | None) -> None:
    """Tell ``sink`` every status from here on, the present one first; None takes it out. One a process."""
    _marker.sink = sink
    beat()


def current() -> Status:
    """The newest status of this process."""
    return _marker.status


def beat(**detail: Scalar) -> None:
    """Say that the present phase goes on, with new numbers if there are any."""
    now = _marker.status
    _marker.put(now.phase, {**now.detail, **detail}, now.since)


@contextmanager
def phase(name: str, **detail: Scalar) -> Iterator[None]:
    """Inside, this process is in phase ``name``; numbers of the phases around it stay visible.

    When an error leaves the phase, its status at that moment is kept on the error (``rlctl_status``), so that the one
    who reports it can say where it began.
    """
    outer = _marker.status
    _marker.put(name, {**outer.detail, **detail}, time.time())
    try:
        yield
    except BaseException as error:
        if not hasattr(error, "rlctl_status"):
            with suppress(AttributeError):  # an exception class with slots keeps nothing more
                error.rlctl_status = _marker.status  # type: ignore[attr-defined]
        raise
    finally:
        _marker.put(outer.phase, outer.detail, outer.since)
