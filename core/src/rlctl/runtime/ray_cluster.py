"""The Ray cluster of a run: one of its own on this host, or one that exists; and places for ranks in it.

Ray is imported inside functions only. A process talks to one cluster at a time, so all pools of a run share a connection;
a cluster that was started here ends with the last of them.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.errors import CapabilityError
from rlctl.runtime import ray_connection, ray_host
from rlctl.runtime.ray_resources import Ask, Cluster, Holding, Node, busy, check_total

_CHUNK_S = 0.5
_SAY_AFTER_S = 2.0


@dataclass(frozen=True)
class Placement:
    """Places for the ranks of one pool.

    Args:
        group: Ray's placement group.
        bundles, nodes: by rank, its bundle and its node's id. Ranks of one node follow each other; the controller's node
            comes first, so that rank 0 sees the controller's files wherever that is possible.
    """

    pool: str
    group: Any
    bundles: tuple[int, ...]
    nodes: tuple[str, ...]

    def local(self, rank: int) -> tuple[int, int]:
        """(position of ``rank`` among the ranks of its node, number of these)."""
        there = [r for r, node in enumerate(self.nodes) if node == self.nodes[rank]]
        return there.index(rank), len(there)


class RayCluster:
    """A connection. Made by :func:`connect`; whoever got it calls :meth:`release` once.

    Args:
        own: it was started here, and ends here.
    """

    def __init__(self, address: str | None, *, own: bool, end: Callable[[], None]) -> None:
        self.address = address
        self.own = own
        self.users = 1
        self._end = end
        self._placements: dict[str, str] = {}

    def release(self) -> None:
        """This user needs it no more."""
        global _current
        with _lock:
            self.users -= 1
            if self.users or _current is not self:
                return
            _current = None
            self._end()

    # ---- places -----------------------------------------------------------------------------------------------
    def place(self, ask: Ask, timeout_s: float, notice: Callable[[str], None]) -> Placement:
        """Reserve places for the ranks of a pool.

        Args:
            timeout_s: longest wait for what the cluster has, but not free.
            notice: told when there is something to wait for.

        Raises:
            CapabilityError: the cluster has not what is asked for, or not free in time; says what is short and who has it.
        """
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        check_total(ask, self.view(), own=self.own)
        group = placement_group(
            [dict(ask.bundle)] * ask.ranks,
            strategy=ask.strategy,
            name=f"rlctl:{ask.pool}:{os.getpid()}:{secrets.token_hex(4)}",
        )
        try:
            self._wait(group, ask, timeout_s, notice)
            table: Mapping[str, Any] = placement_group_table(group)
        except BaseException:
            remove_placement_group(group)
            raise
        self._placements[group.id.hex()] = ask.pool
        at: Mapping[int, str] = table["bundles_to_node_id"]
        first = _own_node()
        order = sorted(at, key=lambda bundle: (at[bundle] != first, min(b for b in at if at[b] == at[bundle]), bundle))
        return Placement(ask.pool, group, tuple(order), tuple(at[bundle] for bundle in order))

    def _wait(self, group: Any, ask: Ask, timeout_s: float, notice: Callable[[str], None]) -> None:
        start = time.monotonic()
        said = False
        while not group.wait(_CHUNK_S):
            waited = time.monotonic() - start
            if waited >= timeout_s:
                raise busy(ask, self.view(), waited)
            if waited >= _SAY_AFTER_S and not said:
                said = True
                short = busy(ask, self.view(), 0.0)
                notice(
                    f"pool {ask.pool} waits up to {timeout_s:.0f} s for {ask.words()}: the cluster has {short.found}"
                )

    def remove(self, placement: Placement) -> None:
        """Give the places back."""
        from ray.util.placement_group import remove_placement_group

        self._placements.pop(placement.group.id.hex(), None)
        remove_placement_group(placement.group)

    def view(self) -> Cluster:
        """Nodes, and who has what in placement groups."""
        import ray
        from ray.util.placement_group import placement_group_table

        free = ray_connection.free_by_node()
        nodes = [
            Node(
                n["NodeID"],
                n["NodeManagerAddress"],
                n["Resources"],
                None if free is None else free.get(n["NodeID"], {}),
            )
            for n in ray.nodes()
            if n["Alive"]
        ]
        holdings: list[Holding] = []
        for key, entry in placement_group_table().items():
            if entry["state"] != "CREATED":
                continue
            by_node: dict[str, dict[str, float]] = {}
            for bundle, node in entry["bundles_to_node_id"].items():
                held = by_node.setdefault(node, {})
                for resource, amount in entry["bundles"][bundle].items():
                    held[resource] = held.get(resource, 0.0) + amount
            pool = self._placements.get(key)
            who = f"pool {pool} of this run" if pool is not None else f"placement group {entry['name'] or key}"
            holdings.append(Holding(who, by_node, ours=pool is not None))
        return Cluster(nodes, holdings)


_lock = threading.Lock()
_current: RayCluster | None = None


def connect(address: str | None) -> RayCluster:
    """A connection to the cluster at ``address``.

    Args:
        address: ``auto`` or ``HOST:PORT`` of a cluster that exists and that this host is part of; None for one of this
            run's own, on this host's loopback.

    Raises:
        CapabilityError: Ray is not installed, does not answer there, or is not the same version.
    """
    global _current
    if address is not None and address.startswith("ray://"):
        raise CapabilityError(
            "a run cannot be carried by Ray's client, which keeps its controller outside of the cluster",
            found=address,
            wanted="auto, or HOST:PORT of the cluster, on one of its machines",
            next="ray job submit --address http://HOST:8265 -- rlctl train ... --launcher ray --address auto",
        )
    if importlib.util.find_spec("ray") is None:
        raise CapabilityError(
            "launcher ray needs Ray, which is not installed",
            found="no package ray",
            wanted="ray>=2.50,<3",
            next="pip install 'rlctl-core[ray]', or --launcher process",
        )
    with _lock:
        if _current is None:
            _current = _open(address)
        elif _current.address != address:
            raise CapabilityError(
                "this process is connected to another Ray cluster",
                found=_current.address or "a cluster of its own",
                wanted=address or "a cluster of its own",
            )
        else:
            _current.users += 1
        return _current


def _open(address: str | None) -> RayCluster:
    import ray

    if ray.is_initialized():  # by whoever runs this as a library: not ours to end
        ray_host.quiet()
        return RayCluster(address, own=False, end=lambda: None)
    if address is None:
        return RayCluster(None, own=True, end=ray_connection.start())
    return RayCluster(address, own=False, end=ray_connection.join(address))


def _own_node() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()
