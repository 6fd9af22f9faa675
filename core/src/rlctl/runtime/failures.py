"""A rank failed: which failure is the cause, which are its consequences, and what the user is told."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from rlctl.errors import RlctlError
from rlctl.runtime.out_of_memory import is_out_of_memory, out_of_memory
from rlctl.runtime.phases import Status
from rlctl.runtime.records import Death, ErrorRecord, Raised, RankPlace
from rlctl.runtime.wire import ALLOWED, is_allowed

Failure = Raised | Death

_RESUME = "rlctl train --resume last goes on from the last checkpoint"
_OUTPUT_LINES = 40
_LINE = 200
_COLLECTIVE_TEXT = re.compile(
    r"\b(gloo|nccl|hccl)\b|connection (was )?(closed|reset|refused)|broken pipe|process group|\bpeer\b|socket",
    re.IGNORECASE,
)
_COLLECTIVE_TYPES = re.compile(r"Dist\w*Error$|PeerFailedError$")
_COLLECTIVE_FRAME = re.compile(r'File "[^"]*(torch[/\\]distributed[/\\]|rlctl[/\\]runtime[/\\]link_wait\.py")')
_TOP_FRAMES = 8


class WorkerError(RlctlError):
    """A rank died, hung, or raised something that is not its user's doing. ``details`` has every rank's last state."""


class PeerFailedError(RuntimeError):
    """This rank is well; it ends its work because another one, in whatever pool, said that it failed or does not go on."""


# ---- on the rank ------------------------------------------------------------------------------------------------------
def error_record(error: BaseException, traceback: str, status: Status) -> ErrorRecord:
    """An exception as it travels. ``status`` is used where the error carries none of its own (see phases.phase)."""
    status = getattr(error, "rlctl_status", status)
    if not isinstance(error, RlctlError) and is_out_of_memory(error):
        error = out_of_memory(error, status.phase)
    kinds = tuple(f"{k.__module__}:{k.__qualname__}" for k in type(error).__mro__ if k not in (object, BaseException))
    if isinstance(error, RlctlError):
        return ErrorRecord(
            type(error).__name__,
            error.what,
            error.found,
            error.wanted,
            error.next,
            tuple(map(str, error.details)),
            mendable=True,
            traceback=traceback,
            status=status,
            kinds=kinds,
        )
    what = str(error) or type(error).__name__
    return ErrorRecord(type(error).__name__, what, traceback=traceback, status=status, kinds=kinds)


# ---- cause and consequence --------------------------------------------------------------------------------------------
def is_consequence(failure: Failure) -> bool:
    """True for what a rank says when a peer of its collective is gone."""
    if isinstance(failure, Death):
        return "SIGABRT" in failure.cause  # how the watchdog of a collective library ends a survivor
    error = failure.error
    if error.mendable:
        return False
    return bool(_COLLECTIVE_TYPES.search(error.type) or _COLLECTIVE_TEXT.search(error.what))


def distinct(failures: Iterable[Failure]) -> list[Failure]:
    """The failures without the deaths of ranks that had said before what was wrong with them."""
    found: list[Failure] = []
    for failure in failures:
        said = any(f.rank == failure.rank and isinstance(f, Raised) for f in found)
        if not (isinstance(failure, Death) and said):
            found.append(failure)
    return found


def primary(failures: Sequence[Failure]) -> Failure:
    """The cause among failures in order of arrival: no consequence of another, rather a death than an error."""
    assert failures, "something failed"
    return min(enumerate(failures), key=lambda f: (is_consequence(f[1]), isinstance(f[1], Raised), f[0]))[1]


# ---- what the user is told --------------------------------------------------------------------------------------------
class Ranks:
    """Words for the ranks of a group.

    Args:
        places: of the ranks, where an engine is built already.
        statuses: by rank, as far as they could be read.
    """

    def __init__(self, pool: str, places: Mapping[int, RankPlace], statuses: Sequence[Status | None]) -> None:
        self.pool = pool
        self._places = places
        self.statuses = statuses
        axes = {axis for place in places.values() for axis in place.coordinates}
        # An axis on which all have one coordinate tells nothing.
        self._axes = {a for a in axes if len({p.coordinates.get(a) for p in places.values()}) > 1}
        self.resume = _RESUME if places else None
        """What to do next; before the first engine there is nothing to go on from."""

    def name(self, rank: int) -> str:
        """``rank 1 (dp_shard 1)``."""
        place = self._places.get(rank)
        if place is None:
            return f"rank {rank}"
        inner = ", ".join(f"{axis} {at}" for axis, at in place.coordinates.items() if axis in self._axes)
        return f"rank {rank}{f' ({inner})' if inner else ''}"

    def full_name(self, rank: int) -> str:
        return f"{self.name(rank)} of pool {self.pool}"

    def states(self) -> list[str]:
        """A line a rank: where it is in the mesh and what it does."""
        lines: list[str] = []
        for rank, status in enumerate(self.statuses):
            place = self._places.get(rank)
            dp = f", dp rank {place.dp_rank} of {place.dp_size}" if place is not None else ""
            words = status.words() if status is not None else "has said nothing yet"
            lines.append(f"{self.name(rank)}{dp}: {words}")
        return lines


def failure_error(ranks: Ranks, failures: Sequence[Failure], doing: str) -> RlctlError:
    """The exception for a failed call.

    Args:
        doing: the call that ran, with the rows of the whole batch.
    """
    failures = distinct(failures)
    cause = primary(failures)
    where = ranks.full_name(cause.rank)
    details = [f"the call: {doing}", *ranks.states()]
    details += [f"then {ranks.name(f.rank)}: {_line(f)}" for f in failures if f is not cause]
    if isinstance(cause, Death):
        phase = f" during {cause.status.words()}" if cause.status is not None else ""
        return WorkerError(
            f"{where} died{phase}",
            found=cause.cause,
            wanted="every rank of the group alive",
            next=_after_death(cause, ranks),
            details=[*details, *_output(cause.output)],
        )
    error = cause.error
    if error.mendable:
        # Its own class and words; the states of the others only where they are not all alike.
        alike = all(isinstance(f, Raised) and f.error.what == error.what for f in failures)
        alike = alike and len(failures) == len(ranks.statuses)
        said = f"raised on {f'all {len(failures)} ranks' if alike and len(failures) > 1 else where}"
        return rebuilt(error, [*error.details, f"{said} during {error.status.words()}", *([] if alike else details)])
    return WorkerError(
        f"{where} failed during {error.status.words()}: {error.type}: {_first_line(error.what)}",
        details=[*details, *error.traceback.rstrip().splitlines()],
        next=ranks.resume,
    )


def _after_death(death: Death, ranks: Ranks) -> str | None:
    killed = "look for the kernel's out-of-memory killer (dmesg)" if "SIGKILL" in death.cause else None
    return ", then ".join(filter(None, (killed, ranks.resume))) or None


def rebuilt(error: ErrorRecord, details: Sequence[str]) -> RlctlError:
    """An RlctlError of the class that was raised, or of the nearest one above it that is known in this process."""
    kind = next((k for name in error.kinds if (k := _error_class(name)) is not None), RlctlError)
    made = kind.__new__(kind)
    # Not by its own constructor, which may ask for anything.
    RlctlError.__init__(made, error.what, found=error.found, wanted=error.wanted, next=error.next, details=details)
    return made


def _error_class(name: str) -> type[RlctlError] | None:
    module, _, path = name.partition(":")
    # What a rank says makes this process import nothing but core; a plugin's class counts where it is loaded already.
    loaded = importlib.import_module(module) if is_allowed(module, ALLOWED) else sys.modules.get(module)
    found = getattr(loaded, path, None)
    return found if isinstance(found, type) and issubclass(found, RlctlError) else None


def hang_error(
    ranks: Ranks, silent: Sequence[int], limit_s: float, stacks: Mapping[int, str], doing: str
) -> WorkerError:
    """The exception for ranks that have said nothing for ``limit_s`` while a call waits for them."""
    stuck, others = _stuck(ranks, silent, stacks)
    waiting = [r for r in silent if r not in stuck]
    details = [f"the call: {doing}", *ranks.states()]
    for rank in [*stuck, *waiting]:
        if rank in stacks:
            details += [f"stack of {ranks.name(rank)}:", *(f"  {line}" for line in stacks[rank].splitlines())]
    first = ranks.statuses[stuck[0]]
    names = ", ".join(map(ranks.name, stuck))
    return WorkerError(
        f"{names} of pool {ranks.pool} {'hangs' if len(stuck) == 1 else 'hang'}"
        f"{f' during {first.phase}' if first is not None else ''}: no progress for {limit_s:g} s{others}",
        found="; ".join(
            f"rank {r}: {s.words() if (s := ranks.statuses[r]) is not None else 'no status'}" for r in silent
        ),
        wanted="progress on every rank",
        next=f"read the stack of {_listed(stuck)} above; runtime.hang_timeout_s sets the limit",
        details=details,
    )


def _stuck(ranks: Ranks, silent: Sequence[int], stacks: Mapping[int, str]) -> tuple[list[int], str]:
    """The ranks that keep the others, and words for the others; all of them and no words where that does not show."""
    waiting = [r for r in silent if r in stacks and waits_for_others(stacks[r])]
    if 0 < len(waiting) < len(silent):
        words = f"; {_listed(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in a collective"
        return [r for r in silent if r not in waiting], words
    # Where collectives run beside the program (on a GPU) a rank waits for them somewhere behind: who is behind is stuck.
    statuses = {r: s for r in silent if (s := ranks.statuses[r]) is not None and "micro_batch" in s.detail}
    if len(statuses) == len(silent):
        at = {r: int(s.detail["micro_batch"]) for r, s in statuses.items()}
        ahead = [r for r in silent if at[r] > min(at.values())]
        words = f"; {_listed(ahead)} {'is' if len(ahead) == 1 else 'are'} further on" if ahead else ""
        return [r for r in silent if r not in ahead], words
    return list(silent), ""


def waits_for_others(stack: str) -> bool:
    """True when the innermost frames of the thread that runs the calls lie in a collective."""
    own = stack.splitlines()[1 : 1 + _TOP_FRAMES]
    return any(_COLLECTIVE_FRAME.search(line) for line in own)


def _listed(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _line(failure: Failure) -> str:
    if isinstance(failure, Death):
        return failure.cause
    return f"{failure.error.type}: {_first_line(failure.error.what)}"


def _first_line(text: str) -> str:
    line = next(iter(text.strip().splitlines()), "")
    return line if len(line) <= _LINE else f"{line[: _LINE - 4]} ..."


def _output(text: str) -> list[str]:
    lines = text.rstrip().splitlines()
    return ["its last output:", *(f"  {line}" for line in lines[-_OUTPUT_LINES:])] if lines else []
