"""Groups of one process: shared by engines of one layout, refused for another, gone with the last of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rlctl.errors import CapabilityError
from rlctl.topology import resolve
from rlctl_megatron.standins import prepare

prepare("cpu")

from megatron.core import parallel_state  # noqa: E402

from rlctl_megatron import mesh  # noqa: E402

SETTINGS = {"device": "cpu"}


@pytest.fixture
def world() -> Iterator[None]:
    """A process group that is not the engine's own."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_groups_go_with_the_last_engine(world: None) -> None:
    _, first = mesh.settle(resolve(1, {}), SETTINGS, 60)
    _, second = mesh.settle(resolve(1, {}), SETTINGS, 60)
    mesh.leave(first)
    assert parallel_state.model_parallel_is_initialized()
    mesh.leave(second)
    assert not parallel_state.model_parallel_is_initialized()
    assert dist.is_initialized()  # it was there before


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted where the system lists them")
def test_engines_one_after_another_leave_no_threads(world: None) -> None:
    """megatron-core itself only forgets its groups: some fifty threads a layout."""
    counts = []
    for _ in range(3):
        _, place = mesh.settle(resolve(1, {}), SETTINGS, 60)
        during = num_threads()
        mesh.leave(place)
        counts.append((during, num_threads()))
    assert counts[0][0] > counts[0][1] + 20
    assert counts[2][1] <= counts[0][1]


def test_two_layouts_in_one_process_are_refused(world: None) -> None:
    _, place = mesh.settle(resolve(1, {}), SETTINGS, 60)
    try:
        with pytest.raises(CapabilityError, match="one layout of ranks in a process"):
            mesh.settle(resolve(1, {"sp": 1}), SETTINGS, 60)
    finally:
        mesh.leave(place)


def test_another_axis_or_device_is_refused() -> None:
    with pytest.raises(CapabilityError, match="splits work along"):
        mesh.settle(resolve(2, {"usp": 2}), SETTINGS, 60)
    with pytest.raises(CapabilityError, match="no such device"):
        mesh.settle(resolve(1, {}), {"device": "npu"}, 60)
