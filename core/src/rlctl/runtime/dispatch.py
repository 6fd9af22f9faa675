"""Who runs a call and whose answer counts: one-to-all, rank-zero, and nd-compute.

nd-compute is for work on rows: split by data parallel rank, replicated to the ranks of one replica (tp, pp, cp, usp),
answered by exactly one rank a replica, put back in order by data parallel rank whatever the order of the ranks is. All of
it follows from the places that the engine's own mesh reports, and is asserted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from rlctl.errors import EngineError
from rlctl.runtime.records import RankPlace

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Dispatch(StrEnum):
    """How a method of a worker is called."""

    ONE_TO_ALL = "one_to_all"
    """The same arguments to every rank; answers come back by rank."""
    RANK_ZERO = "rank_zero"
    """Rank 0 alone runs it and answers. The method must not contain a collective."""
    ND_COMPUTE = "nd_compute"
    """Arguments by data parallel rank; one answer a replica, in order of data parallel rank."""


_ATTRIBUTE = "__rlctl_dispatch__"


def dispatch(mode: Dispatch) -> Callable[[F], F]:
    """Declare how a method is called."""

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, mode)
        return method

    return mark


def dispatch_of(owner: type, method: str) -> Dispatch:
    """What ``method`` of ``owner`` declares."""
    declared = getattr(getattr(owner, method, None), _ATTRIBUTE, None)
    assert isinstance(declared, Dispatch), f"{owner.__name__}.{method} declares no dispatch"
    return declared


def check_places(places: Sequence[RankPlace]) -> None:
    """Refuse a mesh under which rows would be lost or counted twice.

    Raises:
        EngineError: ranks are missing, disagree on dp_size, leave a dp rank out, share it unequally, or a replica has not
            exactly one collector.
    """

    def refuse(found: str, wanted: str) -> EngineError:
        return EngineError("the engine's mesh cannot be dispatched over", found=found, wanted=wanted)

    if wrong := _not_once([p.rank for p in places], len(places)):
        raise refuse(f"rank {wrong}", f"ranks 0 to {len(places) - 1}, each once")
    for name in ("dp_size", "token_multiplier", "count_multiple"):
        values = sorted({getattr(p, name) for p in places})
        if len(values) != 1:
            raise refuse(f"{name} {' and '.join(map(str, values))}", f"one {name} on every rank")
    dp_size = places[0].dp_size
    replicas: dict[int, list[RankPlace]] = {}
    for place in places:
        replicas.setdefault(place.dp_rank, []).append(place)
    if wrong := _not_once(list(replicas), dp_size):
        raise refuse(f"dp rank {wrong}", f"dp ranks 0 to {dp_size - 1} on {len(places)} ranks")
    first = len(replicas[0])
    for dp_rank, members in sorted(replicas.items()):
        if len(members) != first:
            raise refuse(f"{first} ranks in dp rank 0 and {len(members)} in dp rank {dp_rank}", "replicas of one size")
        owners = [p.rank for p in members if p.is_collect]
        if len(owners) != 1:
            raise refuse(
                f"dp rank {dp_rank} has {len(owners) or 'no'} collectors{f', ranks {owners}' if owners else ''}",
                "exactly one rank of each replica that gives its output",
            )


def _not_once(found: Sequence[int], count: int) -> str:
    """What keeps ``found`` from being 0 to ``count - 1``, each once; empty where nothing does."""
    times = Counter(found)
    wrong = [
        f"{i} {'is missing' if not times[i] else f'is there {times[i]} times'}" for i in range(count) if times[i] != 1
    ]
    wrong += [f"{i}, which is none" for i in sorted(times) if not 0 <= i < count]
    return "; ".join(wrong[:4]) + ("; ..." if len(wrong) > 4 else "")


def replicate(places: Sequence[RankPlace], parts: Sequence[T]) -> list[T]:
    """``parts`` by dp rank -> what each rank gets, by rank: ranks of one replica get the same object."""
    assert len(parts) == places[0].dp_size, (len(parts), places[0].dp_size)
    by_rank: list[T | None] = [None] * len(places)
    for place in places:
        by_rank[place.rank] = parts[place.dp_rank]
    return by_rank  # type: ignore[return-value]


def collect(places: Sequence[RankPlace], answers: Sequence[T]) -> list[T]:
    """Answers by rank -> the collectors' answers, by dp rank."""
    assert len(answers) == len(places), (len(answers), len(places))
    owners = sorted((p.dp_rank, p.rank) for p in places if p.is_collect)
    assert [dp for dp, _ in owners] == list(range(places[0].dp_size)), owners
    return [answers[rank] for _, rank in owners]


def restore_order(indices: Sequence[Sequence[int]], parts: Sequence[Sequence[T]], total: int) -> list[T]:
    """Per-row results of each part back in the order of the whole: ``indices[p][i]`` is the row of ``parts[p][i]``.

    Raises:
        EngineError: a part answers for another number of rows than it was given, or a row is missing.
    """
    out: list[T | None] = [None] * total
    seen = 0
    for rows, values in zip(indices, parts, strict=True):
        if len(rows) != len(values):
            raise EngineError(
                "a replica answered for another number of rows than it was given",
                found=f"{len(values)} results",
                wanted=f"{len(rows)}",
            )
        for row, value in zip(rows, values, strict=True):
            out[row] = value
            seen += 1
    assert seen == total, f"{seen} results for {total} rows"
    return out  # type: ignore[return-value]
