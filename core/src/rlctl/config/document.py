"""A configuration before it is validated: plain values, and where each of them came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Loc = tuple[str | int, ...]
"""A place in a configuration: keys of mappings and indices of lists, from the top."""


@dataclass(frozen=True)
class Origin:
    """Where a value came from. ``line`` counts from 1 and is 0 where there is no file."""

    kind: Literal["file", "override", "flag", "default", "derived"]
    text: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.text}:{self.line}" if self.kind == "file" else self.text

    @property
    def on_command_line(self) -> bool:
        return self.kind in ("override", "flag")


DEFAULT = Origin("default", "default")


def dotted(loc: Loc) -> str:
    """``("reward", "components", 0, "name")`` as ``reward.components[0].name``; odd keys are quoted."""
    out = ""
    for part in loc:
        if isinstance(part, int):
            out += f"[{part}]"
            continue
        plain = part.isprintable() and part != "" and not any(c in part for c in ".[]=\"' ")
        text = part if plain else repr(part)
        if len(text) > 60:
            text = text[:57] + "..."
        out += f".{text}" if out else text
    return out


def leaves(value: Any, loc: Loc = ()) -> Iterator[tuple[Loc, Any]]:
    """Scalars, lists of scalars and empty containers, each with its place."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, (*loc, str(key)))
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, (*loc, index))
    else:
        yield loc, value


class PlaceError(Exception):
    """A value cannot be set at a place, because ``loc`` (a part of the way) holds something else."""

    def __init__(self, loc: Loc, wanted: str) -> None:
        super().__init__(dotted(loc))
        self.loc = loc
        self.wanted = wanted


@dataclass
class Document:
    """Nested dicts, lists and scalars, with an origin for each node that was given (not for defaults)."""

    data: dict[str, Any]
    origins: dict[Loc, Origin] = field(default_factory=dict)

    def get(self, loc: Loc, default: Any = None) -> Any:
        """The value at ``loc``, or ``default`` where the way does not lead there."""
        value: Any = self.data
        part: Any
        for part in loc:
            inside = isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value)
            if inside or (isinstance(value, dict) and part in value):
                value = value[part]
            else:
                return default
        return value

    def has(self, loc: Loc) -> bool:
        marker = object()
        return self.get(loc, marker) is not marker

    def origin(self, loc: Loc) -> Origin:
        """Origin of the value at ``loc`` or of the nearest section around it; the default's where nothing was given."""
        if not self.has(loc):
            # A key that was not given: point at the section it is missing from.
            loc = loc[:-1]
        while loc:
            if loc in self.origins:
                return self.origins[loc]
            loc = loc[:-1]
        return self.origins.get((), DEFAULT)

    def leaf_origin(self, loc: Loc) -> Origin:
        """Origin of a leaf of the resolved configuration; ``default`` when it was not given."""
        return self.origin(loc) if self.has(loc) and loc else DEFAULT

    def set(self, loc: Loc, value: Any, origin: Origin) -> None:
        """Put ``value`` at ``loc``, making mappings on the way; what was there is replaced with everything below it.

        Raises:
            PlaceError: the way leads through a scalar, or past the end of a list.
        """
        here: Any = self.data
        for depth, part in enumerate(loc[:-1]):
            step = self._child(here, part, loc[: depth + 1])
            if step is None:
                step = {}
                self._assign(here, part, step, loc[: depth + 1])
                self.origins[loc[: depth + 1]] = origin
            if not isinstance(step, (dict, list)):
                raise PlaceError(loc[: depth + 1], "a section")
            here = step
        self._child(here, loc[-1], loc)
        self._assign(here, loc[-1], value, loc)
        self._forget(loc)
        self.mark(loc, value, origin)

    def delete(self, loc: Loc) -> None:
        """Take away a key (of a mapping) and all below it; a place that does not exist is left alone."""
        parent = self.get(loc[:-1])
        if isinstance(parent, dict):
            parent.pop(loc[-1], None)
            self._forget(loc)

    def mark(self, loc: Loc, value: Any, origin: Origin) -> None:
        """Give ``value`` at ``loc`` and everything inside it one origin."""
        self.origins[loc] = origin
        if isinstance(value, dict):
            for key, item in value.items():
                self.mark((*loc, key), item, origin)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self.mark((*loc, index), item, origin)

    def _forget(self, loc: Loc) -> None:
        for known in [known for known in self.origins if known[: len(loc)] == loc]:
            del self.origins[known]

    @staticmethod
    def _child(here: Any, part: str | int, loc: Loc) -> Any:
        if isinstance(here, list):
            if not isinstance(part, int) or not 0 <= part < len(here):
                raise PlaceError(loc, f"an index from 0 to {len(here) - 1}" if here else "a list that is not empty")
            return here[part]
        if isinstance(part, int):
            raise PlaceError(loc[:-1], "a list")
        return here.get(part)

    @staticmethod
    def _assign(here: Any, part: Any, value: Any, loc: Loc) -> None:
        here[part] = value
