"""World size to axes to rank coordinates. Pure Python, no torch.

A topology is the sizes of the parallel axes of one engine. Data parallelism is ``dp_replicate x dp_shard``; model
parallel ranks (tp, pp, cp, usp) hold parts of one replica's work on the same rows. Rank order, slowest to fastest:
pp, dp_replicate, dp_shard, cp, usp, tp. Engines may lay ranks out in another way; they then say so through
:class:`rlctl.engine.MeshInfo`, which is what core reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from rlctl.errors import CapabilityError
from rlctl.records import Axis

_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "usp", "tp")


@dataclass(frozen=True)
class Topology:
    """Sizes of all axes for ``world_size`` ranks. ``ep``, ``etp``, ``sp``, ``vpp`` and ``dcp`` reuse ranks of the others.

    Raises:
        CapabilityError: an axis is not positive, or the product of the axes is not the world size.
    """

    world_size: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    usp: int = 1
    dcp: int = 1
    sp: bool = False

    def __post_init__(self) -> None:
        for axis in Axis:
            size = int(getattr(self, axis.value))
            if size < (0 if axis is Axis.SP else 1):
                raise CapabilityError(
                    f"parallel.{axis.value} must be at least 1", found=size, wanted="a positive whole number"
                )
        if prod(getattr(self, name) for name in _ORDER) != self.world_size:
            sizes = ", ".join(f"{name}={getattr(self, name)}" for name in _ORDER)
            raise CapabilityError(
                f"the parallel axes do not multiply to the world size {self.world_size}",
                found=sizes,
                wanted=f"{' x '.join(_ORDER)} == {self.world_size}",
                next="leave parallel.dp_shard at -1 to have it worked out",
            )

    @property
    def dp_size(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def model_parallel_size(self) -> int:
        return self.tp * self.pp * self.cp * self.usp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of ``rank`` on the axes of ``_ORDER``, slowest first."""
        assert 0 <= rank < self.world_size, (rank, self.world_size)
        out: dict[str, int] = {}
        for name in reversed(_ORDER):
            rank, out[name] = divmod(rank, getattr(self, name))
        return {name: out[name] for name in _ORDER}

    def dp_rank(self, rank: int) -> int:
        c = self.coordinates(rank)
        return c["dp_replicate"] * self.dp_shard + c["dp_shard"]

    def is_collector(self, rank: int) -> bool:
        """True on the one rank of each data parallel replica whose output is taken (the last pipeline stage)."""
        c = self.coordinates(rank)
        return c["tp"] == c["cp"] == c["usp"] == 0 and c["pp"] == self.pp - 1

    def axes(self) -> dict[str, int]:
        """Every axis larger than one, by name."""
        return {
            a.value: int(getattr(self, a.value))
            for a in Axis
            if int(getattr(self, a.value)) > (0 if a is Axis.SP else 1)
        }


def resolve(world_size: int, axes: Mapping[str, int]) -> Topology:
    """Build a topology, working out ``dp_shard`` when it is -1 or absent.

    Raises:
        CapabilityError: an unknown axis, or sizes that do not divide the world size; names the nearest world sizes.
    """
    known = {a.value for a in Axis}
    unknown = sorted(set(axes) - known)
    if unknown:
        raise CapabilityError(
            f"unknown parallel axis {unknown[0]!r}", found=", ".join(unknown), wanted=", ".join(sorted(known))
        )
    sizes = {k: v for k, v in axes.items() if k != "dp_shard"}
    for name, size in sizes.items():
        if int(size) < (0 if name == "sp" else 1):
            raise CapabilityError(f"parallel.{name} must be at least 1", found=size, wanted="a positive whole number")
    others = prod(int(sizes.get(name, 1)) for name in _ORDER if name != "dp_shard")
    shard = int(axes.get("dp_shard", -1))
    if shard == -1:
        if world_size % others:
            below, above = world_size // others * others, -(-world_size // others) * others
            nearest = " or ".join(str(n) for n in (below, above) if n > 0)
            raise CapabilityError(
                f"{world_size} ranks cannot be split over the parallel axes",
                found=", ".join(f"{k}={v}" for k, v in sizes.items()) or "no axes",
                wanted=f"a world size that {others} divides, nearest {nearest}",
                next=f"set --nproc to {nearest}, or lower one axis",
            )
        shard = world_size // others
    sp = bool(sizes.pop("sp", False))
    return Topology(world_size=world_size, dp_shard=shard, sp=sp, **sizes)


def resolve_rollout(world_size: int, axes: Mapping[str, int]) -> Topology:
    """Build the topology of a rollout engine: ranks that no model parallel axis takes are replicas (``dp_replicate``).

    Weights of a rollout are not sharded over data parallel ranks, so ``dp_shard`` -1 comes to 1 here.

    Raises:
        CapabilityError: as :func:`resolve`.
    """
    shard = int(axes.get("dp_shard", -1))
    others = {k: v for k, v in axes.items() if k not in ("dp_shard", "dp_replicate")}
    taken = prod(int(others.get(name, 1)) for name in _ORDER if not name.startswith("dp_")) * max(shard, 1)
    replicas = int(axes.get("dp_replicate", 1))
    if replicas == 1 and shard == -1 and world_size % taken == 0:
        replicas = world_size // taken
    return resolve(world_size, {**others, "dp_shard": max(shard, 1), "dp_replicate": replicas})
