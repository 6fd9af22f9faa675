"""Whole cause chains of exceptions, as data. The last link is usually the one that a user can mend."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

AT = "at"
"""Type of a link that is no exception but a frame of a process that died or hung."""
_LONGEST = 2000
_MOST_LINKS = 20


@dataclass(frozen=True)
class Cause:
    """One exception of a chain.

    Args:
        type: class name, with its module when it is no builtin.
        message: its text, at most 2000 characters.
        where: ``file:line`` of the last own frame, or empty.
        module: ``error.name`` of an ImportError (the module that is missing or broken), or None.
    """

    type: str
    message: str
    where: str = ""
    module: str | None = None

    @property
    def line(self) -> str:
        """One line for people: ``ImportError: libfoo.so: cannot open shared object file (toy/engine.py:3)``."""
        if self.type == AT:
            return f"at {self.message}"
        text = f"{self.type}: {self.message}" if self.message else self.type
        return f"{text} ({self.where})" if self.where else text

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def cause_chain(error: BaseException) -> tuple[Cause, ...]:
    """The exception and everything that led to it, outermost first.

    Follows ``__cause__``, else ``__context__`` unless it was suppressed, and goes into exception groups.
    """
    return tuple(_describe(link) for _, link in zip(range(_MOST_LINKS), links(error), strict=False))


def links(error: BaseException) -> Iterator[BaseException]:
    """The exceptions that :func:`cause_chain` describes."""
    yield from _links(error, set())


def _links(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    if id(error) in seen:
        return
    seen.add(id(error))
    yield error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _links(inner, seen)
    if error.__cause__ is not None:
        yield from _links(error.__cause__, seen)
    elif error.__context__ is not None and not error.__suppress_context__:
        yield from _links(error.__context__, seen)


def _describe(error: BaseException) -> Cause:
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        message = str(error)
    except Exception:  # a foreign exception whose __str__ raises must not hide the failure that it reports
        message = "(its text cannot be printed)"
    if isinstance(error, SystemExit):
        message = f"the module called exit({error.code!r})"
    module = error.name if isinstance(error, ImportError) else None
    return Cause(name, message.strip()[:_LONGEST], _where(error), module)


def is_own_frame(filename: str) -> bool:
    """True for the frames through which every plugin is imported: they say nothing about the plugin."""
    path = filename.replace("\\", "/")
    return path.endswith(("importlib/__init__.py", "rlctl/declare.py", "rlctl/probing/child.py"))


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen importlib")]
    frames = [f for f in frames if not is_own_frame(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
