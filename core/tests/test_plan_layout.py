"""Ranks, coordinates and process groups of a plan, and the nearest sizes that fit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl import catalogue
from rlctl.capabilities import check_topology
from rlctl.constraints import ModelFacts
from rlctl.errors import CapabilityError
from rlctl.plan.layout import RANK_AXES, factorise, groups, lay_out, members, nearest, places, strides
from rlctl.records import BackendKind, BackendSpec
from rlctl.topology import Topology

DENSE = ModelFacts(num_heads=32, num_kv_heads=8, num_layers=32, num_experts=0)
MOE = ModelFacts(num_heads=32, num_kv_heads=4, num_layers=48, num_experts=128)
CUDA = ("cuda", "nvidia")


def known(name: str) -> BackendSpec:
    return next(e.spec for e in catalogue.entries() if e.spec.name == name)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    sizes = {axis: draw(st.sampled_from([1, 1, 2, 3])) for axis in RANK_AXES}
    world = 1
    for size in sizes.values():
        world *= size
    return Topology(world_size=world, **sizes)


@given(topologies())
@settings(max_examples=60, deadline=None)
def test_places_are_the_topology_s_own(topology: Topology) -> None:
    found = list(places(topology))
    assert [p.rank for p in found] == list(range(topology.world_size))
    for place in found:
        assert dict(zip(RANK_AXES, place.coordinates, strict=True)) == topology.coordinates(place.rank)
        assert place.dp_rank == topology.dp_rank(place.rank)
        assert place.is_collector == topology.is_collector(place.rank)
    collectors = [p.dp_rank for p in found if p.is_collector]
    assert sorted(collectors) == list(range(topology.dp_size))


@given(topologies())
@settings(max_examples=60, deadline=None)
def test_groups_of_an_axis_hold_every_rank_once_and_differ_on_that_axis_alone(topology: Topology) -> None:
    at = {p.rank: p.coordinates for p in places(topology)}
    inside = {
        "dp": {"dp_replicate", "dp_shard"},
        "shards": {"dp_shard", "cp", "usp"},
        "model": {"pp", "cp", "usp", "tp"},
        **{axis: {axis} for axis in RANK_AXES},
    }
    for group in groups(topology):
        found = list(members(group, topology.world_size))
        assert len(found) == group.count
        assert {len(ranks) for ranks in found} == {group.size}
        assert sorted(r for ranks in found for r in ranks) == list(range(topology.world_size))
        for ranks in found:
            fixed = [
                tuple(c for axis, c in zip(RANK_AXES, at[r], strict=True) if axis not in inside[group.axis])
                for r in ranks
            ]
            assert len(set(fixed)) == 1
            assert len({at[r] for r in ranks}) == group.size
    sized = {axis for axis in RANK_AXES if getattr(topology, axis) > 1}
    assert sized <= {g.axis for g in groups(topology)}


def test_the_seeds_of_confusion_in_ranks() -> None:
    """World 4 with tp 2: two data parallel ranks; ranks 0 and 1 hold the same rows, and one of them answers."""
    topology = factorise(BackendKind.TRAIN, 4, {"tp": 2})
    found = list(places(topology))
    assert [p.dp_rank for p in found] == [0, 0, 1, 1]
    assert [p.is_collector for p in found] == [True, False, True, False]
    by_axis = {g.axis: list(members(g, 4)) for g in groups(topology)}
    assert by_axis["tp"] == [(0, 1), (2, 3)]
    assert by_axis["dp_shard"] == [(0, 2), (1, 3)]


def test_a_rollout_s_ranks_are_engines() -> None:
    topology = factorise(BackendKind.ROLLOUT, 8, {"dp_shard": -1, "tp": 2, "dp_replicate": 1})
    assert (topology.dp_replicate, topology.tp, topology.dp_shard) == (4, 2, 1)
    words = {g.axis: g.words for g in groups(topology, BackendKind.ROLLOUT)}
    assert "engines" in words["dp_replicate"]
    assert "gradients" in {g.axis: g.words for g in groups(topology)}["dp_replicate"]


def test_strides_multiply_to_the_world() -> None:
    topology = Topology(world_size=24, pp=2, dp_shard=3, tp=4)
    step = strides(topology)
    assert step == {"tp": 1, "usp": 4, "cp": 4, "dp_shard": 4, "dp_replicate": 12, "pp": 12}


# ---- what does not fit ---------------------------------------------------------------------------------------------------
def test_nearest_sizes_fit_and_the_first_is_the_nearest() -> None:
    spec = known("megatron")
    found = nearest(spec, 64, {"tp": 8, "pp": 3, "ep": 16}, *CUDA, MOE)
    assert len(found) == 3
    for text in found:
        sizes = {k: 1 if v == "true" else int(v) for k, v in (part.split("=") for part in text.split(", "))}
        assert not check_topology(spec, factorise(spec.kind, 64, sizes), *CUDA, facts=MOE).problems
    # tp 4 (128 experts need sp with it), and pp 2 or 4 beside the 3 that does not divide 64.
    assert found[0] == "tp=4, pp=4, ep=16, sp=true"


@pytest.mark.parametrize(
    ("name", "world", "axes", "facts", "wanted"),
    [
        ("veomni", 12, {"usp": 3}, DENSE, "usp=4"),
        ("veomni", 8, {"tp": 2}, DENSE, "tp=1"),
        ("megatron", 8, {"tp": 16}, DENSE, "tp=8"),
        ("torchtitan", 8, {"pp": 2, "cp": 2}, DENSE, "pp=1, cp=2"),
        ("vllm", 8, {"tp": 4, "ep": 4}, MOE, "tp=4, ep=8"),
        ("vllm", 6, {"tp": 4}, DENSE, "tp=2"),
    ],
)
def test_nearest_choices(name: str, world: int, axes: dict[str, int], facts: ModelFacts, wanted: str) -> None:
    assert nearest(known(name), world, axes, *CUDA, facts)[0] == wanted


def test_a_layout_that_does_not_fit_says_why_and_what_would() -> None:
    layout = lay_out("actor", known("veomni"), "main", 12, {"usp": 5}, *CUDA, DENSE)
    assert layout.topology is None
    assert layout.problems == ("actor.parallel: 12 ranks cannot be split over the parallel axes (usp=5)",)
    assert layout.nearest[0] == "usp=4"
    assert layout.dp_size == 1


def test_a_layout_that_is_refused_keeps_its_ranks() -> None:
    layout = lay_out("actor", known("veomni"), "main", 8, {"tp": 2}, *CUDA, DENSE)
    assert layout.topology is not None
    assert layout.dp_size == 4
    assert layout.problems == (
        "actor.parallel.tp=2: VeOmni's training asserts tp = 1: no matrix is split between ranks; take megatron",
    )


def test_notes_are_kept() -> None:
    layout = lay_out("actor", known("megatron"), "main", 1, {"sp": 1}, *CUDA, DENSE)
    assert layout.problems == ()
    assert layout.notes == ("megatron: sp is tied to tp: it is off while tp is 1",)


def test_sizes_that_do_not_multiply_are_an_error_of_the_factorisation() -> None:
    with pytest.raises(CapabilityError, match="do not multiply"):
        factorise(BackendKind.TRAIN, 8, {"dp_shard": 3, "tp": 2})
    layout = lay_out("actor", known("megatron"), "main", 8, {"dp_shard": 3, "tp": 2}, *CUDA, DENSE)
    assert layout.nearest[0] == "tp=2, dp_shard=4"
