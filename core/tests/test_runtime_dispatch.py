"""Dispatch over a mesh: the same rows to all ranks of a replica, one answer each, in order whatever the ranks' order is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.errors import EngineError
from rlctl.runtime.dispatch import (
    Dispatch,
    check_places,
    collect,
    dispatch,
    dispatch_of,
    replicate,
    restore_order,
)
from rlctl.runtime.records import RankPlace
from rlctl.runtime.worker import Worker
from rlctl.topology import Topology


def places_of(topology: Topology, order: list[int] | None = None) -> list[RankPlace]:
    """Places by rank; ``order[rank]`` is the rank of the topology that sits there."""
    order = order or list(range(topology.world_size))
    return [
        RankPlace(rank, topology.dp_rank(at), topology.dp_size, topology.is_collector(at))
        for rank, at in enumerate(order)
    ]


topologies = st.builds(
    lambda dp, rep, tp, pp, cp: Topology(dp * rep * tp * pp * cp, dp, rep, tp=tp, pp=pp, cp=cp),
    *[st.integers(1, 3)] * 5,
)


@given(topologies, st.data())
def test_rows_go_out_by_replica_and_come_back_in_order(topology: Topology, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(topology.world_size)))
    places = places_of(topology, list(order))
    check_places(places)
    parts = [object() for _ in range(topology.dp_size)]
    sent = replicate(places, parts)
    assert len(sent) == topology.world_size
    for place, part in zip(places, sent, strict=True):
        assert part is parts[place.dp_rank]
    # Each rank answers with its own number: the answers are those of the collectors, by dp rank.
    answers = collect(places, [place.rank for place in places])
    assert [places[rank].dp_rank for rank in answers] == list(range(topology.dp_size))
    assert all(places[rank].is_collect for rank in answers)
    # The order in which the places are listed does not matter.
    shuffled = data.draw(st.permutations(places))
    check_places(shuffled)
    assert replicate(shuffled, parts) == sent
    assert collect(shuffled, [place.rank for place in places]) == answers


def test_the_collector_is_no_low_rank_under_a_pipeline() -> None:
    """pp is the slowest axis: the last stages, which hold the output, are the last ranks."""
    places = places_of(Topology(8, dp_shard=2, pp=2, tp=2))
    assert [p.rank for p in places if p.is_collect] == [4, 6]
    assert collect(places, list("abcdefgh")) == ["e", "g"]


FOUR = places_of(Topology(4, dp_shard=2, tp=2))


@pytest.mark.parametrize(
    ("places", "found", "wanted"),
    [
        ([FOUR[0], FOUR[1], FOUR[3], FOUR[3]], "rank 2 is missing; 3 is there 2 times", "ranks 0 to 3, each once"),
        ([*FOUR[:3], replace(FOUR[3], rank=9)], "rank 3 is missing; 9, which is none", "ranks 0 to 3"),
        ([*FOUR[:3], replace(FOUR[3], dp_size=4)], "dp_size 2 and 4", "one dp_size on every rank"),
        ([*FOUR[:3], replace(FOUR[3], token_multiplier=2)], "token_multiplier 1 and 2", "one token_multiplier"),
        ([*FOUR[:3], replace(FOUR[3], count_multiple=4)], "count_multiple 1 and 4", "one count_multiple"),
        ([replace(p, dp_rank=0) for p in FOUR], "dp rank 1 is missing", "dp ranks 0 to 1 on 4 ranks"),
        (
            [*FOUR[:2], *(replace(p, dp_rank=2) for p in FOUR[2:])],
            "dp rank 1 is missing; 2, which is none",
            "dp ranks 0",
        ),
        ([*FOUR[:3], replace(FOUR[3], dp_rank=0)], "3 ranks in dp rank 0 and 1 in dp rank 1", "replicas of one size"),
        ([*FOUR[:2], *(replace(p, is_collect=False) for p in FOUR[2:])], "dp rank 1 has no collectors", "exactly one"),
        ([replace(p, is_collect=True) for p in FOUR], "dp rank 0 has 2 collectors, ranks [0, 1]", "exactly one rank"),
    ],
)
def test_a_mesh_that_loses_or_doubles_rows_is_refused(places: list[RankPlace], found: str, wanted: str) -> None:
    with pytest.raises(EngineError, match="the engine's mesh cannot be dispatched over") as caught:
        check_places(places)
    assert caught.value.found is not None
    assert caught.value.wanted is not None
    assert caught.value.found.startswith(found)
    assert wanted in caught.value.wanted


def test_a_refusal_of_many_ranks_stays_short() -> None:
    places = places_of(Topology(1024, dp_shard=1024))
    with pytest.raises(EngineError) as caught:
        check_places([replace(p, dp_rank=0) for p in places])
    assert caught.value.found == "dp rank 1 is missing; 2 is missing; 3 is missing; 4 is missing; ..."


# ---- order -----------------------------------------------------------------------------------------------------------
@given(st.permutations(range(12)), st.integers(1, 5))
def test_restored_order(order: list[int], size: int) -> None:
    indices = [order[start : start + size] for start in range(0, 12, size)]
    assert restore_order(indices, [[f"row {i}" for i in rows] for rows in indices], 12) == [
        f"row {i}" for i in range(12)
    ]


def test_answers_for_another_number_of_rows_are_refused() -> None:
    with pytest.raises(EngineError, match="another number of rows") as caught:
        restore_order([[0, 2], [1]], [["a"], ["b"]], 3)
    assert (caught.value.found, caught.value.wanted) == ("1 results", "2")


# ---- declarations ----------------------------------------------------------------------------------------------------
def test_every_method_of_a_worker_declares_its_dispatch() -> None:
    """But those that run in the worker's own process: its loop and its end."""
    public = {n for n, v in vars(Worker).items() if callable(v) and not n.startswith("_")} - {"run", "shutdown"}
    modes = {name: dispatch_of(Worker, name) for name in public}
    assert {n for n, m in modes.items() if m is Dispatch.ND_COMPUTE} == {
        "train_batch", "infer_batch", "eval_loss", "generate", "score",
    }  # fmt: skip


def test_a_method_without_a_declaration_is_our_own_fault() -> None:
    class Odd:
        def undeclared(self) -> None: ...

        @dispatch(Dispatch.RANK_ZERO)
        def declared(self) -> None: ...

    assert dispatch_of(Odd, "declared") is Dispatch.RANK_ZERO
    for name in ("undeclared", "missing"):
        with pytest.raises(AssertionError, match=name):
            dispatch_of(Odd, name)
