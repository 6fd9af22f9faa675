"""Ranks as Ray actors on a cluster of this run's own: what travels, where they live, how they end, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import runtime_toys
import torch
from runtime_toys import ALLOWED, BrokenAtStart, Double, ToyWorker, all_gone, boots, gone

from rlctl.errors import CapabilityError, UsageError
from rlctl.runtime import ray_cluster, ray_sweep
from rlctl.runtime.failures import WorkerError
from rlctl.runtime.group import Limits, WorkerGroup
from rlctl.runtime.ray_cluster import RayCluster
from rlctl.runtime.records import Boot
from rlctl.runtime.transports.ray import RayTransport

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'rlctl-core[ray]'")


def overheard(signum: int, frame: object) -> None:
    """A handler that only has to stay where it was."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """One for all: it lives while somebody is connected."""
    before = signal.signal(signal.SIGTERM, overheard)
    found = ray_cluster.connect(None)
    kept = signal.signal(signal.SIGTERM, before)
    assert kept is overheard
    directory = Path(ray.get_runtime_context().gcs_address and _directory())
    assert directory.is_dir()
    yield found
    found.release()
    assert not directory.exists()
    assert ray_sweep.users_of(str(directory), (os.getpid(),)) == []
    assert not ray.is_initialized()


def _directory() -> str:
    """The cluster's own directory."""
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    return str(session.parent)


def ray_group(count: int = 2, worker: type = ToyWorker, limits: Limits | None = None, **options: object) -> WorkerGroup:
    """A group of actors that is not started yet."""
    transport = RayTransport(
        None, allowed=ALLOWED, worker=f"{worker.__module__}:{worker.__qualname__}", plugins=False, **options
    )
    limits = limits or Limits(start_s=60, hang_s=60, grace_s=3, close_s=5)
    return WorkerGroup("main", transport, boots(count), worker, limits)


@pytest.fixture(scope="module")
def group(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLCTL_TOY", "prefix")
        made = ray_group(2, log_dir=tmp_path_factory.mktemp("logs"), env={"TOY_VARIABLE": "here"})
        made.start()
    # Before any tensor has travelled: neither carries calls.
    assert made.call("imported", "torch") == made.call("imported", "ray") == [False, False]
    yield made
    made.close()


def test_the_cluster_listens_on_the_loopback_only(group: WorkerGroup) -> None:
    users = {*ray_sweep.users_of(_directory(), ()), *(h.pid for h in group.hellos)}
    assert len(users) > 5
    listening = _listening(users)
    assert listening
    assert {address for address in listening if not address.startswith("127.")} == set()


def _listening(pids: set[int]) -> set[str]:
    """Addresses on which these processes listen, from /proc."""
    inodes: set[str] = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd) if fd.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                last = bytes.fromhex(fields[1].partition(":")[0])[-4:][::-1]
                found.add(".".join(map(str, last)))
    return found


def test_a_rank_is_a_process_under_its_actor(group: WorkerGroup) -> None:
    assert [h.rank for h in group.hellos] == [0, 1]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TOY_VARIABLE", "RLCTL_TOY", "OMP_NUM_THREADS")
    first, second = group.call("environment", names)
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert (second["LOCAL_RANK"], second["WORLD_SIZE"], second["LOCAL_WORLD_SIZE"]) == ("1", "2", "2")
    assert (first["TOY_VARIABLE"], first["RLCTL_TOY"]) == ("here", "prefix")
    # The host's cores shared, as with processes; Ray's own share for an actor would be one.
    cores = len(os.sched_getaffinity(0))
    assert first["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", str(max(1, cores // 2)))
    assert first["sid"] == first["pid"] == str(group.hellos[0].pid)
    assert group.call("first") == 0


@pytest.mark.parametrize("size", [0, 10, 70_000, 5_000_000])
def test_tensors_travel_to_ray_ranks_and_back(group: WorkerGroup, size: int) -> None:
    sent = {"a": torch.arange(size), "b": (torch.ones(3, dtype=torch.bfloat16), [1.5, float("nan")])}
    for got in group.call("echo", sent):
        assert torch.equal(got["a"], sent["a"])
        assert torch.equal(got["b"][0], sent["b"][0])
        got["a"][:1] = 7  # a copy of one's own
    assert size == 0 or sent["a"][0] == 0
    assert group.call("apply", Double(5), 4) == [20, 20]


def test_what_several_ranks_get_is_put_once(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[int] = []
    real = ray.put

    def counted(value: object) -> object:
        put.append(value[0])  # type: ignore[index]
        return real(value)

    monkeypatch.setattr(ray, "put", counted)
    group.call("echo", torch.zeros(100_000))
    assert len(put) == 1
    assert 400_000 <= put[0] < 401_000
    group.call("echo", 1)  # a small one goes with the call
    assert len(put) == 1


def test_events_of_ray_ranks_arrive_in_order_and_before_the_answer(group: WorkerGroup) -> None:
    heard: list[int] = []
    answers = group._run("talk", [(200,), (0,)], doing="talk", on_event=heard.append)
    assert answers == [200, 0]
    assert heard == list(range(200))


def test_what_a_ray_rank_prints_is_in_its_log(group: WorkerGroup) -> None:
    logs = group._transport._log_dir  # type: ignore[attr-defined]
    for rank in (0, 1):
        assert f"hello from rank {rank}" in (logs / f"rank_{rank}.log").read_text()


ENDS = {
    "kill": ["rank 1 of pool main died during backward (micro-batch 2 of 3: 1 row, 40 tokens", "killed by SIGKILL"],
    "interrupt": ["rank 1 of pool main failed during backward", "KeyboardInterrupt"],
    "hold": ["rank 1 of pool main hang", "stack of rank 1", "in at", "backward (micro-batch 2 of 3"],
}


@pytest.mark.parametrize("what", ENDS)
def test_the_end_of_a_ray_rank_is_told(what: str, cluster: RayCluster, capfd: pytest.CaptureFixture[str]) -> None:
    held = len(cluster.view().holdings)
    group = ray_group(2, limits=Limits(start_s=60, hang_s=3, grace_s=3, close_s=5))
    group.start()
    assert len(cluster.view().holdings) == held + 1
    children = group.call("start_children", False) + group.call("start_children", True)
    begun = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.call("at", 1, what)
    assert time.monotonic() - begun < 30
    message = str(caught.value)
    assert [words for words in ENDS[what] if words not in message] == [], message
    assert group.closed
    assert all_gone([*(h.pid for h in group.hellos), *children], 5.0) == []
    assert len(cluster.view().holdings) == held
    # Nothing of Ray's own about it: stdout may be one JSON object.
    assert capfd.readouterr().out == ""


def test_an_actor_that_is_killed_takes_its_rank_along(cluster: RayCluster) -> None:
    group = ray_group(2)
    group.start()
    children = group.call("start_children", False) + group.call("start_children", True)
    actor = int(Path(f"/proc/{group.hellos[1].pid}/stat").read_text().rpartition(")")[2].split()[1])
    subprocess.Popen(["sh", "-c", f"sleep 2; kill -9 {actor}"])
    with pytest.raises(WorkerError) as caught:
        group.call("at", 1, "hang")
    message = str(caught.value)
    assert "rank 1 of pool main died during backward" in message
    assert "its Ray actor is gone: its process ended without a word, as one that SIGKILL ended" in message
    assert all_gone([*(h.pid for h in group.hellos), *children], 5.0) == []


def test_an_error_at_the_start_of_a_ray_rank_is_its_own(cluster: RayCluster) -> None:
    held = len(cluster.view().holdings)
    group = ray_group(2, BrokenAtStart)
    with pytest.raises(UsageError, match="rank 1 cannot start"):
        group.start()
    assert len(cluster.view().holdings) == held


def test_what_the_cluster_has_not_is_said_at_once(cluster: RayCluster) -> None:
    held = len(cluster.view().holdings)
    transport = RayTransport(None, worker="runtime_toys:ToyWorker", plugins=False)
    group = WorkerGroup("main", transport, [Boot(rank=i, world_size=4, device="npu") for i in range(4)], ToyWorker)
    begun = time.monotonic()
    with pytest.raises(CapabilityError) as caught:
        group.start()
    assert time.monotonic() - begun < 5
    assert caught.value.what == ("the Ray cluster has no room for pool main: 4 bundles of 1 NPU and 1 CPU asked, 0 fit")
    assert str(caught.value.found).startswith("0 NPU on 0 of 1 node, 0 free; ")
    assert "trainer.device=cpu" in str(caught.value.next)
    assert len(cluster.view().holdings) == held


CONTROLLER = """
from rlctl.runtime import ray_cluster
from test_runtime_ray_ranks import _directory, ray_group

cluster = ray_cluster.connect(None)
for _ in range(2):
    group = ray_group(2)
    group.start()
    children = group.call("start_children", False) + group.call("start_children", True)
    print(_directory(), *(h.pid for h in group.hellos), *children, flush=True)
    try:
        group.call("at", 1, "hang")
    except KeyboardInterrupt:
        print(len(cluster.view().holdings), flush=True)
"""


def test_a_controller_that_is_ended_leaves_no_ray() -> None:
    """Ctrl-C ends the ranks and what they started, and leaves the cluster to its other users; SIGKILL ends all of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(runtime_toys.__file__).parent)},
        start_new_session=True,
    )
    assert process.stdout is not None
    directory, first = _said(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.stdout.readline() == "0\n"
    assert all_gone(first, 5.0) == []
    directory, second = _said(process.stdout.readline())
    process.kill()
    deadline = time.monotonic() + 15
    while (ray_sweep.users_of(directory, ()) or Path(directory).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray_sweep.users_of(directory, ()) == []
    assert not Path(directory).exists()
    assert all_gone(second, 5.0) == []
    assert process.communicate(timeout=20) == ("", "")


def _said(line: str) -> tuple[str, list[int]]:
    """The cluster's directory, and ranks and children in the middle of a call."""
    directory, *numbers = line.split()
    pids = [int(n) for n in numbers]
    assert len(pids) == 6
    assert len(ray_sweep.users_of(directory, ())) > 5
    time.sleep(0.5)  # into the call
    assert [p for p in pids if gone(p)] == []
    return directory, pids
