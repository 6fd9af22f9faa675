"""JSON schemas of Python functions, as chat templates want them. Standard library only."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

_HINTS = "str, int, float, bool, list, dict, Literal or a union of them"
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}


class ToolError(TypeError):
    """A tool that cannot be one: what is wrong, where, and what is wanted."""

    def __init__(self, what: str, wanted: str, function: object = None) -> None:
        super().__init__(what)
        self.what, self.wanted = what, wanted
        code = getattr(function, "__code__", None)
        self.file: str | None = getattr(code, "co_filename", None)
        self.line: int | None = getattr(code, "co_firstlineno", None)


def name_of(function: Callable[..., Any]) -> str:
    """What a tool is called."""
    return str(getattr(function, "__name__", type(function).__name__))


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """``{"type": "function", "function": {name, description, parameters}}`` of a function's signature and docstring.

    Raises:
        ToolError: a parameter has no type hint, one that JSON has no word for, or takes any number of values.
    """
    properties: dict[str, Any] = {}
    required: list[str] = []
    tool = f"the tool {name_of(function)}"
    try:
        signature = inspect.signature(function, eval_str=True)
    except Exception as error:  # a type hint is the user's code: a name that is not there, a broken expression
        raise ToolError(f"a type hint of {tool} cannot be read: {error}", _HINTS, function) from None
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
            what = f"{tool} takes {stars}{name}, which a call by name cannot give"
            raise ToolError(what, "parameters with names and type hints", function)
        if parameter.annotation is parameter.empty:
            raise ToolError(f"{tool} has no type hint for {name}", f"{name}: {_HINTS}", function)
        properties[name] = _type(parameter.annotation, name, function)
        if parameter.default is parameter.empty:
            required.append(name)
    described = inspect.cleandoc(function.__doc__ or "")
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name_of(function), "description": described, "parameters": parameters},
    }


def _type(hint: Any, name: str, function: Callable[..., Any]) -> dict[str, Any]:
    if isinstance(hint, type) and hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        kinds = [_type(one, name, function) for one in inner if one is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if hint is list or origin is list:
        return {"type": "array", **({"items": _type(inner[0], name, function)} if inner else {})}
    if hint is dict or origin is dict:
        return {"type": "object"}
    shown = hint.__name__ if isinstance(hint, type) else repr(hint)
    what = f"{name} of the tool {name_of(function)} has the type hint {shown}, which JSON has no word for"
    raise ToolError(what, f"{name}: {_HINTS}", function)
