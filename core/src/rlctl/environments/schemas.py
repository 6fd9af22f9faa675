"""JSON schemas of Python functions, as chat templates want them. Standard library only."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """``{"type": "function", "function": {name, description, parameters}}`` of a function's signature and docstring.

    Raises:
        TypeError: a parameter has no type hint, one that JSON has no word for, or takes any number of values.
    """
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"the tool {function.__name__} takes {name} in a way that a call by name cannot give")
        if parameter.annotation is parameter.empty:
            raise TypeError(f"the tool {function.__name__} has no type hint for {name}")
        properties[name] = _type(parameter.annotation, f"{name} of the tool {function.__name__}")
        if parameter.default is parameter.empty:
            required.append(name)
    described = inspect.cleandoc(function.__doc__ or "")
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": described, "parameters": parameters},
    }


def _type(hint: Any, where: str) -> dict[str, Any]:
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        kinds = [_type(one, where) for one in inner if one is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if hint is list or origin is list:
        return {"type": "array", **({"items": _type(inner[0], where)} if inner else {})}
    if hint is dict or origin is dict:
        return {"type": "object"}
    raise TypeError(f"{where} has the type hint {hint!r}, which JSON has no word for")
