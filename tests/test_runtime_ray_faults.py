"""One of two real ranks fails in every phase of a step, as Ray actors: the same end as in processes, and nothing left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from runtime_fault_cases import CASES, run_case

from rlctl.runtime import ray_cluster
from rlctl.runtime.ray_cluster import RayCluster
from rlctl.runtime.transports.base import Transport
from rlctl.runtime.transports.ray import RayTransport

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'rlctl-core[ray]'")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """One for all cases: it lives while somebody is connected."""
    found = ray_cluster.connect(None)
    yield found
    found.release()


# Running out of memory is the rank's own to tell, and a rank is the same process under either transport; a rank of Ray
# that hangs is in test_runtime_ray_ranks.py.
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("killed")])
def test_a_fault_of_a_ray_rank_ends_the_call_clearly(name: str, cluster: RayCluster, tmp_path: Path) -> None:
    def transport(env: Mapping[str, str]) -> Transport:
        return RayTransport(None, log_dir=tmp_path / "logs", env=env)

    error = run_case(CASES[name], transport, tmp_path)
    print(error)
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert cluster.view().holdings == []
