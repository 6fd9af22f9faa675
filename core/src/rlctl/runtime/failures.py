"""A rank failed: which failure is the cause, which are its consequences, and what the user is told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlctl import errors
from rlctl.errors import RlctlError
from rlctl.runtime.phases import Status
from rlctl.runtime.records import Death, ErrorRecord, Raised, RankPlace

_COLLECTIVE = re.compile(
    r"gloo|nccl|hccl|connection (closed|reset)|broken pipe|timed out|process group|peer|socket", re.IGNORECASE
)
_OUTPUT_LINES = 40


class WorkerError(RlctlError):
    """A rank died, hung, or raised something that is not its user's doing. ``details`` has every rank's last state."""


def error_record(error: BaseException, traceback: str, status: Status) -> ErrorRecord:
    """An exception as it travels. ``status`` is used where the error carries none of its own (see phases.phase)."""
    status = getattr(error, "rlctl_status", status)
    if isinstance(error, RlctlError):
        return ErrorRecord(
            type(error).__name__,
            error.what,
            error.found,
            error.wanted,
            error.next,
            error.details,
            True,
            traceback,
            status,
        )
    return ErrorRecord(type(error).__name__, str(error) or type(error).__name__, traceback=traceback, status=status)


def is_consequence(failure: Raised | Death) -> bool:
    """True for what a rank says when a peer of its collective is gone."""
    if isinstance(failure, Death):
        return "SIGABRT" in failure.cause
    return not failure.error.mendable and bool(_COLLECTIVE.search(f"{failure.error.type} {failure.error.what}"))


def primary(failures: Sequence[Raised | Death]) -> Raised | Death:
    """The cause among failures in order of arrival."""
    assert failures, "something failed"
    return min(enumerate(failures), key=lambda f: (is_consequence(f[1]), isinstance(f[1], Raised), f[0]))[1]


def failure_error(
    pool: str,
    failures: Sequence[Raised | Death],
    places: Mapping[int, RankPlace],
    statuses: Sequence[Status | None],
    doing: str,
) -> RlctlError:
    """The exception for a failed call.

    Args:
        places: of the ranks, where an engine is built already.
        statuses: by rank, as far as they could be read.
        doing: the call that ran, with the rows of the whole batch.
    """
    cause = primary(failures)
    where = f"{rank_words(cause.rank, places)} of pool {pool}"
    if isinstance(cause, Raised) and cause.error.mendable:
        kind = getattr(errors, cause.error.type, RlctlError)
        error = kind(
            cause.error.what,
            found=cause.error.found,
            wanted=cause.error.wanted,
            next=cause.error.next,
            details=(*cause.error.details, f"raised on {where} during {cause.error.status.words()}"),
        )
        return error
    details = [f"the call: {doing}", *rank_states(places, statuses)]
    others = [f for f in failures if f is not cause]
    details += [f"then {rank_words(f.rank, places)}: {_line(f)}" for f in others]
    if isinstance(cause, Death):
        phase = f" during {cause.status.words()}" if cause.status is not None else ""
        return WorkerError(
            f"{where} died{phase}",
            found=cause.cause,
            wanted="every rank of the group alive",
            next=_death_advice(cause),
            details=[*details, *_output(cause.output)],
        )
    return WorkerError(
        f"{where} failed during {cause.error.status.words()}: {cause.error.type}: {cause.error.what.splitlines()[0]}",
        details=[*details, *cause.error.traceback.rstrip().splitlines()],
        next="rlctl train --resume last goes on from the last checkpoint",
    )


def hang_error(
    pool: str,
    silent: Sequence[int],
    limit_s: float,
    places: Mapping[int, RankPlace],
    statuses: Sequence[Status | None],
    stacks: Mapping[int, str],
    doing: str,
) -> WorkerError:
    """The exception for ranks that have said nothing for ``limit_s`` while a call waits for them."""
    details = [f"the call: {doing}", *rank_states(places, statuses)]
    for rank, stack in sorted(stacks.items()):
        details += [f"stack of {rank_words(rank, places)}:", *(f"  {line}" for line in stack.rstrip().splitlines())]
    return WorkerError(
        f"pool {pool} hangs: {', '.join(f'rank {r}' for r in silent)} made no progress for {limit_s:.0f} s",
        found="; ".join(f"rank {r}: {s.phase if (s := statuses[r]) is not None else 'unknown'}" for r in silent),
        wanted="progress on every rank",
        next="look at the rank whose phase differs from the others; runtime.hang_timeout_s sets the limit",
        details=details,
    )


def rank_words(rank: int, places: Mapping[int, RankPlace]) -> str:
    """``rank 1 (dp_shard 1)``."""
    return places[rank].words() if rank in places else f"rank {rank}"


def rank_states(places: Mapping[int, RankPlace], statuses: Sequence[Status | None]) -> list[str]:
    """A line a rank: where it is in the mesh and what it does."""
    return [
        f"{rank_words(rank, places)}: {status.words() if status is not None else 'no status'}"
        for rank, status in enumerate(statuses)
    ]


def _line(failure: Raised | Death) -> str:
    if isinstance(failure, Death):
        return failure.cause
    return f"{failure.error.type}: {failure.error.what.splitlines()[0]}"


def _output(text: str) -> list[str]:
    lines = text.rstrip().splitlines()
    return ["its last output:", *(f"  {line}" for line in lines[-_OUTPUT_LINES:])] if lines else []


def _death_advice(death: Death) -> str:
    resume = "rlctl train --resume last goes on from the last checkpoint"
    if "SIGKILL" in death.cause:
        return f"look for the kernel's out-of-memory killer (dmesg), then {resume}"
    return resume
