"""A small process beside each rank that outlives both it and its controller, to clear up after either.

A rank that hangs while it holds the interpreter's lock can run no thread of its own, and one that is killed can do
nothing at all; what it started would go on. The guard waits for two deaths: the controller's ends every process of the
group, the rank's ends what that rank started.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
from pathlib import Path

from rlctl.runtime.processes import GUARD, kill_group, kill_marked

_SOON_MS = 2000


def start_guard(parent: int, marker: str, scratch: str) -> None:
    """Fork the guard of this process. Call it before there are threads. Nothing happens where the system has no pidfd.

    Args:
        parent: the controller's process; if it has ended already, so does this one.
        marker: of the group, see :data:`rlctl.runtime.processes.MARKER`.
        scratch: directory that goes with the controller.
    """
    if not hasattr(os, "pidfd_open"):
        return
    try:
        controller = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent:  # that number is somebody else's now
        os._exit(1)
    rank = os.getpid()
    own = os.pidfd_open(rank)
    if os.fork():
        os.close(controller)
        os.close(own)
        return
    try:
        _watch(controller, own, rank, marker, scratch)
    finally:
        os._exit(0)  # nothing that was set up for a rank may run here


def _watch(controller: int, own: int, rank: int, marker: str, scratch: str) -> None:
    os.setsid()  # the rank's process group is killed whole; this one has work to do then
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    Path("/proc/self/comm").write_text(GUARD)
    keep = sorted((controller, own))
    for low, high in zip((2, *keep), (*keep, os.sysconf("SC_OPEN_MAX")), strict=True):
        os.closerange(low + 1, min(high, 65536))  # the rank's end of the socket above all
    poll = select.poll()
    poll.register(controller, select.POLLIN)
    poll.register(own, select.POLLIN)
    poll.poll()
    kill_group(rank)
    poll.unregister(own)
    # Whoever ends both may have begun with the rank.
    if poll.poll(_SOON_MS):
        shutil.rmtree(scratch, ignore_errors=True)
        kill_marked(marker)
