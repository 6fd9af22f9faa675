"""The keys of the schema, walked: which exist below a place, what each wants, in words."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlctl.config.base import MAX_COUNT
from rlctl.config.document import Loc
from rlctl.config.schema import RunConfig

EngineModels = Mapping[str, type[BaseModel]]
"""Role (``actor``, ``ref``, ``rollout``) to the config model of its backend's ``engine`` section."""


def variants(annotation: Any) -> list[Any]:
    """The members of a union without None, and ``Annotated`` unwrapped."""
    if get_origin(annotation) is Annotated:
        return variants(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [v for arg in get_args(annotation) for v in variants(arg)]
    return [] if annotation in (None, type(None)) else [annotation]


def is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The section behind an annotation (``X``, ``X | None``), if it is one."""
    return next((v for v in variants(annotation) if is_model(v)), None)


def item_of(annotation: Any) -> Any:
    """The annotation of the items of ``tuple[X, ...]`` or ``list[X]``, else None."""
    for variant in variants(annotation):
        if get_origin(variant) in (tuple, list):
            return get_args(variant)[0]
    return None


def annotation_at(loc: Loc, engines: EngineModels | None = None, root: type[BaseModel] = RunConfig) -> Any:
    """The annotation of a place, with a ``FieldInfo``'s bounds; None for free mappings and unknown keys."""
    current: Any = root
    for depth, part in enumerate(loc):
        if isinstance(part, int):
            current = item_of(current.annotation if isinstance(current, FieldInfo) else current)
        else:
            annotation = current.annotation if isinstance(current, FieldInfo) else current
            model = model_of(annotation)
            if model is None and depth == 2 and loc[1] == "engine" and engines:
                model = engines.get(str(loc[0]))
            current = model.model_fields.get(part) if model else None
        if current is None:
            return None
    return current


def section_at(
    loc: Loc, engines: EngineModels | None = None, root: type[BaseModel] = RunConfig
) -> type[BaseModel] | None:
    """The model whose keys stand at ``loc``, or None where keys are free or nothing is known."""
    if engines and len(loc) == 2 and loc[1] == "engine" and root is RunConfig:
        return engines.get(str(loc[0]))
    found = annotation_at(loc, engines, root) if loc else root
    return model_of(found.annotation if isinstance(found, FieldInfo) else found)


def keys_at(loc: Loc, engines: EngineModels | None = None) -> list[str]:
    model = section_at(loc, engines)
    return list(model.model_fields) if model else []


def walk(
    root: type[BaseModel] = RunConfig, prefix: Loc = (), engines: EngineModels | None = None
) -> Iterator[tuple[Loc, FieldInfo]]:
    """Every key of the schema, sections before their keys; list items show as index 0."""
    for name, info in root.model_fields.items():
        loc = (*prefix, name)
        yield loc, info
        model = model_of(info.annotation)
        item = item_of(info.annotation)
        if model is None and item is not None and model_of(item) is not None:
            model, loc = model_of(item), (*loc, 0)
        if model is None and engines and len(loc) == 2 and name == "engine":
            model = engines.get(str(loc[0]))
        if model is not None:
            yield from walk(model, loc, engines)


def accepts_text_only(annotation: Any) -> bool:
    """True for ``str`` and ``str | None``: whatever is typed on the command line is the text itself."""
    if isinstance(annotation, FieldInfo):
        annotation = annotation.annotation
    return variants(annotation) == [str]


def accepts_text_list(annotation: Any) -> bool:
    """True for lists of text, where one bare word on the command line stands for a list of one."""
    if isinstance(annotation, FieldInfo):
        annotation = annotation.annotation
    item = item_of(annotation)
    return item is not None and variants(item) == [str]


def accepts_text_too(annotation: Any) -> bool:
    """True where text that is no list means something of its own."""
    if isinstance(annotation, FieldInfo):
        annotation = annotation.annotation
    return str in variants(annotation)


def wanted(field: Any, found: object = None) -> str:
    """What a field takes, in words: ``a whole number, at least 1``, ``one of auto, cpu, cuda, npu``.

    Args:
        field: the ``FieldInfo`` or annotation; None gives an empty text.
        found: what stood there: the technical bound on a count is told only to who went over it.
    """
    if field is None:
        return ""
    annotation, metadata = (field.annotation, list(field.metadata)) if isinstance(field, FieldInfo) else (field, [])
    members = list(_members(annotation, metadata))
    words = [_words(member, bounds, found) for member, bounds in members if member is not type(None)]
    text = " or ".join(dict.fromkeys(words)) or "a value"
    return f"{text}, or null" if any(member is type(None) for member, _ in members) else text


def _members(annotation: Any, metadata: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """The members of a union with the bounds that hold for each; ``Annotated`` and ``Field(...)`` unwrapped."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        bounds = [m for item in extra for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
        yield from _members(inner, [*metadata, *bounds])
    elif origin in (Union, types.UnionType):
        for arg in get_args(annotation):
            yield from _members(arg, metadata)
    else:
        yield (type(None) if annotation is None else annotation), metadata


def _bounds(metadata: list[Any], found: object) -> str:
    flat: list[Any] = []
    for item in metadata:
        flat += list(item) if isinstance(item, annotated_types.GroupedMetadata) else [item]
    words = []
    for item in flat:
        for attribute, text in (("gt", "more than"), ("ge", "at least"), ("lt", "less than"), ("le", "at most")):
            bound = getattr(item, attribute, None)
            if bound is None or (bound >= MAX_COUNT and not (isinstance(found, (int, float)) and found > bound)):
                continue
            words.append(f"{text} {bound}")
    return " and ".join(words)


def _words(annotation: Any, metadata: list[Any], found: object) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(arg) for arg in get_args(annotation))
    if origin in (tuple, list):
        args = [a for a in get_args(annotation) if a is not Ellipsis]
        if origin is tuple and Ellipsis not in get_args(annotation):
            return f"a list of {len(args)}: " + ", ".join(wanted(a) for a in args)
        least = next((m.min_length for m in metadata if getattr(m, "min_length", None)), 0)
        return (f"at least {least} in a list of " if least else "a list of ") + _plural(args[0])
    if origin in (dict, Mapping) or annotation is dict:
        return "a mapping"
    if not isinstance(annotation, type):
        return "a value"
    if issubclass(annotation, Enum):
        return "one of " + ", ".join(str(member.value) for member in annotation)
    if is_model(annotation):
        return "a section with keys such as " + ", ".join(list(annotation.model_fields)[:4])
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    word = next((text for kind, text in kinds.items() if issubclass(annotation, kind)), "a value")
    bounds = _bounds(metadata, found)
    return f"{word}, {bounds}" if bounds else word


def _plural(annotation: Any) -> str:
    inner = variants(annotation)
    if inner and is_model(inner[0]):
        return f"sections with keys such as {', '.join(list(inner[0].model_fields)[:4])}"
    return {str: "texts", int: "whole numbers", float: "numbers"}.get(inner[0] if inner else str, "values")


def describe(value: Any) -> str:
    """What was found, in words short enough for a line."""
    if value is None:
        return "null (nothing)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        keys = ", ".join(str(k)[:30] for k in list(value)[:4])
        return f"a mapping with {keys}" if keys else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, str):
        text = value if len(value) <= 60 else value[:57] + "..."
        return f"the text {text!r}"
    if isinstance(value, int) and abs(value) >= 10**18:
        # Python refuses to print whole numbers of more than 4300 digits.
        return f"a whole number of about {value.bit_length() * 0.30103:.0f} digits"
    return str(value)
