"""The Ray cluster of a run: one of its own on this host, or one that exists; and places for ranks in it.

Ray is imported inside functions only. A process talks to one cluster at a time, so all pools of a run share a connection;
a cluster that was started here ends with the last of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.errors import CapabilityError, RlctlError
from rlctl.runtime import ray_sweep
from rlctl.runtime.ray_resources import Ask, Cluster, Holding, Node, busy, check_total

NAMESPACE = "rlctl"
_OWN_CPUS = 1024
"""CPUs that a cluster of this run's own declares: there they limit nothing, as in the process transport."""
_REACH_S = 5.0
_CHUNK_S = 0.5
_SAY_AFTER_S = 2.0
_token = secrets.token_hex(32)  # one a process: Ray keeps the first one it reads


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

        free = _free_by_node()
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

    _quiet()
    if ray.is_initialized():  # by whoever runs this as a library: not ours to end
        return RayCluster(address, own=False, end=lambda: None)
    return _start() if address is None else _join(address)


def _join(address: str) -> RayCluster:
    import ray

    loopback = _is_on_loopback(address)
    try:
        with _signals_kept(), _addresses(loopback=loopback):
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray has no class of its own for what can go wrong here
        ray.shutdown()
        raise _not_joined(address, error) from error
    return RayCluster(address, own=False, end=ray.shutdown)


def _is_on_loopback(address: str) -> bool:
    """True for a cluster of this host that nothing but its loopback reaches.

    Fails at once where nothing listens: Ray itself would try for minutes. To a loopback address it would go by this host's
    other one, and try that for ever.
    """
    from ray._private import services

    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not port.isdigit():
        return False
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise _not_joined(address, error) from error
    if host != "localhost" and not host.startswith("127."):
        return False
    try:
        socket.create_connection((services.get_node_ip_address(), int(port)), timeout=_REACH_S).close()
    except OSError:
        return True
    return False


def _not_joined(address: str, error: BaseException) -> RlctlError:
    text = " ".join(str(error).split())
    if "ersion mismatch" in text:
        wanted, advice = (
            "the same Ray and Python versions as the cluster",
            "install what the cluster has, then try again",
        )
    elif "oken" in text and "uth" in text:
        wanted, advice = "the cluster's token", "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=FILE rlctl ..."
    else:
        wanted = "a running Ray cluster"
        advice = "ray start --head on its first machine; without an address the run starts a cluster of its own"
    return CapabilityError(f"cannot join the Ray cluster at {address}", found=text[:600], wanted=wanted, next=advice)


def _start() -> RayCluster:
    """A cluster on this host's loopback, with a directory and a token of its own, that nothing of survives this process."""
    import ray

    # Paths of Ray's sockets must be short. Nobody else reads what is in there.
    parent = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
    directory = tempfile.mkdtemp(prefix="rlctl-ray-", dir=parent)
    sweeper = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(ray_sweep.__file__)), directory, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert sweeper.stdin is not None, "it was asked for"
    pipe = sweeper.stdin

    def end() -> None:
        try:
            ray.shutdown()
        finally:
            _forget_token()
            pipe.close()
            sweeper.wait()

    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Where this is off, as it is by default on other systems than Linux, Ray takes the loopback as its address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Ray asks for a token by default, and would write one into the home directory.
        "RAY_AUTH_TOKEN": _token,
        # On a host that is busy with other things a worker takes its time; to start it anew makes that worse.
        "RAY_worker_register_timeout_seconds": "300",
        # With no GPU asked for, the ranks see those that the controller sees.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    try:
        with _variables(settings), _signals_kept(), _addresses(loopback=True):
            ray.init(
                address="local",
                namespace=NAMESPACE,
                num_cpus=max(_OWN_CPUS, os.cpu_count() or 1),
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=directory,
            )
    except BaseException as error:
        end()
        if not isinstance(error, Exception):
            raise
        raise CapabilityError(
            "a local Ray cluster could not be started",
            found=" ".join(str(error).split())[:600],
            wanted="Ray on this host",
            next="ray start --head shows what is wrong; --launcher process needs no Ray",
        ) from error
    return RayCluster(None, own=True, end=end)


def _forget_token() -> None:
    """Ray keeps to the token of the first cluster, for whichever this process joins next; versions without tokens do not."""
    from ray import _raylet

    inner: Any = _raylet
    with contextlib.suppress(AttributeError):
        inner.AuthenticationTokenLoader.instance().reset_cache()
        inner.Config.initialize("")  # by what is in the environment now


def _quiet() -> None:
    """What Ray prints about ranks that die, to stdout, is said by our own errors, and stdout may be one JSON object."""
    from ray._private import worker

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    worker._worker_logs_enabled = False


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for as long as this lasts; what the user has set stays, and what Ray sets meanwhile goes."""
    before = set(os.environ)
    os.environ.update({name: value for name, value in values.items() if name not in before})
    try:
        yield
    finally:
        for name in [n for n in os.environ if n not in before and n.startswith("RAY_")]:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _addresses(*, loopback: bool) -> Iterator[None]:
    """With ``loopback``, Ray takes 127.0.0.1 for this host's address as long as this lasts."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER  # read from the environment when Ray was imported
    ray_constants.ENABLE_RAY_CLUSTER = before and not loopback
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """``ray.init`` puts a handler of its own on SIGTERM; how a run is stopped is not for it to say."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


def _own_node() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def _free_by_node() -> Mapping[str, Mapping[str, float]] | None:
    """Node id -> what is free there; None where only the totals can be had (Ray's client mode)."""
    from ray._private import state

    try:
        return state.available_resources_per_node()
    except Exception:  # Ray has no public way to ask for this, and no class of error for not having it
        return None
