"""The outcome of a doctor run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from rlctl.errors import RlctlError
from rlctl.plugins import PluginEntry, Stage
from rlctl.records import CheckResult, CheckStatus


class DoctorError(RlctlError):
    """The doctor itself could not run."""

    exit_code = 2


@dataclass(frozen=True)
class BackendReport:
    """One backend, or one plugin that did not get as far as naming its backends.

    Args:
        name: of the backend; the plugin's own name when its backends are not known.
        kind: ``train`` or ``rollout``; None when not known.
        plugin, dist, version: where it comes from; ``version`` is None when it is not installed.
        stage: the last stage that was tried; with status ``fail``, the one that failed.
        status: ``ok``, ``warn``, ``fail`` or ``skip``.
        cause: the whole chain, outermost first.
        next: the command that mends it.
        aliases: further names, for selecting it.
    """

    name: str
    kind: str | None
    plugin: str
    dist: str
    version: str | None
    stage: Stage
    status: CheckStatus
    cause: tuple[str, ...] = ()
    next: str = ""
    aliases: tuple[str, ...] = ()

    def answers(self, name: str) -> bool:
        return name in (self.name, self.plugin, self.dist, *self.aliases)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "plugin": self.plugin,
            "dist": self.dist,
            "version": self.version,
            "stage": str(self.stage),
            "status": str(self.status),
            "cause": list(self.cause),
            "next": self.next,
        }


@dataclass(frozen=True)
class DoctorReport:
    """Everything that was found. ``quick``: stage 4 and torch itself were not tried. ``python``: the interpreter."""

    backends: tuple[BackendReport, ...]
    checks: tuple[CheckResult, ...]
    plugins: tuple[PluginEntry, ...] = ()
    installable: tuple[dict[str, str], ...] = ()
    quick: bool = False
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())
    python: str = sys.executable

    def count(self, status: CheckStatus) -> int:
        return sum(row.status is status for row in (*self.backends, *self.checks))

    def exit_code(self, strict: bool = False) -> int:
        """0 when nothing failed; 1 on a failure, and with ``strict`` on a warning too."""
        return int(self.count(CheckStatus.FAIL) > 0 or (strict and self.count(CheckStatus.WARN) > 0))

    def to_json(self) -> dict[str, Any]:
        return {
            "python": self.python,
            "quick": self.quick,
            "backends": [b.to_json() for b in self.backends],
            "checks": [
                {"name": c.name, "status": str(c.status), "found": c.found, "wanted": c.wanted, "next": c.next}
                for c in self.checks
            ],
            "plugins": [plugin_to_json(e) for e in self.plugins],
            "installable": list(self.installable),
        }


def plugin_to_json(entry: PluginEntry) -> dict[str, Any]:
    """One plugin, as ``rlctl doctor --json`` and ``rlctl plugins --json`` show it."""
    return {
        "name": entry.name,
        "dist": entry.dist,
        "version": entry.version,
        "target": entry.target,
        "stage": str(entry.stage),
        "status": str(entry.status),
        "cause": list(entry.cause),
        "next": entry.next,
        "backends": [{"name": s.name, "kind": str(s.kind), "summary": s.summary} for s in entry.backends],
    }
