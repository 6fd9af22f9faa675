"""Who runs a call and whose answer counts: one-to-all, rank-zero, and nd-compute.

nd-compute is for work on rows: split by data parallel rank, replicated to the ranks of one replica (tp, pp, cp, usp),
answered by exactly one rank a replica, put back in order by data parallel rank whatever the order of the ranks is. All of
it follows from the places that the engine's own mesh reports, and is asserted.
"""

from __future__ import annotations

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

    ranks = sorted(p.rank for p in places)
    if ranks != list(range(len(places))):
        raise refuse(f"ranks {ranks}", f"ranks 0 to {len(places) - 1}, each once")
    sizes = sorted({p.dp_size for p in places})
    if len(sizes) != 1:
        raise refuse(f"dp sizes {sizes}", "one dp size on every rank")
    replicas: dict[int, list[RankPlace]] = {}
    for place in places:
        replicas.setdefault(place.dp_rank, []).append(place)
    if sorted(replicas) != list(range(sizes[0])):
        raise refuse(f"dp ranks {sorted(replicas)}", f"dp ranks 0 to {sizes[0] - 1}")
    counts = sorted({len(r) for r in replicas.values()})
    if len(counts) != 1:
        raise refuse(f"replicas of {' and '.join(map(str, counts))} ranks", "replicas of one size")
    for dp_rank, members in sorted(replicas.items()):
        owners = [p.rank for p in members if p.is_collect]
        if len(owners) != 1:
            raise refuse(
                f"dp rank {dp_rank} has {len(owners)} collectors{f', ranks {owners}' if owners else ''}",
                "exactly one rank of each replica that gives its output",
            )


def replicate(places: Sequence[RankPlace], parts: Sequence[T]) -> list[T]:
    """``parts`` by dp rank -> what each rank gets, by rank: ranks of one replica get the same object."""
    assert len(parts) == places[0].dp_size, (len(parts), places[0].dp_size)
    by_rank = {p.rank: parts[p.dp_rank] for p in places}
    return [by_rank[rank] for rank in range(len(places))]


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
