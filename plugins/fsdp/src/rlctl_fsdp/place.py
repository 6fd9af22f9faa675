"""Process groups, the mesh and this rank's place in it.

Ranks lie on a grid dp_replicate x dp_shard x usp, the last running fastest. The ranks of one usp row hold slices of the
same rows. Weights are sharded over dp_shard x usp together, so no axis but dp_replicate keeps copies of them.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlctl import constraints
from rlctl.engine import MeshInfo
from rlctl.errors import CapabilityError, ConfigError
from rlctl.hf_config import load_config
from rlctl.parts import ranks
from rlctl.parts.ulysses import Ulysses
from rlctl.topology import Topology
from rlctl_fsdp.config import FSDPConfig

_AXES = ("dp_replicate", "dp_shard", "usp")


@dataclass(frozen=True)
class Place:
    """What the engine keeps of the mesh.

    Args:
        mesh: what weights are sharded over, with a dimension of replicas before it where there are some; None where
            nothing is sharded.
        owns_group: the process group was made here.
        data: ranks that hold other rows than this one, at the same place of their replica; None: all ranks.
        ulysses: the ranks that hold slices of this rank's rows; None where it holds whole rows.
    """

    device: torch.device
    mesh: DeviceMesh | None
    owns_group: bool
    data: dist.ProcessGroup | None = None
    ulysses: Ulysses | None = None


def settle(topology: Topology, settings: Mapping[str, Any]) -> tuple[MeshInfo, Place]:
    """Join the process group if there is more than one rank, and report this rank's place.

    Raises:
        CapabilityError: an axis that this backend has not, or a device type that this process has not.
        ConfigError: settings that exclude an axis.
        EngineError: the launcher's environment does not fit the topology.
    """
    other = {k: v for k, v in topology.axes().items() if k not in _AXES}
    if other:
        raise CapabilityError(
            "fsdp2 splits work along dp_shard, dp_replicate and usp only",
            found=", ".join(f"{k}={v}" for k, v in other.items()),
            wanted="dp_shard, dp_replicate, usp",
            next="`rlctl capabilities` shows which backend has the axis",
        )
    config = FSDPConfig(**{k: v for k, v in settings.items() if k != "device"})
    if topology.usp > 1 and config.attention == "per_row":
        raise ConfigError(
            "usp splits one packed sequence between ranks, and per_row packs none",
            found=f"parallel.usp={topology.usp} and engine.attention=per_row",
            wanted="engine.attention=auto, or parallel.usp=1",
            next="set engine.attention=auto",
        )
    world = topology.world_size
    device = ranks.take_device("fsdp2", str(settings.get("device", "cpu")), world)
    sharded = world > 1 or config.wrap == "always"
    owns = ranks.join(world, device, config.collective_timeout_s) if sharded else False
    rank = dist.get_rank() if sharded else 0
    place = Place(device, None, owns)
    if sharded:
        sizes = (topology.dp_replicate, topology.dp_shard, topology.usp)
        mesh, data, row = _grid(dist.group.WORLD, device.type, sizes, config.collective_timeout_s)
        ulysses = None if row is None else Ulysses(row, topology.usp, rank % topology.usp)
        place = Place(device, mesh, owns, data, ulysses)
    info = MeshInfo(
        rank=rank,
        world_size=world,
        dp_rank=topology.dp_rank(rank),
        dp_size=topology.dp_size,
        is_collect=topology.is_collector(rank),
        coordinates=topology.coordinates(rank),
        device=str(device),
        token_multiplier=topology.usp,
        handle=place,
    )
    return info, place


@lru_cache(maxsize=8)
def _grid(
    _world: dist.ProcessGroup | None, device_type: str, sizes: tuple[int, int, int], timeout_s: float
) -> tuple[DeviceMesh, dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """(mesh of the weights, group of equal usp coordinate, usp group), the groups None where usp is 1.

    The engines of one process share them (``_world`` is the process group that they belong to): each group of an
    accelerator costs memory.
    """
    replicate, shard, usp = sizes
    order = torch.arange(replicate * shard * usp)
    if replicate == 1:
        mesh = init_device_mesh(device_type, (shard * usp,), mesh_dim_names=("dp_shard",))
    else:
        grid = order.view(replicate, shard * usp)
        groups = [_subgroup(grid.T, timeout_s), _subgroup(grid, timeout_s)]
        mesh = DeviceMesh.from_group(groups, device_type, grid, mesh_dim_names=("dp_replicate", "dp_shard"))
    if usp == 1:
        return mesh, None, None
    rows = order.view(-1, usp)
    return mesh, _subgroup(rows.T, timeout_s), _subgroup(rows, timeout_s)


def _subgroup(rows: torch.Tensor, timeout_s: float) -> dist.ProcessGroup:
    """This rank's group of those whose ranks are the rows of a matrix. Collective over all ranks."""
    timeout = datetime.timedelta(seconds=timeout_s)
    mine, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
    assert isinstance(mine, dist.ProcessGroup), "every rank is in one row"
    return mine


def check_heads(topology: Topology, model: Mapping[str, Any]) -> None:
    """Compare the heads in a model's config with usp, before any weight is read.

    Raises:
        CapabilityError: the ranks cannot share them; names the nearest sizes that fit.
    """
    if topology.usp == 1:
        return
    facts = constraints.ModelFacts.from_config(load_config(model).to_dict())
    broken = constraints.check("heads_divisible_by_usp", topology, facts)
    if broken is not None:
        raise CapabilityError(
            f"this model cannot be split over usp={topology.usp}",
            found=broken.found,
            wanted=broken.words,
            next=f"set {' or '.join(f'parallel.{n}' for n in broken.nearest) or 'parallel.usp=1'}",
        )


def leave(place: Place) -> None:
    """Let go of the groups of the grid, and destroy the process group if it was made here."""
    _grid.cache_clear()
    if place.owns_group and dist.is_initialized():
        dist.destroy_process_group()
