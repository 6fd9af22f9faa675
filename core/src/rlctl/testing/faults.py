"""Faults on purpose: an engine wrapper that kills, hangs or fails one rank at one moment. For tests of what happens then.

Nothing is active unless a plugin names the wrapper::

    @hookimpl
    def rlctl_engine_wrappers(backend, role):
        return [("fault", "rlctl.testing.faults:FaultyEngine")]

and the environment variable :data:`VARIABLE` describes a :class:`Fault` as a JSON object.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rlctl.errors import BatchError
from rlctl.hookspecs import EngineSpecs, hookimpl
from rlctl.runtime import phases
from rlctl.runtime.phases import Status

VARIABLE = "RLCTL_TEST_FAULT"
_LONG_S = 3600


class FaultKind(StrEnum):
    """What happens."""

    KILL = "kill"
    """SIGKILL to itself."""
    EXIT = "exit"
    """``os._exit(3)``: gone without a word."""
    ABORT = "abort"
    """SIGABRT, as from an assertion in native code."""
    RAISE = "raise"
    """A RuntimeError."""
    REFUSE = "refuse"
    """An error that its user can mend (BatchError)."""
    OUT_OF_MEMORY = "out_of_memory"
    """``torch.OutOfMemoryError``."""
    HANG = "hang"
    """Sleeps, without a beat."""
    HOLD = "hold"
    """Sleeps in native code that holds the interpreter's lock: no other thread of the process runs."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        rank: where; by the environment variable RANK, else the rank that the engine's mesh reports.
        hook: strikes when this hook of the engine is called ...
        phase: ... or when this phase is entered (see :mod:`rlctl.runtime.phases`); one of the two.
        occurrence: the how many-th call or entry.
    """

    kind: FaultKind
    rank: int
    hook: str = ""
    phase: str = ""
    occurrence: int = 1

    def to_env(self) -> dict[str, str]:
        """The environment that switches it on."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls) -> Fault | None:
        """The fault that the environment describes."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        fields = json.loads(text)
        return cls(**{**fields, "kind": FaultKind(fields["kind"])})

    def strike(self) -> None:
        """Let it happen."""
        where = self.hook or f"the phase {self.phase}"
        match self.kind:
            case FaultKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultKind.EXIT:
                os._exit(3)
            case FaultKind.ABORT:
                os.abort()
            case FaultKind.RAISE:
                raise RuntimeError(f"a fault on purpose in {where}")
            case FaultKind.REFUSE:
                raise BatchError(f"a refusal on purpose in {where}", found="a fault", wanted="none", next="unset it")
            case FaultKind.OUT_OF_MEMORY:
                import torch

                raise torch.OutOfMemoryError("a fault on purpose. Tried to allocate 2.00 GiB.")
            case FaultKind.HANG:
                time.sleep(_LONG_S)
            case FaultKind.HOLD:
                while True:  # a signal ends a sleep
                    ctypes.PyDLL(None).sleep(_LONG_S)


class FaultyEngine:
    """The wrapper. Makes nothing else of an engine's calls."""

    def __init__(self) -> None:
        self.fault = Fault.from_env()
        self.rank = int(os.environ["RANK"]) if "RANK" in os.environ else None
        self._calls = 0
        self._entries = 0
        self._entered: tuple[str, float] | None = None
        if self.fault is not None and self.fault.phase:
            self._behind = phases.installed_sink()
            phases.install_sink(self._look)

    def called(self, hook: str) -> None:
        """A hook is about to be called."""
        fault = self.fault
        if fault is not None and fault.hook == hook and fault.rank == self.rank:
            self._calls += 1
            if self._calls == fault.occurrence:
                fault.strike()

    def _look(self, status: Status) -> None:
        if self._behind is not None:
            self._behind(status)
        assert self.fault is not None, "it is looked for"
        entry = (status.phase, status.since)
        entered, self._entered = entry != self._entered, entry
        if entered and status.phase == self.fault.phase and self.fault.rank == self.rank:
            self._entries += 1
            if self._entries == self.fault.occurrence:
                self.fault.strike()


def _wrapper(hook: str) -> Callable[[FaultyEngine], Generator[None, Any, Any]]:
    def wrap(self: FaultyEngine) -> Generator[None, Any, Any]:
        self.called(hook)
        result = yield
        if hook == "rlctl_build_mesh" and self.rank is None:
            self.rank = result.rank
        return result

    wrap.__name__ = hook
    return hookimpl(wrapper=True)(wrap)


for _hook in (name for name in vars(EngineSpecs) if name.startswith("rlctl_")):
    setattr(FaultyEngine, _hook, _wrapper(_hook))
