"""VeOmni's device meshes and this rank's place in them.

VeOmni keeps the layout of ranks that its modules ask for in a module global. Each engine therefore holds its own, and whatever
it runs happens :meth:`Place.here`: engines of one process (actor and reference) may have different layouts.

Ranks lie as core's topology has them: dp_replicate slowest, then dp_shard, then usp. The experts of a replica see the same
ranks as expert shard x ep, ep fastest.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from veomni.distributed import parallel_state  # pyright: ignore[reportMissingImports]

from rlctl import constraints
from rlctl.device import is_available
from rlctl.engine import MeshInfo
from rlctl.errors import CapabilityError
from rlctl.hf_config import load_config
from rlctl.parts import ranks
from rlctl.parts.ulysses import Ulysses
from rlctl.topology import Topology

AXES = ("dp_replicate", "dp_shard", "usp", "ep")
_DEVICES = ("cpu", "cuda", "npu")
_CONSTRAINTS = ("heads_divisible_by_usp", "experts_divisible_by_ep", "ep_within_a_replica")


@dataclass(frozen=True)
class Place:
    """This rank's coordinates and groups.

    Args:
        state: VeOmni's record of the layout.
        ulysses: the ranks that hold slices of this rank's rows; None where it holds whole rows.
        data: ranks that hold other rows than this one, at the same place of their replica; None for one rank.
        experts: the ranks over which the experts of a replica are spread; None where each rank has all of them.
    """

    topology: Topology
    device: torch.device
    state: Any = None
    ulysses: Ulysses | None = None
    data: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None

    @property
    def expert_shards(self) -> int:
        """Ranks of a replica that share the weights of one expert."""
        return self.topology.dp_shard * self.topology.usp // self.topology.ep

    @property
    def ep_rank(self) -> int:
        """Which share of the experts is here."""
        return 0 if self.experts is None else dist.get_rank(self.experts)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, VeOmni's modules see this layout."""
        with parallel_state.use_parallel_state(self.state):
            yield


@dataclass
class _Process:
    """What this process has made: engines that live in it, whether the process group is ours, and of which group the cached
    layouts are."""

    engines: int = 0
    owns_world: bool = False
    world: dist.ProcessGroup | None = None


_process = _Process()


def settle(topology: Topology, settings: Mapping[str, Any], timeout_s: float) -> tuple[MeshInfo, Place]:
    """Join the process group, build VeOmni's meshes, and report this rank's place.

    Raises:
        CapabilityError: an axis that this backend has not, sizes that do not fit each other, or a device type that this
            process has not.
        EngineError: the launcher's environment does not fit the topology.
    """
    check_axes(topology)
    device = ranks.take_device("veomni", str(settings.get("device", "cpu")), topology.world_size, _DEVICES)
    if device.type == "cpu" and is_available("cuda"):
        raise CapabilityError(
            "veomni takes the GPU wherever a process has one",
            found="device cpu, and a CUDA device in sight",
            wanted="device cuda, or a process that sees no GPU",
            next="set trainer.device=cuda, or start with CUDA_VISIBLE_DEVICES= in the environment",
        )
    owns = ranks.join(topology.world_size, device, timeout_s)
    if _process.world is not dist.group.WORLD:
        # Layouts of a group that is gone: their collectives would fail, or wait.
        parallel_state.clear_parallel_state()
        _process.world, _process.owns_world, _process.engines = dist.group.WORLD, False, 0
    _process.owns_world |= owns
    try:
        place = _place(topology, device, timeout_s)
    except BaseException:
        if owns:
            _destroy()
        raise
    _process.engines += 1
    rank = dist.get_rank()
    coordinates = topology.coordinates(rank)
    # Core works ranks out from its own order; VeOmni is asked, so that a change of either is seen.
    assert topology.dp_rank(rank) == place.state.dp_rank, "data parallel order"
    assert place.ulysses is None or place.ulysses.rank == coordinates["usp"], "usp order"
    assert place.ep_rank == rank % topology.ep, "ep order"
    info = MeshInfo(
        rank=rank,
        world_size=topology.world_size,
        dp_rank=topology.dp_rank(rank),
        dp_size=topology.dp_size,
        is_collect=topology.is_collector(rank),
        coordinates={**coordinates, "ep": place.ep_rank},
        device=str(device),
        token_multiplier=topology.usp,
        handle=place,
    )
    return info, place


def check_axes(topology: Topology) -> None:
    """Refuse what VeOmni would refuse by another name, or not at all.

    Raises:
        CapabilityError: an axis that this backend has not, or ep that does not divide the ranks of a replica.
    """
    other = {k: v for k, v in topology.axes().items() if k not in AXES}
    if other:
        raise CapabilityError(
            f"veomni splits work along {', '.join(AXES)} only",
            found=", ".join(f"{k}={v}" for k, v in other.items()),
            wanted=", ".join(AXES),
            next="take megatron for tp, sp, pp, vpp, cp and etp (`rlctl capabilities` shows every cell)",
        )
    _require(topology, constraints.ModelFacts(), ("ep_within_a_replica",))


def check_model(topology: Topology, model: Mapping[str, Any]) -> None:
    """Compare a model's config with the axes, before any weight is read.

    Raises:
        CapabilityError: heads or experts that the ranks cannot share.
    """
    _require(topology, constraints.ModelFacts.from_config(load_config(model).to_dict()), _CONSTRAINTS)


def _require(topology: Topology, facts: constraints.ModelFacts, names: tuple[str, ...]) -> None:
    for name in names:
        broken = constraints.check(name, topology, facts)
        if broken is not None:
            nearest = " or ".join(f"parallel.{n}" for n in broken.nearest)
            raise CapabilityError(
                f"this model cannot be split over {broken.axis}={getattr(topology, broken.axis)}",
                found=broken.found,
                wanted=broken.words,
                next=f"set {nearest or f'parallel.{broken.axis}=1'}",
            )


def _place(topology: Topology, device: torch.device, timeout_s: float) -> Place:
    before = set(_world.pg_map)
    state = parallel_state.init_parallel_state(
        dp_size=topology.dp_size,
        dp_replicate_size=topology.dp_replicate,
        dp_shard_size=topology.dp_shard,
        ulysses_size=topology.usp,
        dp_mode="fsdp2",
        device_type=device.type,
        extra_parallel_sizes=(topology.ep,),
        # Without a name: a second engine of the process would be given the layout of the first, with a warning.
        name=None,
    )
    for group in set(_world.pg_map) - before:
        # Groups of a mesh have torch's own time limit, not that of the group that they are part of.
        _set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)
    ulysses = None
    if topology.usp > 1:
        ulysses = Ulysses(state.ulysses_group, topology.usp, state.ulysses_rank)
    return Place(
        topology,
        device,
        state,
        ulysses,
        state.dp_group if topology.dp_size > 1 else None,
        state.ep_group if topology.ep > 1 else None,
    )


def leave() -> None:
    """One engine fewer; the last one lets go of the layouts, and of the process group if it was made here."""
    _process.engines -= 1
    if _process.engines <= 0 and _process.owns_world:
        _destroy()


def _destroy() -> None:
    parallel_state.clear_parallel_state()
    _process.world, _process.owns_world, _process.engines = None, False, 0
    if dist.is_initialized():
        dist.destroy_process_group()
