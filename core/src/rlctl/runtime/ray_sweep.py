"""Ending what is left of a Ray cluster of which nothing is known but its directory.

Ray's own processes mostly end with their driver, but its agents try for a minute to reach a cluster that is no more. Each has
its log files open in the cluster's directory; their command lines and environments they overwrite.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time

_LIMIT_S = 15.0


def users_of(directory: str, but: tuple[int, ...]) -> list[int]:
    """Processes that have a file below ``directory`` open or name it in their command line; none without ``/proc``."""
    found: list[int] = []
    prefix = directory.rstrip("/") + "/"
    if not os.path.isdir("/proc/self/fd"):
        return found
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) in but:
            continue
        # A process may end while it is looked at, or be another user's.
        with contextlib.suppress(OSError):
            with open(f"/proc/{entry.name}/cmdline", "rb") as file:
                named = prefix.encode() in file.read()
            if named or any(_target(fd.path).startswith(prefix) for fd in os.scandir(f"/proc/{entry.name}/fd")):
                found.append(int(entry.name))
    return found


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def sweep(directory: str, controller: int) -> None:
    """Kill every user of ``directory`` but the controller and this process, and remove it."""
    deadline = time.monotonic() + _LIMIT_S
    while (found := users_of(directory, (os.getpid(), controller))) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(directory, ignore_errors=True)
