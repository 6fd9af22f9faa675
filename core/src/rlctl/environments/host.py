"""The child side of an environment: its objects, one a conversation, and calls of their methods under a time limit.

Standard library only, and no import of ``rlctl.errors``: this runs beside the user's code. Sync methods run one after the other in
the main thread, where an alarm ends a call that takes too long; async ones run in one event loop, so many at a time.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlctl.data.rewards.user_job import describe, load_file
from rlctl.data.rewards.worker import JobError
from rlctl.environments.results import messages, stepped
from rlctl.environments.schemas import ToolError
from rlctl.environments.tools import ToolEnvironment

Outcome = tuple[str, Any]
"""("ok", value) or ("error", fields)."""


class _TimeUp(BaseException):
    """The alarm of a call; no ``except Exception`` of the user's catches it."""


def load(target: str, args: dict[str, Any], timeout_s: float, max_concurrency: int) -> Callable[[Any], Any]:
    """Factory of the job: ``(method, calls)`` to one :data:`Outcome` a call.

    Args:
        target: ``path/to/file.py:Class`` or ``module:Class``.
    """
    return Host(_find(target), target.rpartition(":")[0], args, timeout_s, max_concurrency)


class Host:
    """The objects of all open conversations."""

    def __init__(
        self, kind: Callable[..., Any], path: str, args: Mapping[str, Any], timeout_s: float, max_concurrency: int
    ) -> None:
        self._kind = kind
        self._path = path
        self._args = dict(args)
        self._timeout_s = timeout_s
        self._objects: dict[int, Any] = {}
        self._runner = asyncio.Runner()
        self._slots = asyncio.Semaphore(max_concurrency)
        sample = self._make()
        self._async = any(inspect.iscoroutinefunction(getattr(sample, name, None)) for name in ("reset", "step"))
        missing = [name for name in ("reset", "step") if not callable(getattr(sample, name, None))]
        if missing:
            raise JobError(kind="methods", missing=missing)
        self._tools = _tools(getattr(sample, "tools", None))
        self._drop(sample)

    def __call__(self, payload: tuple[str, Any]) -> Any:
        method, calls = payload
        if method == "describe":
            return {"async": self._async, "tools": self._tools}
        if method == "close":
            for number in calls:
                self._drop(self._objects.pop(number, None))
            return None
        if self._async:
            return self._runner.run(self._all(method, calls))
        return [self._one(method, number, value) for number, value in calls]

    # ---- calls ----------------------------------------------------------------------------------------------------
    def _one(self, method: str, number: int, value: Any) -> Outcome:
        try:
            with _alarm(self._timeout_s):
                found = self._method(method, number)(value)
                if inspect.isawaitable(found):
                    raise JobError(
                        kind="value", what=method, found="an awaitable", wanted="async def, or a plain value"
                    )
            return "ok", _plain(method, found)
        except BaseException as error:  # user code: SystemExit and KeyboardInterrupt included
            return self._failed(error)

    async def _all(self, method: str, calls: Sequence[tuple[int, Any]]) -> list[Outcome]:
        return list(await asyncio.gather(*(self._awaited(method, number, value) for number, value in calls)))

    async def _awaited(self, method: str, number: int, value: Any) -> Outcome:
        limit = None
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    found = self._method(method, number)(value)
                    if inspect.isawaitable(found):
                        found = await found
                return "ok", _plain(method, found)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # user code, which may have time limits of its own
                if isinstance(error, TimeoutError) and limit is not None and limit.expired():
                    return "error", {"kind": "timeout"}
                return self._failed(error)

    def _method(self, method: str, number: int) -> Callable[[Any], Any]:
        if method == "reset":
            self._objects[number] = self._make()
        return getattr(self._objects[number], method)

    def _make(self) -> Any:
        self._require_arguments()
        try:
            made = self._kind(**self._args)
            if isinstance(made, ToolEnvironment):
                made.require_ready()
            return made
        except JobError:
            raise
        except ToolError as error:
            raise JobError(
                kind="tool", what=error.what, wanted=error.wanted, file=error.file, line=error.line
            ) from None
        except Exception as error:  # user code
            raise JobError(kind="construct", **_own_part(describe(error, self._path))) from None

    def _require_arguments(self) -> None:
        try:
            signature = inspect.signature(self._kind)
        except (TypeError, ValueError):
            return  # written in C: calling it will tell
        try:
            signature.bind(**self._args)
        except TypeError as error:
            raise JobError(kind="arguments", error=str(error), takes=list(signature.parameters)) from None

    def _drop(self, thing: Any) -> None:
        close = getattr(thing, "close", None)
        if close is None:
            return
        try:
            found = close()
            if inspect.isawaitable(found):
                self._runner.run(_wait(found))
        except Exception:  # user code; the conversation is over, and its numbers are known
            return

    def _failed(self, error: BaseException) -> Outcome:
        if isinstance(error, _TimeUp):
            return "error", {"kind": "timeout"}
        if isinstance(error, JobError):
            return "error", error.fields
        return "error", {"kind": "raised", **describe(error, self._path)}


def _own_part(fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` of :func:`describe` without the frames of this package: its author can mend theirs alone."""
    ours = str(Path(__file__).parent)
    kept: list[str] = []
    inside = False
    for line in fields["lines"]:
        inside = line.startswith(f'  File "{ours}') or (inside and not line.startswith("  File "))
        if not inside:
            kept.append(line)
    return {**fields, "lines": kept}


async def _wait(found: Any) -> None:
    await found


def _plain(method: str, value: Any) -> Any:
    return messages(value, "reset") if method == "reset" else stepped(value)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise _TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _tools(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise JobError(kind="value", what="tools", found=type(tools).__name__, wanted="a list of JSON schemas")
    return [dict(tool) for tool in tools]


def _find(target: str) -> Callable[..., Any]:
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        module = load_file(place)
    else:
        try:
            module = importlib.import_module(place)
        except BaseException as error:  # user code
            raise JobError(kind="import", **describe(error, place)) from None
    found = getattr(module, name, None)
    if inspect.isroutine(found):
        code = getattr(found, "__code__", None)
        raise JobError(kind="function", line=getattr(code, "co_firstlineno", None))
    if not callable(found):
        classes = [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__]
        raise JobError(kind="missing", functions=[n for n in classes if not n.startswith("_")])
    return found
