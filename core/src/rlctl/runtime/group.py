"""All ranks of one pool, as the controller calls them. The same over every transport: who waits for whom, what a death, a
hang or an error ends in, and that nothing is left running."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.runtime import failures
from rlctl.runtime.dispatch import Dispatch, check_places, collect, dispatch_of, replicate
from rlctl.runtime.phases import Status
from rlctl.runtime.records import Boot, BuildSpec, Built, Call, Death, Event, Hello, Raised, RankPlace, Result
from rlctl.runtime.transports.base import Transport
from rlctl.runtime.transports.inline import InlineTransport

START_UP = 0
"""The call id of what goes wrong before the first call."""

_POLL_S = 0.5
_GRACE_POLL_S = 0.1
_AFTER_CAUSE_S = 1.0
"""Once a cause is known, what its consequences are is worth this long."""


@dataclass(frozen=True)
class Limits:
    """How long a group waits.

    Args:
        start_s: for the first answer of every rank.
        hang_s: for any sign of progress of a rank that a call waits for.
        grace_s: after a first failure, for the rank that caused it where that was another; and for what the others say.
        close_s: for ranks to end by themselves.
    """

    start_s: float = 300.0
    hang_s: float = 1800.0
    grace_s: float = 3.0
    close_s: float = 10.0


class WorkerGroup:
    """Ranks 0 to ``len(boots) - 1`` over one transport.

    Args:
        name: of the pool, for messages.
        worker: the class whose methods are called; their declared dispatch decides who runs them.
    """

    def __init__(
        self, name: str, transport: Transport, boots: Sequence[Boot], worker: type, limits: Limits | None = None
    ) -> None:
        assert boots, "a group has at least one rank"
        self.name = name
        self.world_size = len(boots)
        self.limits = limits or Limits()
        self.hellos: list[Hello] = []
        self._transport = transport
        self._boots = boots
        self._worker = worker
        self._ids = itertools.count(1)
        self._places: dict[int, RankPlace] = {}
        self._closed = False
        self._failure: BaseException | None = None

    @property
    def transport(self) -> str:
        """``inline``, ``process`` or ``ray``."""
        return self._transport.name

    @property
    def inline(self) -> bool:
        return isinstance(self._transport, InlineTransport)

    @property
    def closed(self) -> bool:
        """True once the ranks have ended, kindly or not."""
        return self._closed

    def start(self) -> None:
        """Launch every rank and wait until all have answered.

        Raises:
            WorkerError: a rank died, failed or did not answer within ``limits.start_s``.
            RlctlError: the transport has not the resources.
        """
        try:
            self._transport.start(self._boots)
            self.hellos = self._run("hello", [()] * self.world_size, doing="start-up", hang_s=self.limits.start_s)
        except BaseException:
            self.kill()
            raise

    def build(self, spec: BuildSpec) -> list[Built]:
        """Build one engine on every rank; its places are checked.

        Raises:
            EngineError: the mesh that the ranks report cannot be dispatched over.
        """
        # Imports and weights that are read say nothing while they go on.
        limit = max(self.limits.start_s, self.limits.hang_s)
        built: list[Built] = self._run("build", [(spec,)] * self.world_size, doing="build", hang_s=limit)
        places = [b.place for b in built]
        check_places(places)
        # Messages name a rank by the longest mesh that it is part of; engines of one pool mostly have the same.
        for place in places:
            known = self._places.get(place.rank)
            if known is None or len(place.coordinates) > len(known.coordinates):
                self._places[place.rank] = place
        return built

    # ---- calls ------------------------------------------------------------------------------------------------
    def call(self, method: str, *args: Any) -> Any:
        """Run a one-to-all method (answers by rank) or a rank-zero one (its answer)."""
        mode = dispatch_of(self._worker, method)
        if mode is Dispatch.RANK_ZERO:
            return self._run(method, [args], doing=method)[0]
        assert mode is Dispatch.ONE_TO_ALL, f"{method} is {mode}: call_nd splits its rows"
        return self._run(method, [args] * self.world_size, doing=method)

    def call_nd(
        self,
        method: str,
        places: Sequence[RankPlace],
        parts: Sequence[tuple[Any, ...]],
        *,
        doing: str,
        on_event: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """Run an nd-compute method: ``parts`` are the arguments by dp rank, the answers come back by dp rank.

        Args:
            doing: the call in words, with the rows of the whole batch, for the message of a failure.
            on_event: told what ranks say before they end (progress).
        """
        mode = dispatch_of(self._worker, method)
        assert mode is Dispatch.ND_COMPUTE, f"{method} is {mode}"
        answers = self._run(method, replicate(places, parts), doing=doing, on_event=on_event)
        return collect(places, answers)

    def _run(
        self,
        method: str,
        args_by_rank: Sequence[tuple[Any, ...]],
        *,
        doing: str,
        on_event: Callable[[Any], None] | None = None,
        hang_s: float | None = None,
    ) -> list[Any]:
        if self._failure is not None:
            raise failures.WorkerError(
                f"the ranks of pool {self.name} have ended already, so there is no {method}",
                found=str(self._failure).splitlines()[0],
            )
        assert not self._closed, f"worker group {self.name} is closed"
        call_id = next(self._ids)
        if isinstance(self._transport, InlineTransport):
            self._transport.on_event = None if on_event is None else lambda event: on_event(event.value)
        try:
            packed: dict[int, Any] = {}
            for rank, args in enumerate(args_by_rank):
                if id(args) not in packed:
                    packed[id(args)] = self._transport.pack(Call(call_id, method, args))
                self._transport.send(rank, packed[id(args)])
            del packed
            return self._gather(call_id, len(args_by_rank), doing, on_event, hang_s or self.limits.hang_s)
        except BaseException as error:
            # Ranks that still work on this call would answer the next one.
            if not self.inline:
                self._failure = error
                self.kill()
            raise

    def _gather(
        self, call_id: int, count: int, doing: str, on_event: Callable[[Any], None] | None, hang_s: float
    ) -> list[Any]:
        values: dict[int, Any] = {}
        failed: list[Raised | Death] = []
        watch = _Watch(range(count), hang_s)
        until: float | None = None
        while True:
            for message in self._transport.receive(_POLL_S if until is None else _GRACE_POLL_S):
                if isinstance(message, Death):
                    failed.append(message)
                elif message.call_id not in (call_id, START_UP):
                    continue  # said by a call that has ended
                elif isinstance(message, Result):
                    values[message.rank] = message.value
                    watch.settled(message.rank)
                elif isinstance(message, Raised):
                    failed.append(message)
                elif isinstance(message, Event):
                    watch.alive(message.rank)
                    if on_event is not None:
                        on_event(message.value)
            if failed:
                until = self._until(until, failed)
                if time.monotonic() >= until or _all_settled(count, values, failed):
                    raise failures.failure_error(self._ranks(failed), failed, doing)
            elif len(values) == count:
                return [values[rank] for rank in range(count)]
            elif silent := watch.silent(self._transport.statuses):
                ranks = self._ranks()  # first: to be asked for its stack may wake a rank up
                stacks = self._transport.stacks(range(self.world_size))
                raise failures.hang_error(ranks, silent, hang_s, stacks, doing)

    def _until(self, until: float | None, failed: Sequence[Raised | Death]) -> float:
        """How long to listen to the other ranks: for as long as all that was heard may be somebody else's doing."""
        now = time.monotonic()
        until = now + self.limits.grace_s if until is None else until
        if any(not failures.is_consequence(f) for f in failed):
            until = min(until, now + min(self.limits.grace_s, _AFTER_CAUSE_S))
        return until

    def _ranks(self, failed: Iterable[Raised | Death] = ()) -> failures.Ranks:
        """Words for the ranks now; for a failed one, what it did when it failed."""
        statuses: list[Status | None] = self._transport.statuses()
        for failure in failed:
            found = failure.error.status if isinstance(failure, Raised) else failure.status
            statuses[failure.rank] = found or statuses[failure.rank]
        return failures.Ranks(self.name, self._places, statuses)

    # ---- the end ----------------------------------------------------------------------------------------------
    def close(self) -> None:
        """End every rank, kindly first. Safe to call again, and after a failure."""
        if not self._closed:
            self._closed = True
            self._transport.close(self.limits.close_s)

    def kill(self) -> None:
        """End every rank now."""
        self._closed = True
        self._transport.kill()


def _all_settled(count: int, values: Mapping[int, Any], failed: Sequence[Raised | Death]) -> bool:
    return len(values.keys() | {f.rank for f in failed}) >= count


class _Watch:
    """Which ranks have said nothing for too long."""

    def __init__(self, ranks: Iterable[int], limit_s: float) -> None:
        now = time.monotonic()
        self._limit_s = limit_s
        self._heard = dict.fromkeys(ranks, now)
        self._beats: dict[int, int] = {}
        self._next_look = now + min(1.0, limit_s / 4)

    def settled(self, rank: int) -> None:
        self._heard.pop(rank, None)

    def alive(self, rank: int) -> None:
        if rank in self._heard:
            self._heard[rank] = time.monotonic()

    def silent(self, statuses: Callable[[], Sequence[Status | None]]) -> list[int]:
        now = time.monotonic()
        if now < self._next_look:
            return []
        self._next_look = now + min(1.0, self._limit_s / 4)
        for rank, status in enumerate(statuses()):
            if status is not None and rank in self._heard and self._beats.get(rank) != status.beats:
                self._beats[rank] = status.beats
                self._heard[rank] = now
        # One rank that goes on is enough: the others may rightly wait for it in a collective.
        if all(now - heard > self._limit_s for heard in self._heard.values()):
            return sorted(self._heard)
        return []
