"""What the ranks of one group are told, and the CPU threads that each may use. Imports no torch."""

from __future__ import annotations

import os

from rlctl.device import Device
from rlctl.runtime.records import Boot


def make_boots(
    pool: str,
    size: int,
    device: Device,
    *,
    num_threads: int | None,
    collective_timeout_s: float,
    first_local_rank: int = 0,
) -> list[Boot]:
    """One :class:`Boot` a rank, all on one host as far as is known; a transport over several hosts corrects that.

    Args:
        first_local_rank: devices of the host that other groups have taken.
    """
    return [
        Boot(
            pool=pool,
            rank=rank,
            world_size=size,
            local_rank=first_local_rank + rank,
            local_world_size=size,
            device=device.type,
            vendor=device.vendor,
            num_threads=num_threads,
            collective_timeout_s=collective_timeout_s,
        )
        for rank in range(size)
    ]


def threads_of_a_rank(ranks_on_host: int) -> int:
    """Cores of this host that this process may use, shared by its ranks; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks_on_host)
