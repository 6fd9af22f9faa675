"""Ending processes with everything that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

MARKER = "RLCTL_WORKER_OF"
"""Environment variable of every rank, and so of every process that a rank starts; its value is unique to the group."""

GUARD = "rlctl-guard"
"""The name of processes that end by themselves when their rank has (see :mod:`rlctl.runtime.guard`)."""


def marked(marker: str) -> list[int]:
    """Processes of this user whose environment has :data:`MARKER` set to ``marker``; not the present one, nor guards.

    They are the ranks of one group and whatever those have started, also what has left their sessions. Where there is no
    ``/proc``, none.
    """
    if not marker or sys.platform != "linux":
        return []
    wanted = f"{MARKER}={marker}".encode()
    found: list[int] = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if wanted not in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    continue
                if Path(entry.path, "comm").read_text().strip() != GUARD:
                    found.append(int(entry.name))
    return found


def kill_marked(marker: str) -> None:
    """Kill every process of :func:`marked`, and those that they start meanwhile."""
    for _ in range(10):
        if not (found := marked(marker)):
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)  # they take a moment to go


def kill_group(leader: int) -> None:
    """Kill the process group that ``leader`` leads. Nothing where it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def ending(code: int) -> str:
    """How a process ended, from its return code as :mod:`subprocess` gives it: ``killed by SIGKILL``, ``exit code 3``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
