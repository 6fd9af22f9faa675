"""Ranks on a Ray cluster of two nodes that was there before and is there afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import runtime_toys
from runtime_toys import ALLOWED, ToyWorker, all_gone, boots

from rlctl.errors import CapabilityError
from rlctl.runtime import ray_cluster
from rlctl.runtime.failures import WorkerError
from rlctl.runtime.group import Limits, WorkerGroup
from rlctl.runtime.ray_cluster import RayCluster
from rlctl.runtime.transports.ray import RayTransport
from rlctl.testing.ray_nodes import SimulatedNodes, simulated_nodes

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'rlctl-core[ray]'")


@pytest.fixture(scope="module")
def nodes() -> Iterator[SimulatedNodes]:
    with simulated_nodes(2, cpus=2, GPU=2, NPU=1) as found:
        yield found


@pytest.fixture
def cluster(nodes: SimulatedNodes) -> Iterator[RayCluster]:
    found = ray_cluster.connect(nodes.address)
    yield found
    found.release()
    assert nodes.process.poll() is None, "it was not ours to end"


def group_on(address: str, count: int, pool: str = "main", device: str = "cpu", **options: object) -> WorkerGroup:
    """A group that is not started yet."""
    transport = RayTransport(address, allowed=ALLOWED, worker="runtime_toys:ToyWorker", plugins=False, **options)
    ranks = [replace(boot, pool=pool, device=device) for boot in boots(count)]
    return WorkerGroup(pool, transport, ranks, ToyWorker, Limits(start_s=120, hang_s=60, grace_s=3, close_s=5))


def test_nobody_answers_at_an_address() -> None:
    begun = time.monotonic()
    with pytest.raises(CapabilityError, match=r"cannot join the Ray cluster at 127\.0\.0\.1:9") as caught:
        group_on("127.0.0.1:9", 1).start()
    assert time.monotonic() - begun < 5
    assert "ray start --head" in str(caught.value.next)


def test_another_version_of_ray_is_said_plainly(nodes: SimulatedNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.1.0")
    with pytest.raises(CapabilityError, match="cannot join") as caught:
        group_on(nodes.address, 1).start()
    assert "Ray: 2.1.0" in str(caught.value.found)
    assert f"Python: {sys.version.split()[0]}" in str(caught.value.found)
    assert caught.value.wanted == "the same Ray and Python versions as the cluster"


def test_ranks_spread_over_the_nodes_with_their_own_local_ranks(cluster: RayCluster, nodes: SimulatedNodes) -> None:
    group = group_on(nodes.address, 4, strategy="SPREAD")
    group.start()
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")
    found = [[e[name] for name in names] for e in group.call("environment", names)]
    assert found == [["0", "0", "2", "lo"], ["1", "1", "2", "lo"], ["2", "0", "2", "lo"], ["3", "1", "2", "lo"]]
    placement = group._transport._group.placement  # type: ignore[attr-defined]
    # Rank 0 sees the controller's files: its node comes first.
    here = ray.get_runtime_context().get_node_id()
    (other,) = set(nodes.ids) - {here}
    assert placement.nodes == (here, here, other, other)
    ranks = [h.pid for h in group.hellos]
    group.close()
    assert all_gone(ranks, 5.0) == []
    assert cluster.view().holdings == []
    assert free_cpus(cluster, 4.0) == 4.0


def test_a_rank_sees_its_own_accelerator_only(cluster: RayCluster, nodes: SimulatedNodes) -> None:
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
    found = {}
    for device, count in (("cuda", 3), ("npu", 2)):
        group = group_on(nodes.address, count, device=device, cpus_per_rank=0.5)
        group.start()
        found[device] = [[e[name] for name in names] for e in group.call("environment", names)]
        group.close()
    # What a rank sees is one device, and that is its number 0.
    assert [e[0] for e in found["cuda"]] == ["0", "0", "0"]
    assert sorted(e[1] for e in found["cuda"]) == ["1", "2", "2"]
    both = [e[2] for e in found["cuda"] if e[1] == "2"]
    assert sorted(map(str, both)) == ["0", "1"]
    assert [(e[0], e[3]) for e in found["npu"]] == [("0", "0"), ("0", "0")]


def free_cpus(cluster: RayCluster, wanted: float) -> float | None:
    """What is free, once it is ``wanted`` or after a while: the nodes report by and by."""
    deadline = time.monotonic() + 15
    while (found := cluster.view().free("CPU")) != wanted and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def test_one_node_is_too_small_for_a_strict_pack(cluster: RayCluster, nodes: SimulatedNodes) -> None:
    with pytest.raises(CapabilityError) as caught:
        group_on(nodes.address, 3, strategy="STRICT_PACK").start()
    assert caught.value.what == (
        "the Ray cluster has no room for pool main: 3 bundles of 1 CPU on one node asked, 2 fit"
    )
    assert str(caught.value.found).startswith("4 CPU on 2 of 2 nodes")
    assert "--nproc 2" in str(caught.value.next)
    assert "runtime.ray.strategy=PACK" in str(caught.value.next)


def test_what_other_pools_of_the_run_have_is_not_waited_for(cluster: RayCluster, nodes: SimulatedNodes) -> None:
    first = group_on(nodes.address, 3)
    first.start()
    begun = time.monotonic()
    try:
        with pytest.raises(CapabilityError, match="no room for pool gen: 2 bundles of 1 CPU asked, 1 fit") as caught:
            group_on(nodes.address, 2, "gen").start()
    finally:
        first.close()
    assert time.monotonic() - begun < 10
    assert "held: 3 CPU by pool main of this run" in caught.value.details
    assert "runtime.pools.gen.nproc=1" in str(caught.value.next)


OTHER = """
import sys
from rlctl.runtime import ray_cluster
from rlctl.runtime.ray_resources import Ask
cluster = ray_cluster.connect(sys.argv[1])
cluster.place(Ask("theirs", 3, {"CPU": 1.0}), 60, lambda text: None)
print("placed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(nodes: SimulatedNodes) -> Iterator[subprocess.Popen[str]]:
    """Another run that has three CPUs until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, nodes.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "placed\n"
    yield process
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def test_what_others_have_is_waited_for_and_then_named(
    cluster: RayCluster, nodes: SimulatedNodes, other: subprocess.Popen[str]
) -> None:
    notices: list[str] = []
    late = group_on(nodes.address, 2, placement_timeout_s=4.0, notice=notices.append)
    with pytest.raises(
        CapabilityError, match=r"no room for pool main within \d s: 2 bundles of 1 CPU asked, 1 fit"
    ) as caught:
        late.start()
    message = str(caught.value)
    assert f"held: 3 CPU by placement group rlctl:theirs:{other.pid}:" in message
    assert "4 CPU on 2 of 2 nodes, 1 free" in message
    assert "--nproc 1 fits now" in message
    assert len(notices) == 1
    assert notices[0].startswith("pool main waits up to 4 s for 2 bundles of 1 CPU: the cluster has 4 CPU")

    group = group_on(nodes.address, 2, placement_timeout_s=60.0, notice=lambda text: other.stdin.close())  # type: ignore[union-attr]
    group.start()
    assert other.wait(timeout=10) == 0
    group.close()


CONTROLLER = """
import sys
from test_runtime_ray_joined import group_on
group = group_on(sys.argv[1], 2)
group.start()
print(*(h.pid for h in group.hellos), *group.call("start_children", True), flush=True)
group.call("at", 1, "hang")
"""


def test_a_controller_that_is_killed_leaves_nothing_on_the_cluster(cluster: RayCluster, nodes: SimulatedNodes) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, nodes.address],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(runtime_toys.__file__).parent)},
    )
    assert process.stdout is not None
    pids = [int(n) for n in process.stdout.readline().split()]
    assert len(pids) == 4
    assert [h.who.split(":")[1] for h in cluster.view().holdings] == ["main"]
    time.sleep(0.5)
    process.kill()
    assert process.communicate(timeout=10) == ("", None)
    assert all_gone(pids, 20.0) == []
    assert free_cpus(cluster, 4.0) == 4.0
    assert cluster.view().holdings == []


def test_the_last_a_node_that_dies_ends_the_call(cluster: RayCluster, nodes: SimulatedNodes) -> None:
    """The last one here: the node stays dead."""
    if ray.get_runtime_context().get_node_id() == nodes.ids[1]:
        pytest.skip("Ray has attached this very process to the node that would die")
    group = group_on(nodes.address, 2, strategy="STRICT_SPREAD")
    group.start()
    begun = time.monotonic()
    killer = threading.Timer(2.5, nodes.remove, (1,))
    killer.start()
    with pytest.raises(WorkerError) as caught:
        group.call("at", 1, "hang")
    assert time.monotonic() - begun < 30
    killer.join()
    message = str(caught.value)
    assert "rank 1 of pool main died during backward (micro-batch 2 of 3: 1 row, 40 tokens" in message
    assert "its node is gone; Ray says: " in message
    assert all_gone([h.pid for h in group.hellos], 10.0) == []
