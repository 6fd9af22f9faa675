"""What a pool asks of a Ray cluster, whether the cluster has it, and the words for what is short. Pure Python, no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlctl.errors import CapabilityError

ACCELERATORS: Mapping[str, str] = {"cuda": "GPU", "npu": "NPU"}
"""Device type -> the resource by which Ray counts it."""
STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")
_TINY = 1e-6  # Ray counts in steps of 1e-4


@dataclass(frozen=True)
class Ask:
    """One bundle a rank.

    Args:
        bundle: resource -> amount of one rank.
        strategy: one of :data:`STRATEGIES`.
    """

    pool: str
    ranks: int
    bundle: Mapping[str, float]
    strategy: str = "PACK"

    def words(self) -> str:
        """``4 bundles of 1 GPU and 1 CPU``."""
        inner = " and ".join(f"{amount:g} {resource}" for resource, amount in self.bundle.items())
        return f"{self.ranks} {'bundle' if self.ranks == 1 else 'bundles'} of {inner}"


@dataclass(frozen=True)
class Node:
    """One living node.

    Args:
        name: its address.
        total, free: resource -> amount; ``free`` None where it cannot be read.
    """

    id: str
    name: str
    total: Mapping[str, float]
    free: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Holding:
    """What somebody has set aside.

    Args:
        who: ``placement group train``, ``pool main of this run``.
        by_node: node id -> resource -> amount.
        ours: it belongs to this run, and so does not become free by waiting.
    """

    who: str
    by_node: Mapping[str, Mapping[str, float]]
    ours: bool = False

    def amount(self, resource: str) -> float:
        return sum(held.get(resource, 0.0) for held in self.by_node.values())


@dataclass(frozen=True)
class Cluster:
    """A cluster as it is now."""

    nodes: Sequence[Node]
    holdings: Sequence[Holding] = field(default_factory=tuple)

    def total(self, resource: str) -> float:
        return sum(node.total.get(resource, 0.0) for node in self.nodes)

    def free(self, resource: str) -> float | None:
        found = [node.free.get(resource, 0.0) for node in self.nodes if node.free is not None]
        return sum(found) if len(found) == len(self.nodes) else None


def bundle_for(device: str, cpus: float) -> dict[str, float]:
    """The resources of one rank: its accelerator, and CPUs.

    Raises:
        CapabilityError: Ray does not count devices of this type.
    """
    if device == "cpu":
        return {"CPU": cpus}
    if device not in ACCELERATORS:
        raise CapabilityError(
            f"ranks on {device} devices cannot be placed by Ray",
            found=device,
            wanted="cpu, " + ", ".join(ACCELERATORS),
            next="--launcher process",
        )
    return {ACCELERATORS[device]: 1.0, "CPU": cpus}


def room(ask: Ask, amounts: Sequence[Mapping[str, float]]) -> int:
    """How many bundles of ``ask`` fit, under its strategy, into nodes that have ``amounts``."""
    fits = [
        min((int(have.get(resource, 0.0) / need + _TINY) for resource, need in ask.bundle.items() if need), default=0)
        for have in amounts
    ]
    if ask.strategy == "STRICT_PACK":
        return max(fits, default=0)
    if ask.strategy == "STRICT_SPREAD":
        return sum(1 for n in fits if n)
    return sum(fits)


def check_total(ask: Ask, cluster: Cluster, *, own: bool) -> None:
    """Refuse what this cluster cannot hold however long one waits: its nodes are too few or too small, or other pools of
    this run have the rest.

    Args:
        own: the cluster was started by this run on this host.

    Raises:
        CapabilityError: says what is short, and where.
    """
    ours = [h for h in cluster.holdings if h.ours]
    left = [
        {r: amount - sum(h.by_node.get(node.id, {}).get(r, 0.0) for h in ours) for r, amount in node.total.items()}
        for node in cluster.nodes
    ]
    fits = room(ask, left)
    if fits < ask.ranks:
        raise _shortage(ask, cluster, fits, _more(ask, fits, own))


def busy(ask: Ask, cluster: Cluster, waited_s: float) -> CapabilityError:
    """The error for a cluster that has what is asked for, but did not have it free within ``waited_s``."""
    amounts = [node.total if node.free is None else node.free for node in cluster.nodes]
    fits = min(room(ask, amounts), ask.ranks)
    advice = "ray status shows who has what; runtime.ray.placement_timeout_s sets the limit"
    if 0 < fits < ask.ranks:
        advice = f"{_fewer(ask, fits)} fits now; {advice}"
    return _shortage(ask, cluster, fits, advice, waited_s)


def _shortage(ask: Ask, cluster: Cluster, fits: int, advice: str, waited_s: float | None = None) -> CapabilityError:
    waited = "" if waited_s is None else f" within {waited_s:.0f} s"
    how = {
        "STRICT_PACK": " on one node",
        "STRICT_SPREAD": ", each on a node of its own",
    }.get(ask.strategy, "")
    return CapabilityError(
        f"the Ray cluster has no room for pool {ask.pool}{waited}: {ask.words()}{how} asked, {fits} fit",
        found=_has(ask, cluster),
        wanted=f"{ask.words()} ({ask.strategy})",
        next=advice,
        details=[*(_node_line(ask, node) for node in cluster.nodes), *_held_lines(ask, cluster)],
    )


def _has(ask: Ask, cluster: Cluster) -> str:
    """``2 GPU on 1 node, 0 free; 32 CPU on 1 node, 30 free``."""
    pieces: list[str] = []
    for resource in ask.bundle:
        having = sum(1 for node in cluster.nodes if node.total.get(resource))
        free = cluster.free(resource)
        pieces.append(
            f"{cluster.total(resource):g} {resource} on {having} of {_nodes(len(cluster.nodes))}"
            + (f", {free:g} free" if free is not None else "")
        )
    return "; ".join(pieces)


def _nodes(count: int) -> str:
    return f"{count} {'node' if count == 1 else 'nodes'}"


def _node_line(ask: Ask, node: Node) -> str:
    """``node 10.0.0.5: 2 GPU (0 free), 32 CPU (30 free)``."""
    pieces: list[str] = []
    for resource in ask.bundle:
        free = "" if node.free is None else f" ({node.free.get(resource, 0.0):g} free)"
        pieces.append(f"{node.total.get(resource, 0.0):g} {resource}{free}")
    return f"node {node.name}: {', '.join(pieces)}"


def _held_lines(ask: Ask, cluster: Cluster) -> list[str]:
    """``held: 2 GPU by pool rollout of this run``, the scarcest resource only; what no placement group explains last."""
    resource = next(iter(ask.bundle))
    held = [(h.who, h.amount(resource)) for h in cluster.holdings]
    free = cluster.free(resource)
    if free is not None:
        rest = cluster.total(resource) - free - sum(amount for _, amount in held)
        held.append(("tasks and actors outside of placement groups", rest))
    return [f"held: {amount:g} {resource} by {who}" for who, amount in held if amount > _TINY]


def _fewer(ask: Ask, ranks: int) -> str:
    return f"--nproc {ranks}" if ask.pool == "main" else f"runtime.pools.{ask.pool}.nproc={ranks}"


def _more(ask: Ask, fits: int, own: bool) -> str:
    """What to do when waiting does not help."""
    choices: list[str] = []
    if fits:
        choices.append(_fewer(ask, fits))
    if ask.strategy.startswith("STRICT_"):
        choices.append(f"runtime.ray.strategy={ask.strategy.removeprefix('STRICT_')}")
    if own:
        choices.append("runtime.ray.address of a larger cluster")
    else:
        choices.append("more nodes (ray start --address=HOST:PORT on each)")
    if any(resource in ask.bundle for resource in ACCELERATORS.values()) and not fits:
        choices.append("trainer.device=cpu")
    return ", or ".join(choices)
