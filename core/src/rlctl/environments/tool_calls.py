"""Calls of tools out of what a model has written. Nothing of it is evaluated. Standard library only."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)
_PLAIN = re.compile(r"([A-Za-z_]\w*)\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Call:
    """One call: the tool's name and its arguments by name."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


class CallError(Exception):
    """A call that cannot be read; its words are for the model."""


Functions = Mapping[str, Callable[..., Any]]
Parser = Callable[[str, Functions], list[Call]]


def parser_of(style: str) -> Parser:
    """The parser of a style.

    Raises:
        ValueError: there is no such style.
    """
    parsers: dict[str, Parser] = {"hermes": hermes, "plain": plain}
    if style not in parsers:
        raise ValueError(f"there is no style {style!r} of tool calls; there are {', '.join(parsers)}")
    return parsers[style]


def hermes(text: str, functions: Functions) -> list[Call]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them.

    Raises:
        CallError: one is not closed, or is no such JSON.
    """
    bodies = _HERMES.findall(text)
    if text.count("<tool_call>") != len(bodies):
        raise CallError("a <tool_call> is not closed by </tool_call>")
    return [_from_json(body) for body in bodies]


def _from_json(body: str) -> Call:
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CallError(f"a tool call is no JSON: {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise CallError('a tool call is {"name": ..., "arguments": {...}}')
    arguments: Any = value.get("arguments", {})
    if isinstance(arguments, str):  # some models write them as JSON in a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise CallError(f"the arguments of {value['name']} are no JSON object") from None
    if not isinstance(arguments, dict):
        raise CallError(f"the arguments of {value['name']} are no JSON object")
    return Call(value["name"], {str(key): item for key, item in arguments.items()})


def plain(text: str, functions: Functions) -> list[Call]:
    """``name[argument]`` for the names of ``functions``; the argument is the function's first one.

    Raises:
        CallError: a bracket is not closed, or the argument is of another type.
    """
    calls = [
        Call(name, _one_argument(functions[name], name, given))
        for name, given in _PLAIN.findall(text)
        if name in functions
    ]
    opened = sum(len(re.findall(rf"\b{re.escape(name)}\[", text)) for name in functions)
    if opened != len(calls):
        raise CallError("a call is written name[argument], and this one is not closed")
    return calls


def _one_argument(function: Callable[..., Any], name: str, given: str) -> dict[str, Any]:
    parameter = next(iter(inspect.signature(function, eval_str=True).parameters.values()), None)
    if parameter is None:
        return {}
    wanted = parameter.annotation
    if wanted in (int, float):
        try:
            return {parameter.name: wanted(given)}
        except ValueError:
            raise CallError(f"{name} wants a number, not {given!r}") from None
    return {parameter.name: given}
