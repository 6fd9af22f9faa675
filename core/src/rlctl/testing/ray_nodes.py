"""A Ray cluster of several nodes that all are on this machine, in a process of its own, for tests.

::

    with simulated_nodes(2, cpus=2) as nodes:
        RayTransport(nodes.address, strategy="SPREAD")

It listens on the loopback. What it starts ends with the block, and with this process however that ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlctl.runtime import ray_sweep


@dataclass
class SimulatedNodes:
    """A running cluster.

    Args:
        address: to join it by.
        ids: of the nodes; the first is the head.
    """

    address: str
    ids: list[str]
    process: subprocess.Popen[str]

    def remove(self, index: int) -> None:
        """End a node as a power cut would."""
        assert index > 0, "the head keeps the cluster together"
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{index}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "gone\n"


@contextmanager
def simulated_nodes(count: int, cpus: float, **resources: float) -> Iterator[SimulatedNodes]:
    """Start ``count`` nodes, each with ``cpus`` CPUs and ``resources``; a ``GPU`` or ``NPU`` among them is believed."""
    parent = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
    directory = tempfile.mkdtemp(prefix="rlctl-ray-", dir=parent)
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": directory,
        # A node that is gone is noticed within seconds.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "3000",
        "RAY_health_check_failure_threshold": "3",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, directory, json.dumps([count, cpus, resources])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, **settings},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address, ids = json.loads(process.stdout.readline())
        yield SimulatedNodes(address, ids, process)
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()
        shutil.rmtree(directory, ignore_errors=True)


def main(directory: str, count: int, cpus: float, resources: dict[str, float]) -> None:
    """Hold the nodes until standard input ends; a number on a line ends that node."""
    from ray.cluster_utils import Cluster

    gpus = resources.pop("GPU", 0)
    common: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "resources": resources}
    cluster = Cluster(initialize_head=True, head_node_args={**common, "include_dashboard": False})
    nodes = [cluster.head_node, *(cluster.add_node(**common) for _ in range(count - 1))]
    try:
        print(json.dumps([cluster.address, [node.node_id for node in nodes]]), flush=True)
        for line in sys.stdin:
            cluster.remove_node(nodes[int(line)], allow_graceful=False)
            print("gone", flush=True)
    finally:
        cluster.shutdown()
        ray_sweep.sweep(directory, os.getppid())  # which has joined it, and so has files open there


if __name__ == "__main__":
    _count, _cpus, _resources = json.loads(sys.argv[2])
    main(sys.argv[1], _count, _cpus, _resources)
