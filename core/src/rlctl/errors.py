"""Errors that a user can mend.

Every :class:`RlctlError` says what happened, what was found, what was wanted and the command to run next. The command
line prints these four lines without a traceback. What *we* got wrong is an ``assert`` and does show a traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class RlctlError(Exception):
    """A failure that its reader can mend.

    Args:
        what: one sentence, what could not be done.
        found: what is there (a value, a version, a path).
        wanted: what would have been right.
        next: the next command or edit, as it would be typed.
        details: further lines, already formatted (for example one line a problem).
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        found: object | None = None,
        wanted: object | None = None,
        next: str | None = None,
        details: Sequence[str] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.found = None if found is None else str(found)
        self.wanted = None if wanted is None else str(wanted)
        self.next = next
        self.details = tuple(details)

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  {line}" for line in self.details]
        for label, value in (("found", self.found), ("wanted", self.wanted), ("next", self.next)):
            if value is not None:
                lines.append(f"  {label + ':':<8} {value}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The error as a JSON object, as the ``--json`` outputs show it."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "found": self.found,
            "wanted": self.wanted,
            "next": self.next,
            "details": list(self.details),
        }


class UsageError(RlctlError):
    """The command line itself is wrong (exit code 2)."""

    exit_code = 2


class ConfigError(RlctlError):
    """One or more problems in a configuration; ``details`` has one line a problem with its dotted path."""


class DataError(RlctlError):
    """A dataset, a row or a reward function is not usable."""


class AlgorithmError(RlctlError):
    """An advantage estimator or a policy loss of a user or a plugin does not load, fails, or returns something else."""


class PluginError(RlctlError):
    """A plugin could not be discovered, declared, matched or registered."""


class BackendUnavailableError(PluginError):
    """The backend asked for does not answer; the message lists what does, what failed and what can be installed."""


class CapabilityError(RlctlError):
    """A topology, head or device that the chosen backend does not support."""


class EngineError(RlctlError):
    """An engine broke the contract, or a model cannot be run by it."""


class BatchError(RlctlError):
    """A batch cannot be packed or split under the bounds that were asked for."""


class GuardError(RlctlError):
    """A guard that is on by default stopped the run (log-prob drift, non-finite steps, export coverage ...)."""


class CheckpointError(RlctlError):
    """A run directory or checkpoint is missing, incomplete or does not match."""
