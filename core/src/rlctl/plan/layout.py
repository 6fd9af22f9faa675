"""World size to axes, coordinates and process groups; and the valid sizes nearest to those that were asked for.

A group is given as a pattern: the ranks ``start, start + stride, ...``. So a plan of many ranks costs no more than one of few;
:func:`members` and :func:`places` write them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import log2, prod

from rlctl.capabilities import AxisProblem, check_topology
from rlctl.constraints import ModelFacts
from rlctl.errors import CapabilityError
from rlctl.records import BackendKind, BackendSpec, ModelType
from rlctl.topology import Topology, resolve, resolve_rollout

RANK_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "usp", "tp")
"""Axes that number the ranks, slowest to fastest; the others reuse ranks of these."""
_MAX_TRIED = 4000
_SIZES_AN_AXIS = 8
_SWITCH = 0.1
"""What turning sp on or off counts for, in octaves: less than any other size."""


@dataclass(frozen=True)
class Groups:
    """All process groups of one axis.

    Args:
        axis: name; ``dp`` joins dp_replicate and dp_shard, ``shards`` dp_shard, cp and usp, ``model`` all others.
        size: ranks of each group.
        count: groups.
        strides: (size, stride) of each rank axis inside a group, slowest first.
        words: what its ranks share.
    """

    axis: str
    size: int
    count: int
    strides: tuple[tuple[int, int], ...]
    words: str


@dataclass(frozen=True)
class RankPlace:
    """Where one rank is; ``coordinates`` are in the order of :data:`RANK_AXES`."""

    rank: int
    coordinates: tuple[int, ...]
    dp_rank: int
    is_collector: bool


@dataclass(frozen=True)
class RoleLayout:
    """Ranks of one role.

    Args:
        role: actor, ref, critic or rollout.
        backend: its engine.
        pool: the pool of processes where it lives.
        topology: None where the axes do not fit the ranks; ``problem`` then says why.
        nearest: topologies that would fit, nearest first, as ``tp=2, usp=4``.
        python: the interpreter of its pool; None for this one.
    """

    role: str
    kind: BackendKind
    backend: str
    pool: str
    world_size: int
    topology: Topology | None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    nearest: tuple[str, ...] = ()
    python: str | None = None

    @property
    def dp_size(self) -> int:
        return 1 if self.topology is None else self.topology.dp_size


_WORDS = {
    "pp": "stages of one pipeline",
    "dp_replicate": "replicas of one shard: gradients are summed over them",
    "dp_shard": "ranks of one replica with other rows",
    "cp": "parts of one row (ring)",
    "usp": "slices of one packed sequence (heads are exchanged)",
    "tp": "parts of one matrix",
    "dp": "ranks with other rows: gradients, metrics and micro-batch counts are agreed over them",
    "shards": "one copy of the weights, where layers are gathered for use",
    "model": "one replica of the data: the same rows",
}


def strides(topology: Topology) -> dict[str, int]:
    """Axis to the distance between two ranks that differ by one on it."""
    out: dict[str, int] = {}
    step = 1
    for axis in reversed(RANK_AXES):
        out[axis] = step
        step *= int(getattr(topology, axis))
    return out


def groups(topology: Topology, kind: BackendKind = BackendKind.TRAIN) -> list[Groups]:
    """Every group with more than one rank, and ``dp`` and ``model`` where they join several axes."""
    step = strides(topology)
    replicas = (
        "engines that each generate a share of the prompts" if kind is BackendKind.ROLLOUT else _WORDS["dp_replicate"]
    )
    words_of = {**_WORDS, "dp_replicate": replicas}

    def over(name: str, axes: Sequence[str], words: str) -> Groups:
        inner = tuple((int(getattr(topology, a)), step[a]) for a in axes if int(getattr(topology, a)) > 1)
        size = prod(n for n, _ in inner)
        return Groups(name, size, topology.world_size // size, inner, words)

    found = [over(a, (a,), words_of[a]) for a in RANK_AXES if int(getattr(topology, a)) > 1]
    if topology.dp_replicate > 1 and topology.dp_shard > 1:
        found.append(over("dp", ("dp_replicate", "dp_shard"), _WORDS["dp"]))
    gathered = [a for a in ("dp_shard", "cp", "usp") if int(getattr(topology, a)) > 1]
    if len(gathered) > 1 and kind is BackendKind.TRAIN:
        found.append(over("shards", gathered, _WORDS["shards"]))
    inside = [a for a in RANK_AXES if not a.startswith("dp_") and int(getattr(topology, a)) > 1]
    if len(inside) > 1:
        found.append(over("model", inside, _WORDS["model"]))
    return found


def members(group: Groups, world_size: int) -> Iterator[tuple[int, ...]]:
    """The ranks of each group, by first rank."""
    offsets = [sum(i * s for i, (_, s) in zip(at, group.strides, strict=True)) for at in _grid(group)]
    offsets.sort()
    inner = set(offsets)
    seen = bytearray(world_size)
    for start in range(world_size):
        if not seen[start]:
            ranks = tuple(start + o for o in offsets)
            for rank in ranks:
                seen[rank] = 1
            yield ranks
    assert len(inner) == group.size, "strides of one group do not collide"


def _grid(group: Groups) -> Iterator[tuple[int, ...]]:
    return product(*(range(n) for n, _ in group.strides))


def places(topology: Topology) -> Iterator[RankPlace]:
    """Every rank's coordinates, in order; the same as :meth:`rlctl.topology.Topology.coordinates`, for many ranks at once."""
    step = strides(topology)
    radix = [(step[axis], int(getattr(topology, axis))) for axis in RANK_AXES]
    shard, last = topology.dp_shard, topology.pp - 1
    for rank in range(topology.world_size):
        pp, replica, part, cp, usp, tp = at = tuple([rank // stride % size for stride, size in radix])
        yield RankPlace(rank, at, replica * shard + part, pp == last and cp == usp == tp == 0)


def factorise(kind: BackendKind, world_size: int, axes: Mapping[str, int]) -> Topology:
    """The topology of a role over its pool.

    Raises:
        CapabilityError: the sizes do not fit the ranks.
    """
    return resolve(world_size, axes) if kind is BackendKind.TRAIN else resolve_rollout(world_size, axes)


def lay_out(
    role: str,
    spec: BackendSpec,
    pool: str,
    world_size: int,
    axes: Mapping[str, int],
    device: str,
    vendor: str | None,
    facts: ModelFacts,
    model_type: ModelType = ModelType.LANGUAGE_MODEL,
) -> RoleLayout:
    """Factorise, compare with the backend's records, and where it does not fit look for what does."""
    kind = spec.kind
    try:
        topology = factorise(kind, world_size, axes)
    except CapabilityError as error:
        given = ", ".join(f"{a}={n}" for a, n in axes.items() if int(n) > 1)
        words = f"{role}.parallel: {error.what} ({given})"
        near = nearest(spec, world_size, axes, device, vendor, facts, model_type)
        return RoleLayout(role, kind, spec.name, pool, world_size, None, (words,), (), near)
    fit = check_topology(spec, topology, device, vendor, model_type, facts)
    if not fit.problems:
        return RoleLayout(role, kind, spec.name, pool, world_size, topology, (), fit.notes)
    near = nearest(spec, world_size, axes, device, vendor, facts, model_type)
    problems = tuple(_words(role, spec, p, axes) for p in fit.problems)
    return RoleLayout(role, kind, spec.name, pool, world_size, topology, problems, fit.notes, near)


def _words(role: str, spec: BackendSpec, problem: AxisProblem, axes: Mapping[str, int]) -> str:
    if role == "rollout" and problem.axis == "dp_replicate" and int(axes.get("dp_replicate", 1)) == 1:
        # Nobody wrote it: it is what the pool's ranks come to.
        return f"{spec.name} does not run as {problem.size} replicas: {problem.reason}"
    return f"{role}.parallel.{problem.axis}={problem.size}: {problem.reason}"


def nearest(
    spec: BackendSpec,
    world_size: int,
    axes: Mapping[str, int],
    device: str,
    vendor: str | None,
    facts: ModelFacts,
    model_type: ModelType = ModelType.LANGUAGE_MODEL,
    limit: int = 3,
) -> tuple[str, ...]:
    """Valid sizes for ``world_size`` ranks, nearest to ``axes`` first (by the sum of the sizes' ratios, in octaves)."""
    wanted = {a: int(size) for a, size in axes.items() if a != "dp_shard" and int(size) > (0 if a == "sp" else 1)}
    shard = int(axes.get("dp_shard", -1))
    divisors = [n for n in range(1, min(world_size, 4096) + 1) if world_size % n == 0]
    choices: list[list[tuple[str, int]]] = []
    for axis, size in wanted.items():
        if axis != "sp":
            near = sorted({1, size, *divisors}, key=lambda n, s=size: abs(log2(n / s)))
            choices.append([(axis, n) for n in near[:_SIZES_AN_AXIS]])
    if "sp" in wanted or "tp" in wanted:
        choices.append([("sp", 0), ("sp", 1)])

    def distance(at: Mapping[str, int]) -> float:
        octaves = sum(abs(log2(n / wanted[a])) for a, n in at.items() if a != "sp")
        return octaves + _SWITCH * (at.get("sp", 0) != wanted.get("sp", 0))

    tried = sorted((dict(at) for at in product(*choices)), key=distance)
    found: list[str] = []
    for at in islice(tried, _MAX_TRIED):
        try:
            topology = factorise(spec.kind, world_size, at)
        except CapabilityError:
            continue
        if check_topology(spec, topology, device, vendor, model_type, facts).problems:
            continue
        on = {a: n for a, n in at.items() if a != "sp" or n}
        shown = {**on, **({"dp_shard": topology.dp_shard} if shard > 0 else {})}
        text = ", ".join(f"{a}={str(bool(n)).lower() if a == 'sp' else n}" for a, n in shown.items()) or "no axis set"
        if text not in found:
            found.append(text)
        if len(found) == limit:
            break
    return tuple(found)
