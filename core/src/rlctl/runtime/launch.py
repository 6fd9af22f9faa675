"""What the controller and a rank's process say to each other beside calls, and how such a process is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rlctl.interpreters.program import Program
from rlctl.runtime.processes import MARKER as MARKER
from rlctl.runtime.records import Boot


@dataclass(frozen=True)
class Launch:
    """The first thing a rank is sent.

    Args:
        worker: ``module:Class``, made as ``Class(boot, plugins, notice)``.
        plugins: load the plugins of this environment (a worker without engines needs none).
        allowed: packages whose records may travel.
    """

    boot: Boot
    worker: str
    plugins: bool
    allowed: tuple[str, ...]


@dataclass(frozen=True)
class Stop:
    """Shut down and end."""


@dataclass(frozen=True)
class Descriptors:
    """Numbers of what a rank inherits."""

    socket: int
    board: int


def command(
    boot: Boot, descriptors: Descriptors, parent: int, scratch: str, program: Program | None = None
) -> list[str]:
    """The command line of a rank; ``ps`` shows pool and rank.

    Args:
        parent: process that the rank must not outlive.
        scratch: directory that goes when the group ends without its controller.
        program: another interpreter; None for this one.
    """
    # -P: the working directory holds the user's files, which must not stand in for the standard library's.
    return [
        *(sys.executable if program is None else program.python, "-P", "-m", "rlctl.runtime.worker_main"),
        *(boot.pool, str(boot.rank), f"{descriptors.socket},{descriptors.board}"),
        *(str(parent), scratch),
    ]


def environment(boot: Boot, marker: str, extra: Mapping[str, str], program: Program | None = None) -> dict[str, str]:
    """A rank's environment: the controller's, its place, and this host's loopback for collectives unless it says else.

    Modules are found where this process finds them; by another interpreter, where that one does.
    """
    place = {
        "RANK": boot.rank,
        "WORLD_SIZE": boot.world_size,
        "LOCAL_RANK": boot.local_rank,
        "LOCAL_WORLD_SIZE": boot.local_world_size,
    }
    if program is None:
        own = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    else:
        own = program.environment(os.environ)
    env = {
        **own,
        **{k: str(v) for k, v in place.items()},
        "PYTHONUNBUFFERED": "1",
        MARKER: marker,
    }
    if sys.platform == "linux":
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.setdefault(name, "lo")
    if boot.num_threads is not None:
        env["OMP_NUM_THREADS"] = str(boot.num_threads)
    return {**env, **extra}


def threads(boot: Boot) -> int | None:
    """CPU threads of a rank where nothing is configured: this host's cores shared by its ranks.

    None, torch's own choice, where the user's environment says or where the work is done elsewhere.
    """
    if boot.num_threads is not None or boot.device != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return boot.num_threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // boot.local_world_size)
