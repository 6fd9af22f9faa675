"""Process groups, the mesh and this rank's place in it."""

from __future__ import annotations

import datetime
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlctl.engine import MeshInfo
from rlctl.errors import CapabilityError, EngineError
from rlctl.topology import Topology
from rlctl_fsdp.config import FSDPConfig

_COLLECTIVES = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


@dataclass(frozen=True)
class Place:
    """What the engine keeps of the mesh. ``mesh`` is None where nothing is sharded."""

    device: torch.device
    mesh: DeviceMesh | None
    owns_group: bool


def settle(topology: Topology, settings: Mapping[str, Any]) -> tuple[MeshInfo, Place]:
    """Join the process group if there is more than one rank, and report this rank's place.

    Raises:
        CapabilityError: an axis other than dp_shard, or a device type that this process has not.
        EngineError: the launcher's environment does not fit the topology.
    """
    other = {k: v for k, v in topology.axes().items() if k != "dp_shard"}
    if other:
        raise CapabilityError(
            "fsdp2 splits work along dp_shard only",
            found=", ".join(f"{k}={v}" for k, v in other.items()),
            wanted="dp_shard alone",
            next="`rlctl capabilities` shows which backend has the axis",
        )
    config = FSDPConfig(**{k: v for k, v in settings.items() if k != "device"})
    world = topology.world_size
    device = _device(str(settings.get("device", "cpu")), world)
    sharded = world > 1 or config.wrap == "always"
    owns = _join(world, device, config.collective_timeout_s) if sharded else False
    rank = dist.get_rank() if sharded else 0
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("dp_shard",)) if sharded else None
    place = Place(device, mesh, owns)
    info = MeshInfo(
        rank=rank,
        world_size=world,
        dp_rank=topology.dp_rank(rank),
        dp_size=topology.dp_size,
        is_collect=topology.is_collector(rank),
        coordinates=topology.coordinates(rank),
        device=str(device),
        handle=place,
    )
    return info, place


def _device(name: str, world: int) -> torch.device:
    kind = name.partition(":")[0]
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "npu":
        # torch has no such device type until Ascend's adapter has registered it.
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            raise CapabilityError(
                "device npu needs torch_npu", found=str(error), next="pip install torch_npu"
            ) from error
    if kind not in _COLLECTIVES:
        raise CapabilityError("fsdp2 knows no such device", found=name, wanted=", ".join(_COLLECTIVES))
    wanted = torch.device(name)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != wanted.type:
        raise CapabilityError(
            f"this process has no {wanted.type} device",
            found=found.type if found else "cpu only",
            wanted=wanted.type,
            next="set trainer.device=cpu, or run `rlctl doctor` to see what is installed",
        )
    if wanted.index is not None:
        index = wanted.index
    else:
        index = int(os.environ.get("LOCAL_RANK", "0")) if world > 1 else torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(index)
    return torch.device(wanted.type, index)


def _join(world: int, device: torch.device, timeout_s: float) -> bool:
    """Use the process group that is there, or make one; True when it was made here."""
    if dist.is_initialized():
        if dist.get_world_size() != world:
            raise EngineError(
                "the process group has another size than the topology",
                found=f"{dist.get_world_size()} ranks",
                wanted=f"{world} ranks",
            )
        return False
    timeout = datetime.timedelta(seconds=timeout_s)
    backend = _COLLECTIVES[device.type]
    if world == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return True
    missing = [k for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
    if missing:
        raise EngineError(
            f"{world} ranks are asked for, but nothing launched them",
            found=f"no {', '.join(missing)} in the environment",
            wanted="the environment that torchrun or `rlctl train --nproc` sets",
            next=f"start with --nproc {world}",
        )
    if int(os.environ["WORLD_SIZE"]) != world:
        raise EngineError(
            "the launcher started another number of ranks than the topology has",
            found=f"WORLD_SIZE={os.environ['WORLD_SIZE']}",
            wanted=str(world),
        )
    dist.init_process_group(backend, timeout=timeout)
    return True


def reduce_values(values: list[float], op: str, device: torch.device) -> list[float]:
    """Reduce numbers over all ranks in float64. ``op`` is ``sum``, ``max`` or ``min``."""
    ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=ops[op])
    return tensor.tolist()
