"""The ranks of one engine: their device, their process group, and numbers reduced over them."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rlctl import device as devices
from rlctl.errors import CapabilityError, EngineError

KNOWN = ("cpu", "cuda", "npu")
"""Device types that core has calls for."""


def take_device(backend: str, name: str, world_size: int, known: tuple[str, ...] = KNOWN) -> torch.device:
    """The device ``name`` of this process, made current. Without an index ranks take theirs from ``LOCAL_RANK``.

    Args:
        backend: of whom the messages speak.
        known: device types that the backend runs on.

    Raises:
        CapabilityError: a device type that the backend or this process has not.
    """
    kind, _, index = name.partition(":")
    if kind not in known:
        raise CapabilityError(f"{backend} knows no such device", found=name, wanted=", ".join(known))
    if kind == "cpu":
        return torch.device("cpu")
    if not devices.is_available(kind):
        raise CapabilityError(
            f"this process has no {kind} device",
            details=devices.absence_words(kind),
            found=next((k for k in KNOWN if k != "cpu" and devices.is_available(k)), "cpu only"),
            wanted=kind,
            next="set trainer.device=cpu, or run `rlctl doctor` to see what is installed",
        )
    if index:
        number = int(index)
    else:
        number = int(os.environ.get("LOCAL_RANK", "0")) if world_size > 1 else devices.current_index(kind)
    devices.set_device(kind, number)
    return torch.device(kind, number)


def join(world_size: int, device: torch.device, timeout_s: float) -> bool:
    """Use the process group that is there, or make one of ``world_size`` ranks; True when it was made here.

    A group of one rank needs no launcher.

    Raises:
        EngineError: a group of another size is there, or the launcher's environment does not fit.
    """
    if dist.is_initialized():
        if dist.get_world_size() != world_size:
            raise EngineError(
                "the process group has another size than the topology",
                found=f"{dist.get_world_size()} ranks",
                wanted=f"{world_size} ranks",
            )
        return False
    timeout = datetime.timedelta(seconds=timeout_s)
    backend = devices.collective_backend(device)
    if world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return True
    missing = [k for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
    if missing:
        raise EngineError(
            f"{world_size} ranks are asked for, but nothing launched them",
            found=f"no {', '.join(missing)} in the environment",
            wanted="the environment that torchrun or `rlctl train --nproc` sets",
            next=f"start with --nproc {world_size}",
        )
    if int(os.environ["WORLD_SIZE"]) != world_size:
        raise EngineError(
            "the launcher started another number of ranks than the topology has",
            found=f"WORLD_SIZE={os.environ['WORLD_SIZE']}",
            wanted=str(world_size),
        )
    dist.init_process_group(backend, timeout=timeout)
    return True


def reduce_values(
    values: list[float], op: str, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Reduce numbers over ``group`` (None: all ranks) in float64. ``op`` is ``sum``, ``max`` or ``min``."""
    ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=ops[op], group=group)
    return tensor.tolist()
