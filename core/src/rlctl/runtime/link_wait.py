"""Where a rank waits for a rank of another pool. A module of its own, so that a stack shows who waits and who hangs."""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING, Any

from rlctl.runtime.failures import PeerFailedError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_SPIN_S = 0.001
_SLEEP_S = 0.0002


def for_words(store: TCPStore, key: str, timeout_s: float) -> bytes:
    """The value of ``key``, once it is there.

    Raises:
        PeerFailedError: it did not come in time.
        DistError: who serves the store is gone.
    """
    start = time.monotonic()
    try:
        return store.get(key)
    except RuntimeError as error:
        _tell_limit(error, start, timeout_s)
        raise


def for_work(work: Any, timeout_s: float, *, on_device: bool) -> None:
    """The end of a collective.

    Args:
        on_device: it runs beside the program. Then it is looked at until it has ended, because to wait for it would be to
            queue behind it, without a time limit.

    Raises:
        PeerFailedError: it did not end in time.
        RuntimeError: it failed.
    """
    start = time.monotonic()
    try:
        if not on_device:
            work.wait(datetime.timedelta(seconds=timeout_s))
            return
        while not work.is_completed():
            waited = time.monotonic() - start
            if waited > timeout_s:
                raise RuntimeError("the broadcast did not end")
            if waited > _SPIN_S:
                time.sleep(_SLEEP_S)
        work.wait()
    except RuntimeError as error:
        _tell_limit(error, start, timeout_s)
        raise


def _tell_limit(error: RuntimeError, start: float, timeout_s: float) -> None:
    """Raise ``error`` in our own words where it is the time limit's: the libraries call that by many names."""
    if time.monotonic() - start >= timeout_s:
        raise PeerFailedError(
            f"the weight sync stood still for {timeout_s:g} s, the limit that runtime.collective_timeout_s sets: {error}"
        ) from error
