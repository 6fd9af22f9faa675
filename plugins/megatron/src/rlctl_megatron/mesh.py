"""Megatron's process groups and this rank's place in them.

megatron-core keeps its groups in module globals, one layout a process. Engines of one process (actor and reference in one
pool) therefore share them, and an engine with another layout is refused.

Ranks lie as core's topology has them: tp fastest, then cp, then data parallel, pp slowest. Experts see the same ranks of a
stage as etp x ep x expert data parallel.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from rlctl.engine import MeshInfo
from rlctl.errors import CapabilityError
from rlctl.parts import ranks
from rlctl.topology import Topology
from rlctl_megatron import compat

AXES = ("dp_shard", "tp", "sp", "pp", "vpp", "cp", "ep", "etp")


@dataclass(frozen=True)
class Place:
    """This rank's coordinates, sizes and groups.

    Args:
        topology: sizes of the axes.
        owns_world: the process group of all ranks was made here.
        tp_group ... etp_group: None where the axis has one rank.
        data_group: ranks that hold other rows than this one, at the same place of their replica.
    """

    topology: Topology
    device: torch.device
    owns_world: bool = False
    tp_rank: int = 0
    pp_rank: int = 0
    cp_rank: int = 0
    ep_rank: int = 0
    etp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    ep_group: dist.ProcessGroup | None = None
    etp_group: dist.ProcessGroup | None = None
    data_group: dist.ProcessGroup | None = None


_layout: tuple[Topology, int, bool] | None = None
"""Of this process's groups: sizes, engines that use them, and whether one of these made the group of all ranks."""


def settle(
    topology: Topology, settings: Mapping[str, Any], timeout_s: float, known: tuple[str, ...] = ("cpu", "cuda")
) -> tuple[MeshInfo, Place]:
    """Join the process group, build megatron's groups, and report this rank's place.

    Args:
        known: device types that the engine runs on.

    Raises:
        CapabilityError: an axis that this backend has not, a device type that this process has not, or another layout than
            that of an engine that lives here already.
        EngineError: the launcher's environment does not fit the topology.
    """
    other = {k: v for k, v in topology.axes().items() if k not in AXES}
    if other:
        raise CapabilityError(
            f"megatron splits work along {', '.join(AXES)} only",
            found=", ".join(f"{k}={v}" for k, v in other.items()),
            wanted=", ".join(AXES),
            next="`rlctl capabilities` shows which backend has the axis",
        )
    device = ranks.take_device("megatron", str(settings.get("device", "cpu")), topology.world_size, known)
    owns = ranks.join(topology.world_size, device, timeout_s)
    try:
        _share_groups(topology, timeout_s, owns)
    except BaseException:
        if owns:
            dist.destroy_process_group()
        raise
    rank = dist.get_rank()
    place = _place(topology, device, owns)
    # Core works ranks out from its own order; megatron is asked, so that a change of either is seen.
    wanted = topology.coordinates(rank)
    assert (wanted["tp"], wanted["cp"], wanted["pp"]) == (place.tp_rank, place.cp_rank, place.pp_rank), "rank order"
    assert topology.dp_rank(rank) == parallel_state.get_data_parallel_rank(), "data parallel order"
    info = MeshInfo(
        rank=rank,
        world_size=topology.world_size,
        dp_rank=topology.dp_rank(rank),
        dp_size=topology.dp_size,
        is_collect=topology.is_collector(rank),
        coordinates={**wanted, "ep": place.ep_rank, "etp": place.etp_rank},
        device=str(device),
        token_multiplier=topology.cp,
        count_multiple=topology.pp if topology.vpp > 1 else 1,
        handle=place,
    )
    return info, place


def leave(place: Place) -> None:
    """Let go of the groups; the last engine of the process destroys them."""
    global _layout
    if _layout is None:
        return
    sizes, users, made_world = _layout
    if users > 1:
        _layout = (sizes, users - 1, made_world)
        return
    _layout = None
    made = compat.forget_groups()
    # megatron only forgets its groups, about thirty of them, each with threads and, on a GPU, memory.
    RotaryEmbedding.forward.cache_clear()  # it keeps modules of every engine, and so their groups
    gc.collect()  # modules in cycles hold some
    for group in made:
        dist.destroy_process_group(group)
    if made_world and dist.is_initialized():
        dist.destroy_process_group()


def _share_groups(topology: Topology, timeout_s: float, made_world: bool) -> None:
    global _layout
    if _layout is not None and parallel_state.model_parallel_is_initialized():
        sizes, users, made_before = _layout
        if sizes != topology:
            raise CapabilityError(
                "megatron keeps one layout of ranks in a process, and another engine here has a different one",
                found=f"{_words(topology)} beside {_words(sizes)}",
                wanted="the same parallel sizes for every megatron role of a pool",
                next="give the role a pool of its own (runtime.pools and its pool setting)",
            )
        _layout = (sizes, users + 1, made_before or made_world)
        return
    compat.initialize_groups(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp if topology.vpp > 1 else None,
        context_parallel_size=topology.cp,
        expert_model_parallel_size=topology.ep,
        # Without it megatron splits every expert's matrices over tp.
        expert_tensor_parallel_size=topology.etp,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    _layout = (topology, 1, made_world)


def _words(topology: Topology) -> str:
    return ", ".join(f"{k}={v}" for k, v in topology.axes().items()) or "one rank"


def _place(topology: Topology, device: torch.device, owns: bool) -> Place:
    def group(size: int, found: Any) -> dist.ProcessGroup | None:
        return found if size > 1 else None

    return Place(
        topology=topology,
        device=device,
        owns_world=owns,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank() or 0,
        tp_group=group(topology.tp, parallel_state.get_tensor_model_parallel_group()),
        pp_group=group(topology.pp, parallel_state.get_pipeline_model_parallel_group()),
        cp_group=group(topology.cp, parallel_state.get_context_parallel_group()),
        ep_group=group(topology.ep, parallel_state.get_expert_model_parallel_group()),
        etp_group=group(topology.etp, parallel_state.get_expert_tensor_parallel_group()),
        data_group=group(topology.dp_size, parallel_state.get_data_parallel_group()),
    )
