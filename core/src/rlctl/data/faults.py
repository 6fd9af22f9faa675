"""What is wrong with a row, as data. Readers and converters collect faults; only the last caller raises or prints them."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlctl.errors import DataError

SHOWN = 10
"""Faults that an error message spells out; the rest are counted."""


@dataclass(frozen=True)
class Fault:
    """One fault of a dataset.

    Args:
        kind: short machine-readable word, for example ``json``, ``columns``, ``empty_prompt``, ``overlong``.
        where: ``file.jsonl:12``, ``file.parquet row 12`` or the name of a split.
        what: one sentence, without the place.
        next: the command or edit that mends it.
        index: index of the row in its split, when the fault belongs to one row.
        fatal: the rest of the file could not be read.
        count: how many rows share the fault, where one fault stands for many.
    """

    kind: str
    where: str
    what: str
    next: str
    index: int | None = None
    fatal: bool = False
    count: int = 1

    def line(self) -> str:
        return f"{self.where}: {self.what}"


def raise_faults(what: str, faults: Sequence[Fault]) -> None:
    """Raise one DataError with the first faults spelled out; return when there are none."""
    if not faults:
        return
    details = [fault.line() for fault in faults[:SHOWN]]
    if len(faults) > SHOWN:
        details.append(f"... and {len(faults) - SHOWN} more")
    raise DataError(what, details=details, next=faults[0].next)


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option that ``name`` was probably meant to be, or None."""
    folded = {option.lower(): option for option in options}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else None


def listing(names: Iterable[str], limit: int = 20) -> str:
    """A comma-separated list of names, cut after ``limit``. Unprintable characters are escaped."""
    shown = [name if name.isprintable() else ascii(name) for name in names]
    more = f", ... ({len(shown)} in all)" if len(shown) > limit else ""
    return (", ".join(shown[:limit]) + more) or "none"


def excerpt(value: object, limit: int = 60) -> str:
    """A short, printable picture of any value for an error message."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    text = ascii(text) if not text.isprintable() else text
    return text if len(text) <= limit else text[: limit - 3] + "..."


def type_name(value: object) -> str:
    """The type of a parsed value, in words that a writer of JSON uses."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, (bytes, bytearray)):
        return "raw bytes"
    return f"a {type(value).__name__}"


def show_path(path: str | Path) -> str:
    """``path`` as a reader would type it: relative to the working directory when it lies below it."""
    text = os.fspath(path)
    try:
        relative = os.path.relpath(text)
    except ValueError:  # another drive on Windows
        relative = text
    shown = text if relative.startswith("..") else relative
    return shown if shown.isprintable() else ascii(shown)[1:-1]
