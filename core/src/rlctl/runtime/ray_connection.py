"""Reaching a Ray cluster: joining one that exists, or starting one for this run alone. Ray is imported inside functions.

Where Ray has no public way, its private parts are touched here and in :mod:`rlctl.runtime.ray_host` only: which address it
takes for this host's, the mode and token it keeps from its first cluster, what is free on a node, and what it prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlctl.errors import CapabilityError, RlctlError
from rlctl.runtime import ray_host, ray_sweep

NAMESPACE = "rlctl"
_REACH_S = 5.0
_OWN_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Where this is off, as it is by default on other systems than Linux, Ray takes the loopback as its address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # On a host that is busy with other things a worker takes its time; to start it anew makes that worse.
    "RAY_worker_register_timeout_seconds": "300",
    # With no GPU asked for, the ranks see those that the controller sees.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Environment of a cluster of this run's own, where the user says nothing else."""


def join(address: str) -> Callable[[], None]:
    """Join the cluster at ``address``; returns what leaves it.

    Raises:
        CapabilityError: it does not answer, or is not the same version.
    """
    import ray

    ray_host.quiet()
    _connect(address, loopback=_is_on_loopback(address))
    return ray.shutdown


def _connect(address: str, *, loopback: bool) -> None:
    import ray

    try:
        with _signals_kept(), _addresses(loopback=loopback):
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray has no class of its own for what can go wrong here
        ray.shutdown()
        raise _not_joined(address, error) from error


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


def start() -> Callable[[], None]:
    """Start a cluster on this host's loopback, with a directory and a token of its own; returns what ends it. Nothing of it
    survives this process, however that ends.

    Raises:
        CapabilityError: it does not start.
    """
    import ray

    ray_host.quiet()
    # Paths of Ray's sockets must be short. Nobody else reads what is in there.
    parent = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
    directory = tempfile.mkdtemp(prefix="rlctl-ray-", dir=parent)
    given = {name: value for name, value in _OWN_SETTINGS.items() if name not in os.environ}
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    host = subprocess.Popen(
        [sys.executable, "-P", "-m", ray_host.__name__, directory, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, **given, **own, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )

    def end() -> None:
        try:
            ray.shutdown()
        finally:
            assert host.stdin is not None, "it was asked for"
            host.stdin.close()
            host.wait()
            _read_settings()

    try:
        assert host.stdout is not None, "it was asked for"
        with host.stdout:
            said: dict[str, str] = json.loads(host.stdout.readline() or "{}")
        if "address" not in said:
            raise CapabilityError(
                "a local Ray cluster could not be started",
                found=said.get("error", "its process ended")[:600],
                wanted="Ray on this host",
                next="ray start --head shows what is wrong; --launcher process needs no Ray",
            )
        with _variables(own):
            _read_settings()
            _connect(said["address"], loopback=True)
    except BaseException:
        host.kill()  # it may be in the middle of starting; the system ends with it what it has started
        end()
        ray_sweep.sweep(directory, os.getpid())
        raise
    return end


def _read_settings() -> None:
    """Ray keeps to the mode and token of its first cluster; now it goes by the environment again. Old versions have none."""
    from ray import _raylet

    inner: Any = _raylet
    with contextlib.suppress(AttributeError):
        inner.AuthenticationTokenLoader.instance().reset_cache()
        inner.Config.initialize("")


def free_by_node() -> Mapping[str, Mapping[str, float]] | None:
    """Node id -> what is free there; None where this version does not say."""
    from ray._private import state

    try:
        return state.available_resources_per_node()
    except AttributeError:
        return None


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for as long as this lasts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
