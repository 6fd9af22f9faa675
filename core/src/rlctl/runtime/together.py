"""One call each in several groups at the same time, whose ranks work with one another across the groups.

A rank that waits for one of another pool is not the one that hangs, and an error of one pool may be the doing of another:
so they are watched together, and the cause is told whichever pool it is in.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

from rlctl.errors import RlctlError
from rlctl.runtime import failures
from rlctl.runtime.group import Pending, WorkerGroup

_TURN_S = 0.02


@dataclass(frozen=True)
class Part:
    """A one-to-all method of one group, with its arguments."""

    group: WorkerGroup
    method: str
    args: tuple[Any, ...]


def call_together(parts: Sequence[Part], *, doing: str) -> list[list[Any]]:
    """Run all ``parts`` at once; returns the answers of each by rank.

    Args:
        doing: the common work in words, for the message of a failure.

    Raises:
        RlctlError: one has failed. All groups have ended then.
    """
    with ExitStack() as ending:
        for part in parts:
            ending.enter_context(part.group.ending_with_its_calls())
        pending = [p.group.begin(p.method, [p.args] * p.group.world_size, doing=doing) for p in parts]
        unfinished = list(pending)
        while unfinished:
            for one in list(unfinished):
                try:
                    done = one.turn(_TURN_S, hangs=False)
                except RlctlError as error:
                    _tell_cause(error, one, [p for p in unfinished if p is not one], doing)
                if done:
                    unfinished.remove(one)
            if unfinished and all(p.silent() for p in unfinished):
                _tell_hang(unfinished, doing)
    return [p.answers() for p in pending]


def _tell_cause(error: RlctlError, failed: Pending, others: Sequence[Pending], doing: str) -> NoReturn:
    """Raise ``error``, or what another group says within its time if that is the cause of it."""
    states = _states(others)
    if _is_cause(failed):
        raise _with(error, [f"the call: {doing}", *states])
    deadline = time.monotonic() + max((p.group.limits.grace_s for p in others), default=0.0)
    left = list(others)
    heard: list[RlctlError] = []
    while left and time.monotonic() < deadline:
        for other in list(left):
            try:
                done = other.turn(_TURN_S, hangs=False)
            except RlctlError as found:
                if _is_cause(other):
                    raise _with(found, [f"the call: {doing}", _then(failed, error)]) from error
                heard.append(found)
                left.remove(other)
            else:
                if done:
                    left.remove(other)
    # Nobody says more: who has said nothing at all is the one that the others waited for.
    quiet = [p.group.ranks().full_name(rank) for p in (failed, *others) for rank in p.waiting()]
    if quiet and error.found is None:
        error.found = f"no answer from {', '.join(quiet)} within {failed.group.limits.grace_s:g} s after that"
    raise _with(error, [f"the call: {doing}", *states, *(f"then: {_first_line(e)}" for e in heard)])


def _tell_hang(silent: Sequence[Pending], doing: str) -> NoReturn:
    """Raise the error for the group that holds a rank which does not wait for others; for the first if none shows."""
    found = [p.hang_error() for p in silent]
    chosen = next((i for i, p in enumerate(silent) if p.is_stuck), 0)
    others = [p for i, p in enumerate(silent) if i != chosen]
    raise _with(found[chosen], [f"the call: {doing}", *_states(others)])


def _is_cause(pending: Pending) -> bool:
    return any(not failures.is_consequence(f) for f in pending.failed)


def _states(others: Sequence[Pending]) -> list[str]:
    return [f"pool {p.group.name}, {line}" for p in others for line in p.group.ranks().states()]


def _then(failed: Pending, error: RlctlError) -> str:
    return f"then in pool {failed.group.name}: {_first_line(error)}"


def _first_line(error: RlctlError) -> str:
    return error.what.splitlines()[0]


def _with(error: RlctlError, lines: Sequence[str]) -> RlctlError:
    """``error`` with ``lines`` before its details, those left out that it has."""
    error.details = (*(line for line in lines if line not in error.details), *error.details)
    return error
