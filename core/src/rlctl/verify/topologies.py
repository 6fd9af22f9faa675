"""Which topologies there are to verify: all factorisations of a world size over the axes that a backend declares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from math import prod

from rlctl.capabilities import find_capability
from rlctl.config.suggest import nearest
from rlctl.errors import UsageError
from rlctl.records import Axis, BackendSpec, ModelType, Support
from rlctl.topology import Topology, resolve

_PRODUCT = (Axis.PP, Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.USP, Axis.TP)
_REUSING = (Axis.EP, Axis.ETP, Axis.VPP, Axis.SP)
"""Axes on ranks that the product axes have taken already. dcp is an axis of decoding."""


def declared_axes(spec: BackendSpec, model_type: ModelType, device: str, vendor: str | None) -> set[Axis]:
    """The axes that a backend declares supported or conditional here."""
    found = {axis: find_capability(spec, axis, model_type, device, vendor) for axis in Axis}
    return {a for a, c in found.items() if c is not None and c.support in (Support.SUPPORTED, Support.CONDITIONAL)}


def all_topologies(
    spec: BackendSpec, model_type: ModelType, device: str, vendor: str | None, most_ranks: int
) -> list[Topology]:
    """Every combination of sizes of the declared axes with at most ``most_ranks`` ranks, one process first.

    What a model's sizes must be like is not asked here (see :func:`rlctl.verify.tiny.fit_tiny`).
    """
    axes = declared_axes(spec, model_type, device, vendor)
    product = [a for a in _PRODUCT if a in axes]
    found: list[Topology] = []
    for world_size in range(1, most_ranks + 1):
        for sizes in _factorisations(world_size, len(product)):
            base = dict(zip(product, sizes, strict=True))
            if prod(sizes) != world_size:
                continue
            for extra in _reused(world_size, base, axes):
                found.append(resolve(world_size, {a.value: n for a, n in {**base, **extra}.items()}))
    return sorted(dict.fromkeys(found), key=lambda t: (t.world_size, len(t.axes())))


def _factorisations(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations of ``total`` into ``parts`` factors, ones included."""
    if parts == 0:
        yield ()
        return
    for first in (n for n in range(1, total + 1) if total % n == 0):
        for rest in _factorisations(total // first, parts - 1):
            yield (first, *rest)


def _reused(world_size: int, base: Mapping[Axis, int], axes: set[Axis]) -> Iterator[dict[Axis, int]]:
    stage = world_size // base.get(Axis.PP, 1)
    divisors = [n for n in range(1, stage + 1) if stage % n == 0]
    choices: dict[Axis, list[int]] = {
        Axis.EP: divisors,
        Axis.ETP: divisors,
        Axis.VPP: [1, 2] if base.get(Axis.PP, 1) > 1 else [1],
        Axis.SP: [0, 1] if base.get(Axis.TP, 1) > 1 else [0],
    }
    used = [a for a in _REUSING if a in axes]
    for sizes in itertools.product(*(choices[a] for a in used)):
        extra = dict(zip(used, sizes, strict=True))
        if extra.get(Axis.EP, 1) * extra.get(Axis.ETP, 1) <= stage:
            yield extra


def parse_topology(text: str | None, nproc: int | None) -> Topology:
    """``dp_shard=2,usp=2`` -> a topology; what is left of ``nproc`` ranks goes to dp_shard.

    Raises:
        UsageError: not ``axis=size`` pairs, an axis twice, or an unknown one.
        CapabilityError: sizes that do not multiply to ``nproc``.
    """
    axes: dict[str, int] = {}
    for pair in filter(None, (text or "").replace(" ", "").split(",")):
        name, equals, size = pair.partition("=")
        value = {"true": "1", "false": "0"}.get(size.lower(), size)
        if not equals or not name or not value.isdigit() or name in axes:
            raise UsageError(
                "the topology cannot be read",
                found=pair,
                wanted="axis=size pairs, each axis once, as in dp_shard=2,usp=2",
                next="rlctl verify --backend NAME --topology dp_shard=2",
            )
        if name not in list(Axis):
            near = nearest(name, list(Axis))
            raise UsageError(
                f"there is no parallel axis {name!r}",
                found=pair,
                wanted=", ".join(Axis),
                next=f"--topology {near}={size}" if near else "rlctl capabilities shows the axes",
            )
        axes[name] = int(value)
    taken = prod(n for a, n in axes.items() if a in {p.value for p in _PRODUCT})
    world_size = nproc if nproc is not None else taken
    if "dp_shard" in axes or nproc is None:
        axes.setdefault("dp_shard", 1)
    return resolve(world_size, axes)


def words(topology: Topology) -> str:
    """``dp_shard=2,usp=2``, or ``one process``."""
    return ",".join(f"{k}={v}" for k, v in topology.axes().items()) or "one process"
