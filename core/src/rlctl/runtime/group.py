"""All ranks of one pool, as the controller calls them. The same over every transport: who waits for whom, what a death, a
hang or an error ends in, and that nothing is left running."""

from __future__ import annotations

import itertools
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlctl import __version__
from rlctl.errors import RlctlError
from rlctl.interpreters.faults import other_version
from rlctl.records import API_VERSION
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
        python: another interpreter that the ranks run in, for messages.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        boots: Sequence[Boot],
        worker: type,
        limits: Limits | None = None,
        *,
        python: str | None = None,
    ) -> None:
        assert boots, "a group has at least one rank"
        self.name = name
        self.world_size = len(boots)
        self.limits = limits or Limits()
        self.hellos: list[Hello] = []
        self._transport = transport
        self._boots = boots
        self._worker = worker
        self._python = python
        self._ids = itertools.count(1)
        self._places: dict[int, RankPlace] = {}
        self._closed = False
        self._failure: BaseException | None = None
        self._abandoned = threading.Event()

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
            InterpreterError: the ranks run another rlctl.
            RlctlError: the transport has not the resources.
        """
        try:
            self._transport.start(self._boots)
            self.hellos = self._run("hello", [()] * self.world_size, doing="start-up", hang_s=self.limits.start_s)
            for hello in self.hellos:
                if (hello.rlctl, tuple(hello.api)) != (__version__, API_VERSION):
                    raise other_version(hello.executable, hello.rlctl, hello.api)
        except RlctlError as error:
            self.kill()
            if self._python is not None:
                error.details = (*error.details, f"pool {self.name} runs in {self._python}")
                error.next = error.next or f"rlctl doctor --python {shlex.quote(self._python)}"
            raise
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
        pending = self.begin(method, args_by_rank, doing=doing, on_event=on_event, hang_s=hang_s)
        with self.ending_with_its_calls():
            while not pending.turn():
                if self._abandoned.is_set():
                    raise failures.WorkerError(f"{doing} in pool {self.name} was given up", found="a run that ends")
        return pending.answers()

    def begin(
        self,
        method: str,
        args_by_rank: Sequence[tuple[Any, ...]],
        *,
        doing: str,
        on_event: Callable[[Any], None] | None = None,
        hang_s: float | None = None,
    ) -> Pending:
        """Send a call to the first ranks, one a tuple of arguments, and return at once.

        Nothing else may be called until its answers are there; its caller takes turns at it, within
        :meth:`ending_with_its_calls`.
        """
        if self._failure is not None:
            raise failures.WorkerError(
                f"the ranks of pool {self.name} have ended already, so there is no {method}",
                found=str(self._failure).splitlines()[0],
            )
        assert not self._closed, f"worker group {self.name} is closed"
        call_id = next(self._ids)
        if isinstance(self._transport, InlineTransport):
            self._transport.on_event = None if on_event is None else lambda event: on_event(event.value)
        with self.ending_with_its_calls():
            packed: dict[int, Any] = {}
            for rank, args in enumerate(args_by_rank):
                if id(args) not in packed:
                    packed[id(args)] = self._transport.pack(Call(call_id, method, args))
                self._transport.send(rank, packed[id(args)])
        return Pending(self, call_id, len(args_by_rank), doing, on_event, hang_s or self.limits.hang_s)

    @contextmanager
    def ending_with_its_calls(self) -> Iterator[None]:
        """Whatever leaves this block by an error ends the ranks: those that still work on a call would answer the next."""
        try:
            yield
        except BaseException as error:
            if not self.inline:
                self._failure = error
                self.kill()
            raise

    def ranks(self, failed: Iterable[Raised | Death] = ()) -> failures.Ranks:
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

    def abandon(self) -> None:
        """From another thread: the call that goes on in this group ends with an error soon, and the ranks with it."""
        self._abandoned.set()

    def kill(self) -> None:
        """End every rank now."""
        self._closed = True
        self._transport.kill()


class Pending:
    """A call that ranks of a group work on."""

    def __init__(
        self,
        group: WorkerGroup,
        call_id: int,
        count: int,
        doing: str,
        on_event: Callable[[Any], None] | None,
        hang_s: float,
    ) -> None:
        self.group = group
        self.doing = doing
        self.failed: list[Raised | Death] = []
        self.is_stuck = False
        """With :meth:`hang_error`: some rank does something else than to wait for others."""
        self._transport = group._transport
        self._call_id = call_id
        self._count = count
        self._on_event = on_event
        self._hang_s = hang_s
        self._values: dict[int, Any] = {}
        self._watch = _Watch(range(count), hang_s)
        self._until: float | None = None

    def answers(self) -> list[Any]:
        """What the ranks returned, by rank; once all have."""
        return [self._values[rank] for rank in range(self._count)]

    def waiting(self) -> list[int]:
        """The ranks that have neither answered nor failed."""
        return sorted(set(range(self._count)) - self._values.keys() - {f.rank for f in self.failed})

    def turn(self, poll_s: float = _POLL_S, *, hangs: bool = True) -> bool:
        """Take what has arrived, waiting up to ``poll_s`` for it. True when all ranks have answered.

        Args:
            hangs: look for ranks that hang.

        Raises:
            RlctlError: the call has failed.
        """
        for message in self._transport.receive(poll_s if self._until is None else min(poll_s, _GRACE_POLL_S)):
            if isinstance(message, Death):
                self.failed.append(message)
            elif message.call_id not in (self._call_id, START_UP):
                continue  # said by a call that has ended
            elif isinstance(message, Result):
                self._values[message.rank] = message.value
                self._watch.settled(message.rank)
            elif isinstance(message, Raised):
                self.failed.append(message)
            elif isinstance(message, Event):
                self._watch.alive(message.rank)
                if self._on_event is not None:
                    self._on_event(message.value)
        if self.failed:
            self._until = self._end_of_listening()
            if time.monotonic() >= self._until or not self.waiting():
                raise failures.failure_error(self.group.ranks(self.failed), self.failed, self.doing)
        elif len(self._values) == self._count:
            return True
        elif hangs and self.silent():
            raise self.hang_error()
        return False

    def silent(self) -> list[int]:
        """The ranks that are waited for, where all of them have been silent for too long."""
        return self._watch.silent(self._transport.statuses)

    def hang_error(self) -> failures.WorkerError:
        """The error for :meth:`silent` ranks."""
        ranks = self.group.ranks()  # first: to be asked for its stack may wake a rank up
        silent = self.silent()
        stacks = self._transport.stacks(range(self.group.world_size))
        self.is_stuck = any(not failures.waits_for_others(stacks[rank]) for rank in silent if rank in stacks)
        return failures.hang_error(ranks, silent, self._hang_s, stacks, self.doing)

    def _end_of_listening(self) -> float:
        """Until when to listen to the other ranks: for as long as all that was heard may be somebody else's doing."""
        now, grace_s = time.monotonic(), self.group.limits.grace_s
        until = now + grace_s if self._until is None else self._until
        if any(not failures.is_consequence(f) for f in self.failed):
            until = min(until, now + min(grace_s, _AFTER_CAUSE_S))
        return until


class _Watch:
    """Which ranks have said nothing for too long."""

    def __init__(self, ranks: Iterable[int], limit_s: float) -> None:
        now = time.monotonic()
        self._limit_s = limit_s
        self._heard = dict.fromkeys(ranks, now)
        self._beats: dict[int, int] = {}
        self._next_look = now + min(1.0, limit_s / 4)
        self._found: list[int] = []

    def settled(self, rank: int) -> None:
        self._heard.pop(rank, None)

    def alive(self, rank: int) -> None:
        if rank in self._heard:
            self._heard[rank] = time.monotonic()

    def silent(self, statuses: Callable[[], Sequence[Status | None]]) -> list[int]:
        now = time.monotonic()
        if now < self._next_look:
            return [rank for rank in self._found if rank in self._heard]
        self._next_look = now + min(1.0, self._limit_s / 4)
        for rank, status in enumerate(statuses()):
            if status is not None and rank in self._heard and self._beats.get(rank) != status.beats:
                self._beats[rank] = status.beats
                self._heard[rank] = now
        # One rank that goes on is enough: the others may rightly wait for it in a collective.
        silent = all(now - heard > self._limit_s for heard in self._heard.values())
        self._found = sorted(self._heard) if silent else []
        return self._found
