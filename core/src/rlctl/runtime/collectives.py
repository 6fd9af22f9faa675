"""The process group of a worker group. The worker owns it: engines come and go, and find it there."""

from __future__ import annotations

import datetime

from rlctl import device as devices
from rlctl.device import Device
from rlctl.runtime import meeting
from rlctl.runtime.records import Boot


def join(boot: Boot, device: Device) -> None:
    """Make this rank a member of its group's process group, once, on a device of its own. One rank has no group.

    Collective: every rank of the group calls it.
    """
    if boot.world_size == 1:
        # The only rank of a pool may have other pools' devices before its own; the first is the current one anyway.
        if boot.local_rank > 0:
            devices.set_device(device, boot.local_rank)
        return
    import torch.distributed as dist

    if dist.is_initialized():
        assert dist.get_world_size() == boot.world_size, (dist.get_world_size(), boot.world_size)
        return
    devices.set_device(device, boot.local_rank)
    assert boot.store, "the transport says where the ranks meet"
    timeout = datetime.timedelta(seconds=boot.collective_timeout_s)
    backend = devices.collective_backend(device)
    if boot.store.startswith(meeting.SCHEME):
        store = meeting.tcp_store(boot.store, boot.rank, boot.world_size, timeout)
        dist.init_process_group(backend, store=store, rank=boot.rank, world_size=boot.world_size, timeout=timeout)
        return
    dist.init_process_group(
        backend, init_method=boot.store, rank=boot.rank, world_size=boot.world_size, timeout=timeout
    )


def leave(boot: Boot) -> None:
    """Destroy the process group that :func:`join` made."""
    if boot.world_size == 1:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
