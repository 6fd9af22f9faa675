"""Which topologies there are to verify: of the axes that a backend declares, each alone and every two together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from math import lcm, prod

from rlctl.capabilities import find_capability
from rlctl.config.suggest import nearest
from rlctl.errors import UsageError
from rlctl.records import Axis, BackendSpec, ModelType, Support
from rlctl.topology import Topology, resolve

_PRODUCT = (Axis.PP, Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.USP, Axis.TP)
_CARRIERS = (Axis.DP_SHARD, Axis.DP_REPLICATE, Axis.TP, Axis.CP, Axis.USP)
"""Whose ranks experts are spread over, where an axis of experts is looked at alone: the first that a backend has."""
EXPERT_AXES = (Axis.EP, Axis.ETP)


def declared_axes(spec: BackendSpec, model_type: ModelType, device: str, vendor: str | None) -> set[Axis]:
    """The axes that a backend declares supported or conditional here."""
    found = {axis: find_capability(spec, axis, model_type, device, vendor) for axis in Axis}
    return {a for a, c in found.items() if c is not None and c.support in (Support.SUPPORTED, Support.CONDITIONAL)}


def all_topologies(
    spec: BackendSpec, model_type: ModelType, device: str, vendor: str | None, most_ranks: int
) -> list[Topology]:
    """One process, every declared axis alone at each size, and every two axes together, with at most ``most_ranks`` ranks.

    Two axes have the size 2 each. sp comes with tp, and vpp with pp, both of size 2. ep and etp take ranks of other axes: of
    the one that they are paired with where that has enough of them outside of pp, else of data parallel ranks; with tp they
    come with sp where that is declared, because a mixture of experts needs it. dcp is an axis of decoding. What is the same
    topology comes once. What a model's sizes must be like is not asked here (see :func:`rlctl.verify.tiny.fit_tiny`).
    """
    axes = declared_axes(spec, model_type, device, vendor)
    used = [a for a in Axis if a in axes and a is not Axis.DCP]
    wanted: list[dict[Axis, int]] = [{}]
    for axis in used:
        wanted += [{axis: n} for n in range(2, (2 if axis in (Axis.SP, Axis.VPP) else most_ranks) + 1)]
    wanted += [{a: 2, b: 2} for a, b in itertools.combinations(used, 2)]
    found: list[Topology] = []
    for sizes in wanted:
        whole = _with_what_it_needs(sizes, axes)
        if whole is not None and (world_size := _ranks(whole)) <= most_ranks:
            found.append(resolve(world_size, {a.value: n for a, n in {Axis.DP_SHARD: 1, **whole}.items()}))
    if {Axis.DP_SHARD, Axis.USP, Axis.EP} <= axes and most_ranks >= 4:
        found += [resolve(4, {"dp_shard": 2, "usp": 2, "ep": n}) for n in (2, 4)]
    return sorted(dict.fromkeys(found), key=lambda t: (t.world_size, len(t.axes())))


def _ranks(sizes: Mapping[Axis, int]) -> int:
    return prod(n for a, n in sizes.items() if a in _PRODUCT)


def _with_what_it_needs(sizes: Mapping[Axis, int], axes: set[Axis]) -> dict[Axis, int] | None:
    """``sizes`` and the axes without which they would be nothing; None where the backend lacks one of these."""
    whole = dict(sizes)
    for axis, base in ((Axis.SP, Axis.TP), (Axis.VPP, Axis.PP)):
        if axis in whole and base not in axes:
            return None
        if axis in whole:
            whole[base] = 2
    if Axis.SP in whole:
        whole[Axis.SP] = 1
    spread = prod(whole.get(a, 1) for a in EXPERT_AXES)
    if spread > 1:
        carrier = next((a for a in _CARRIERS if a in axes), None)
        # Replicas have whole sets of experts each.
        stage = _ranks({a: n for a, n in whole.items() if a not in (Axis.PP, Axis.DP_REPLICATE)})
        if carrier is None:
            return None
        if carrier in sizes:
            # As a pair with the axis that carries it anyway: replicas of the experts.
            whole[carrier] *= spread
        elif stage % spread:
            whole[carrier] = whole.get(carrier, 1) * (lcm(stage, spread) // stage)
        if whole.get(Axis.TP, 1) > 1 and Axis.SP in axes:
            whole[Axis.SP] = 1
    return whole


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
