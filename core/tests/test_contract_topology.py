"""Topology: ranks to coordinates and back, one collector a replica, errors that say which sizes fit."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.errors import CapabilityError
from rlctl.topology import Topology, resolve

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "usp", "tp")
sizes_strategy = st.fixed_dictionaries({name: st.integers(1, 3) for name in AXES})


def make(sizes: dict[str, int]) -> Topology:
    return Topology(world_size=prod(sizes.values()), **cast(dict[str, Any], sizes))


@given(sizes_strategy)
def test_coordinates_are_a_bijection(sizes: dict[str, int]) -> None:
    topology = make(sizes)
    seen = [tuple(topology.coordinates(rank).items()) for rank in range(topology.world_size)]
    assert len(set(seen)) == topology.world_size
    for coordinates in seen:
        assert tuple(name for name, _ in coordinates) == AXES
        assert all(0 <= value < sizes[name] for name, value in coordinates)
    # Slowest axis first: coordinates in rank order are sorted.
    assert seen == sorted(seen, key=lambda c: [v for _, v in c])


@given(sizes_strategy)
def test_one_collector_for_each_replica(sizes: dict[str, int]) -> None:
    topology = make(sizes)
    ranks = range(topology.world_size)
    collectors = Counter(topology.dp_rank(r) for r in ranks if topology.is_collector(r))
    assert collectors == dict.fromkeys(range(topology.dp_size), 1)
    members = Counter(topology.dp_rank(r) for r in ranks)
    assert set(members.values()) == {topology.model_parallel_size}
    assert topology.dp_size * topology.model_parallel_size == topology.world_size


@given(sizes_strategy)
def test_ranks_of_a_replica_share_their_dp_coordinates(sizes: dict[str, int]) -> None:
    topology = make(sizes)
    by_dp: dict[int, set[tuple[int, int]]] = {}
    for rank in range(topology.world_size):
        c = topology.coordinates(rank)
        by_dp.setdefault(topology.dp_rank(rank), set()).add((c["dp_replicate"], c["dp_shard"]))
    assert all(len(places) == 1 for places in by_dp.values())
    assert sorted(by_dp) == list(range(topology.dp_size))


def test_the_last_pipeline_stage_collects() -> None:
    topology = Topology(world_size=4, pp=2, tp=2)
    assert [topology.is_collector(r) for r in range(4)] == [False, False, True, False]


@given(sizes_strategy, st.integers(1, 4))
def test_resolve_works_out_dp_shard(sizes: dict[str, int], dp_shard: int) -> None:
    sizes = {**sizes, "dp_shard": dp_shard}
    world = prod(sizes.values())
    for given_axes in ({**sizes, "dp_shard": -1}, {k: v for k, v in sizes.items() if k != "dp_shard"}, sizes):
        assert resolve(world, given_axes) == make(sizes)


@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 5))
def test_resolve_names_the_nearest_world_sizes(world: int, tp: int, pp: int) -> None:
    others = tp * pp
    if world % others == 0:
        assert resolve(world, {"tp": tp, "pp": pp}).dp_shard == world // others
        return
    with pytest.raises(CapabilityError) as caught:
        resolve(world, {"tp": tp, "pp": pp})
    named = [int(word) for word in (caught.value.wanted or "").split("nearest ")[1].split(" or ")]
    assert named == [n for n in (world // others * others, (world // others + 1) * others) if n > 0]
    for size in named:
        assert resolve(size, {"tp": tp, "pp": pp}).world_size == size


def test_axes_that_reuse_ranks_do_not_count() -> None:
    topology = resolve(4, {"tp": 2, "ep": 2, "etp": 2, "vpp": 2, "dcp": 2, "sp": True})
    assert topology.dp_shard == 2
    assert topology.sp is True
    assert topology.axes() == {"dp_shard": 2, "tp": 2, "sp": 1, "vpp": 2, "ep": 2, "etp": 2, "dcp": 2}


@pytest.mark.parametrize(
    ("world", "axes", "text"),
    [
        (2, {"tpp": 2}, "unknown parallel axis 'tpp'"),
        (2, {"tp": 0}, "parallel.tp must be at least 1"),
        (2, {"tp": -2}, "parallel.tp must be at least 1"),
        (2, {"ep": 0}, "parallel.ep must be at least 1"),
        (2, {"dp_shard": 0}, "parallel.dp_shard must be at least 1"),
        (4, {"dp_shard": 3}, "do not multiply to the world size 4"),
        (3, {"tp": 2}, "3 ranks cannot be split"),
    ],
)
def test_resolve_refuses(world: int, axes: dict[str, int], text: str) -> None:
    with pytest.raises(CapabilityError, match=text) as caught:
        resolve(world, axes)
    assert caught.value.wanted


def test_a_rank_outside_is_our_own_fault() -> None:
    with pytest.raises(AssertionError):
        Topology(world_size=2, tp=2).coordinates(2)
