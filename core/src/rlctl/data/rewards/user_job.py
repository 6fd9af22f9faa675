"""The child side of a user's reward function: load the file, call the function, report its own errors.

Standard library only, and no import of ``rlctl.errors``: this runs beside the user's code.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rlctl.data.finite import finite
from rlctl.data.rewards.worker import JobError

OFFERED = (
    *("data_source", "solution_str", "ground_truth", "extra_info"),  # the field's names
    *("prompt", "completion", "answer", "finish_reason"),  # ours: completion is solution_str, answer is ground_truth
)
"""Keyword arguments that a function may ask for by name."""

MAX_FRAMES = 12


def load(path: str, function: str, args: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, float]]:
    """Factory of the job: the user's function with the arguments that its signature accepts."""
    module = load_file(path)
    target = getattr(module, function, None)
    if not callable(target):
        raise JobError(kind="missing", functions=_functions(module))
    accepted = _accepted(target, args)

    def job(payload: dict[str, Any]) -> dict[str, float]:
        try:
            value = target(**{name: payload[name] for name in accepted}, **args)
        except BaseException as error:  # user code: SystemExit and KeyboardInterrupt included
            raise JobError(kind="raised", **describe(error, path)) from None
        return _numbers(value)

    return job


def load_file(path: str) -> ModuleType:
    # The user's file may import its neighbours.
    sys.path.insert(0, str(Path(path).parent))
    name = f"rlctl_user_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # user code
        raise JobError(kind="import", **describe(error, path)) from None
    return module


def _functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


def _accepted(target: Callable[..., Any], args: Mapping[str, Any]) -> tuple[str, ...]:
    """The offered names that the function takes.

    Raises:
        JobError: it needs an argument that nobody gives, or is given one that it does not take.
    """
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return OFFERED
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        open_ended = True
    else:
        open_ended = False
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if p.kind is p.POSITIONAL_ONLY or (p.name not in OFFERED and p.name not in args)
    ]
    unknown = [] if open_ended else [name for name in args if name not in names]
    if required or unknown:
        raise JobError(kind="signature", required=required, unknown=unknown, offered=list(OFFERED), takes=sorted(names))
    return tuple(name for name in OFFERED if (open_ended or name in names) and name not in args)


def _numbers(value: object) -> dict[str, float]:
    """``{"score": ..., further numbers}`` from what the function returned."""
    if inspect.isawaitable(value):
        close = getattr(value, "close", None)
        if close is not None:
            close()
        raise JobError(kind="value", found="a coroutine (the function is async)")
    if isinstance(value, Mapping):
        if "score" not in value:
            raise JobError(
                kind="value", found=f"a dict without 'score', with {', '.join(map(str, value)) or 'nothing'}"
            )
        score = _float(value["score"])
        extras = {str(key): finite(item) for key, item in value.items() if key != "score"}
        return {"score": score, **{key: number for key, number in extras.items() if number is not None}}
    return {"score": _float(value)}


def _float(value: object) -> float:
    number = finite(value)
    if number is None:
        shown = repr(value)
        raise JobError(kind="value", found=shown if len(shown) <= 80 else f"{type(value).__name__}: {shown[:77]}...")
    return number


def describe(error: BaseException, path: str) -> dict[str, Any]:
    """The user's part of a traceback: from the first frame in their file on."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((place for place, frame in enumerate(frames) if frame.filename == path), len(frames))
    own = frames[first:]
    in_file = [frame for frame in own if frame.filename == path]
    line = in_file[-1].lineno if in_file else None
    if isinstance(error, SyntaxError) and error.filename == path:
        line = error.lineno
    if len(own) > MAX_FRAMES:
        own = [*own[: MAX_FRAMES // 2], *own[-MAX_FRAMES // 2 :]]
    lines = [part for text in traceback.format_list(own) for part in text.rstrip().splitlines()]
    if isinstance(error, SyntaxError) and error.text:
        lines.append(f"    {error.text.strip()}")
    message = str(error).strip().splitlines()
    head = message[0] if message else ""
    return {"error": f"{type(error).__name__}: {head}" if head else type(error).__name__, "line": line, "lines": lines}
