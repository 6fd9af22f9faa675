"""What fits into a cluster, and the words for what does not. No Ray."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.errors import CapabilityError
from rlctl.runtime.ray_cluster import connect
from rlctl.runtime.ray_resources import STRATEGIES, Ask, Cluster, Holding, Node, bundle_for, busy, check_total, room
from rlctl.runtime.transports.ray_deaths import death_of

GPU = {"GPU": 1.0, "CPU": 1.0}


def nodes(*amounts: Mapping[str, float], free: Sequence[Mapping[str, float]] | None = None) -> list[Node]:
    given_free = [None] * len(amounts) if free is None else free
    return [Node(f"n{i}", f"10.0.0.{i}", a, f) for i, (a, f) in enumerate(zip(amounts, given_free, strict=True))]


def test_the_bundle_of_a_rank() -> None:
    assert bundle_for("cuda", 4.0) == {"GPU": 1.0, "CPU": 4.0}
    assert bundle_for("npu", 1.0) == {"NPU": 1.0, "CPU": 1.0}
    assert bundle_for("cpu", 2.0) == {"CPU": 2.0}
    with pytest.raises(CapabilityError, match="mps devices cannot be placed by Ray"):
        bundle_for("mps", 1.0)


@pytest.mark.parametrize(("strategy", "fits"), [("PACK", 5), ("SPREAD", 5), ("STRICT_PACK", 3), ("STRICT_SPREAD", 2)])
def test_room_under_each_strategy(strategy: str, fits: int) -> None:
    # The third node has no GPU; the second has CPUs for two ranks only, though four GPUs.
    have = [{"GPU": 3.0, "CPU": 64.0}, {"GPU": 4.0, "CPU": 2.0}, {"CPU": 64.0}]
    assert room(Ask("main", 9, GPU, strategy), have) == fits


def test_parts_of_one_cpu_do_not_add_up_over_nodes() -> None:
    assert room(Ask("main", 2, {"CPU": 1.5}), [{"CPU": 2.0}, {"CPU": 1.0}]) == 1
    assert room(Ask("main", 2, {"CPU": 0.1}), [{"CPU": 0.3}]) == 3
    assert room(Ask("main", 1, GPU), []) == 0


@given(
    st.lists(st.fixed_dictionaries({"GPU": st.integers(0, 8), "CPU": st.integers(0, 8)}), max_size=5),
    st.integers(1, 4),
    st.sampled_from(STRATEGIES),
)
def test_room_is_what_placing_one_by_one_finds(have: list[dict[str, int]], cpus: int, strategy: str) -> None:
    """By trying: the strict strategies on each node by itself, or on each node once."""
    left = [dict(h) for h in have]
    per_node = []
    for node in left:
        count = 0
        while node["GPU"] >= 1 and node["CPU"] >= cpus:
            node["GPU"] -= 1
            node["CPU"] -= cpus
            count += 1
        per_node.append(count)
    wanted = {
        "STRICT_PACK": max(per_node, default=0),
        "STRICT_SPREAD": sum(n > 0 for n in per_node),
    }.get(strategy, sum(per_node))
    assert room(Ask("main", 99, {"GPU": 1.0, "CPU": float(cpus)}, strategy), have) == wanted


def test_a_cluster_that_is_too_small_is_refused_in_plain_words() -> None:
    cluster = Cluster(
        nodes({"GPU": 2.0, "CPU": 32.0}, {"CPU": 8.0}, free=[{"CPU": 30.0}, {"CPU": 8.0}]),
        [Holding("placement group train", {"n0": {"GPU": 2.0, "CPU": 2.0}})],
    )
    with pytest.raises(CapabilityError) as caught:
        check_total(Ask("main", 4, GPU), cluster, own=False)
    assert str(caught.value).splitlines() == [
        "the Ray cluster has no room for pool main: 4 bundles of 1 GPU and 1 CPU asked, 2 fit",
        "  node 10.0.0.0: 2 GPU (0 free), 32 CPU (30 free)",
        "  node 10.0.0.1: 0 GPU (0 free), 8 CPU (8 free)",
        "  held: 2 GPU by placement group train",
        "  found:   2 GPU on 1 of 2 nodes, 0 free; 40 CPU on 2 of 2 nodes, 38 free",
        "  wanted:  4 bundles of 1 GPU and 1 CPU (PACK)",
        "  next:    --nproc 2, or more nodes (ray start --address=HOST:PORT on each)",
    ]
    check_total(Ask("main", 2, GPU), cluster, own=False)  # it is only busy


def test_other_pools_of_the_run_count_as_taken() -> None:
    ours = Holding("pool main of this run", {"n0": {"GPU": 3.0, "CPU": 3.0}}, ours=True)
    cluster = Cluster(nodes({"GPU": 4.0, "CPU": 32.0}), [ours])
    check_total(Ask("gen", 1, GPU), cluster, own=True)
    with pytest.raises(CapabilityError) as caught:
        check_total(Ask("gen", 2, GPU), cluster, own=True)
    assert caught.value.details[-1] == "held: 3 GPU by pool main of this run"
    assert caught.value.next == "runtime.pools.gen.nproc=1, or runtime.ray.address of a larger cluster"


def test_an_absent_accelerator_has_a_way_out() -> None:
    with pytest.raises(CapabilityError) as caught:
        check_total(Ask("main", 2, GPU), Cluster(nodes({"CPU": 8.0})), own=True)
    assert caught.value.found == "0 GPU on 0 of 1 node; 8 CPU on 1 of 1 node"
    assert str(caught.value.next).endswith("or trainer.device=cpu")


def test_what_no_placement_group_explains_is_said_to_be_others() -> None:
    cluster = Cluster(nodes({"GPU": 4.0, "CPU": 8.0}, free=[{"GPU": 1.0, "CPU": 8.0}]))
    error = busy(Ask("main", 2, GPU), cluster, 30.0)
    assert error.what == (
        "the Ray cluster has no room for pool main within 30 s: 2 bundles of 1 GPU and 1 CPU asked, 1 fit"
    )
    assert error.details[-1] == "held: 3 GPU by tasks and actors outside of placement groups"
    assert str(error.next).startswith("--nproc 1 fits now; ray status shows")


TEXTS = {
    "its Ray actor is gone: its process ended without a word, as one that SIGKILL ended": (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: RankActor\n\tpid: 756\nThe actor is dead "
        "because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits "
        "with a connection error code 2. End of file. Some common causes include: (1) the process was killed by the OOM "
        "killer due to high memory usage, (2) ray stop --force was called"
    ),
    "Ray ended it for want of memory on its node: Memory on the node (IP: 10.0.0.1, ID: 2362) was 22.7GB used": (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: 2362) was "
        "22.7GB used\nTop 10 memory users: PID\tMEM(GB)\tCOMMAND\nRefer to the documentation on how to"
    ),
    "its node is gone; Ray says: the actor's node was terminated unexpectedly": (
        "The actor died unexpectedly. pid: 7\nThe actor died because its node has died. Node Id: 6e191a2f the actor's node "
        "was terminated unexpectedly"
    ),
    "its Ray actor could not be made: ModuleNotFoundError: No module named 'rlctl'": (
        "The actor died because of an error raised in its creation task, \x1b[36mray::main/0:RankActor.__init__()\x1b[39m\n"
        "  File \"x.py\", line 3\nModuleNotFoundError: No module named 'rlctl'\n"
    ),
}


@pytest.mark.parametrize("cause", TEXTS)
def test_what_ray_says_of_a_death_in_few_words(cause: str) -> None:
    death = death_of(3, RuntimeError(TEXTS[cause]), None, node_lives=True)
    assert (death.rank, death.cause) == (3, cause)
    assert "\x1b" not in death.output
    assert "Refer to" not in death.output


def test_an_actor_on_a_node_that_does_not_answer_is_gone_with_it() -> None:
    assert death_of(0, RuntimeError("Socket closed"), None, node_lives=False).cause == (
        "its node is gone; Ray says: Socket closed"
    )


def test_rays_client_is_refused_with_the_way_to_go() -> None:
    with pytest.raises(CapabilityError, match="cannot be carried by Ray's client") as caught:
        connect("ray://10.0.0.1:10001")
    assert "ray job submit" in str(caught.value.next)


def test_the_transport_imports_no_ray_until_it_starts() -> None:
    code = (
        "import sys, rlctl.runtime.transports.ray as t; t.RayTransport('auto');"
        "sys.exit(any(n == 'ray' or n.startswith('ray.') or n == 'torch' for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
