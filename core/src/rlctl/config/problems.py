"""One problem of a configuration, and the error that carries all of them at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlctl.config.document import Document, Loc, dotted
from rlctl.errors import ConfigError, RlctlError

MAX_LINES = 50
"""Problems that a message shows; a file of another kind may have thousands."""


@dataclass(frozen=True)
class Problem:
    """What is wrong at one place.

    Args:
        path: dotted path (``actor.optim.lr``), or empty where the file itself is the matter.
        origin: where the value came from: ``run.yaml:12``, ``override actor.optim.lr=x``, ``flag --model``, ``default``.
        what: the fault in plain words, without a full stop.
        found: what is there, or empty where ``what`` has said it.
        wanted: what would have been right.
        hint: what to do, as one would say it.
        error: the error of another part of rlctl that this problem stands for (a backend that is not installed).
    """

    path: str
    origin: str
    what: str
    found: str = ""
    wanted: str = ""
    hint: str = ""
    error: RlctlError | None = None

    def __str__(self) -> str:
        place = f"{self.path} ({self.origin})" if self.path else self.origin
        parts = [self.what] if self.what else []
        if self.found:
            parts.append(f"found {self.found}")
        if self.wanted:
            parts.append(f"wanted {self.wanted}")
        text = f"{place}: {', '.join(parts)}"
        if self.error is not None and self.hint:
            text += f". Next: {self.hint}"  # often a command, which keeps its first letter
        elif self.hint:
            text += f". {_sentence(self.hint)}"
        # One problem is one line, whatever stands in a file name or a value.
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

    def to_json(self) -> dict[str, str]:
        """The problem as plain strings."""
        return {
            "path": self.path,
            "origin": self.origin,
            "what": self.what or "wrong value",
            "found": self.found,
            "wanted": self.wanted,
            "next": self.hint,
        }


def _sentence(text: str) -> str:
    """``text`` with a capital, unless its first word is a command, a key or a name, which is one with small letters only."""
    word = re.split(r"[\s,;:]", text, maxsplit=1)[0]
    literal = not word.isalpha() or word in _COMMANDS or word in _names()
    return text if literal else text[0].upper() + text[1:]


_COMMANDS = ("rlctl", "pip", "python", "chmod")


@cache
def _names() -> frozenset[str]:
    """Names with which a hint may begin: axes, formulas, backends."""
    from rlctl.algorithms.table import ADVANTAGES, POLICY_LOSSES
    from rlctl.catalogue import entries
    from rlctl.records import Axis

    return frozenset({*map(str, Axis), *ADVANTAGES, *POLICY_LOSSES, *(entry.spec.name for entry in entries())})


def from_error(loc: Loc, document: Document, error: RlctlError) -> Problem:
    """The problem that another part's error is, at the place that led to it."""
    return Problem(
        dotted(loc),
        str(document.origin(loc)),
        error.what,
        error.found or "",
        error.wanted or "",
        error.next or "",
        error,
    )


class InvalidConfigError(ConfigError):
    """Every problem of one configuration. ``problems`` has them as data, ``details`` as one line each
    (the first :data:`MAX_LINES`)."""

    def __init__(self, source: str, problems: Sequence[Problem], next: str) -> None:
        count = len(problems)
        lines = [str(problem) for problem in problems[:MAX_LINES]]
        if count > MAX_LINES:
            lines.append(f"and {count - MAX_LINES} more")
        super().__init__(
            f"{'one problem' if count == 1 else f'{count} problems'} in the configuration {source}",
            next=next,
            details=lines,
        )
        self.problems = tuple(problems)

    def to_json(self) -> dict[str, Any]:
        """The error as a JSON object, with the problems as data."""
        return {**super().to_json(), "problems": [problem.to_json() for problem in self.problems]}
