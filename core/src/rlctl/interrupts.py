"""Signals that end a run: Ctrl-C, a scheduler's SIGTERM, a closed terminal. Each ends it as a ``KeyboardInterrupt``."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 2
"""Signals that a shielded section overhears; the next one ends the process at once."""


class Interrupted(KeyboardInterrupt):
    """A stop signal arrived.

    Args:
        signum: its number; a shell reports the exit code ``128 + signum``.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def stop_signals() -> Iterator[None]:
    """Inside, the first stop signal raises :class:`Interrupted` in the main thread; later ones are overheard, and after
    :data:`PATIENCE` of them the next one kills.

    A signal that was ignored stays so (``nohup``). In another thread, where Python allows no handlers, nothing changes.
    After an interruption the handlers stay: the process is on its way out, and an impatient second signal must neither
    cut off what is still written nor end in a traceback of the interpreter's last steps.
    """
    seen = 0

    def stop(signum: int, frame: object) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            raise Interrupted(signum)
        if seen > 1 + PATIENCE:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    before = _install(stop)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        _put_back(before)
        raise
    else:
        _put_back(before)


@contextmanager
def shielded() -> Iterator[None]:
    """For the few lines that write down how a run ended: inside, stop signals are overheard, so that an impatient second
    Ctrl-C does not leave a run that claims to be running. After :data:`PATIENCE` of them the next one kills."""
    seen = 0

    def overhear(signum: int, frame: object) -> None:
        nonlocal seen
        seen += 1
        if seen > PATIENCE:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    with _handled(overhear):
        yield


@contextmanager
def _handled(handler: Any) -> Iterator[None]:
    before = _install(handler)
    try:
        yield
    finally:
        _put_back(before)


def _install(handler: Any) -> dict[signal.Signals, Any]:
    """Handle every stop signal that is not ignored; returns what was there before."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {s: signal.getsignal(s) for s in STOP_SIGNALS}
    # None: a handler that was not installed from Python, which could not be put back.
    ours = {s: old for s, old in before.items() if old is not signal.SIG_IGN and old is not None}
    for number in ours:
        signal.signal(number, handler)
    return ours


def _put_back(before: dict[signal.Signals, Any]) -> None:
    for number, old in before.items():
        signal.signal(number, old)
