"""Validation, and its outcome in plain words. No word of the validating library reaches the reader."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlctl.config.document import Document, Loc, Origin, dotted
from rlctl.config.problems import Problem
from rlctl.config.schema_paths import EngineModels, annotation_at, describe, section_at, wanted
from rlctl.config.suggest import for_choice, for_key

M = TypeVar("M", bound=BaseModel)
UnknownKey = Callable[[Loc, str], tuple[str, list[str]]]
_ROUNDS = 6
_NAME = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)*\b")


def check(
    model: type[M],
    document: Document,
    *,
    prefix: Loc = (),
    engines: EngineModels | None = None,
    unknown: UnknownKey | None = None,
) -> tuple[M | None, list[Problem]]:
    """Validate the values of ``document`` below ``prefix`` with ``model``.

    A check across keys runs only once its keys are well-formed, so a single pass would hide it behind any other fault.
    Therefore wrong values are taken away (their defaults stand in) and what is left is validated again, until nothing new
    shows; a later complaint that names a key which was taken away is its consequence, and is not reported.

    Returns:
        The model (None when there is any problem) and the problems.
    """
    hint = unknown or (lambda section, key: for_key(section, key, engines))
    tree = copy.deepcopy(document.get(prefix, {})) if prefix else copy.deepcopy(document.data)
    problems: list[Problem] = []
    removed: set[str] = set()
    for _ in range(_ROUNDS):
        try:
            # JSON mode is strict about types (no "5" for 5, no yes for true) but lets lists be tuples and words be enums.
            result = model.model_validate_json(json.dumps(tree), strict=True)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=True, include_input=False)
        else:
            return (None if problems else result), problems
        taken_away, later = False, set[str]()
        gone: list[Loc] = []
        # Places first: in a tree without the value, the name of a union's branch looks like a key.
        for fault, loc in [(fault, (*prefix, *_real_loc(fault["loc"], tree))) for fault in faults]:
            if _emptied(fault, faults) or any(loc[: len(place)] == place for place in gone):
                continue  # also another branch of a union that has complained of this value
            for problem, names, places in _problems(fault, loc, document, engines, hint, model, len(prefix)):
                if _consequence(fault, problem, removed):
                    # Taken away too, so that complaints of its absence are consequences again: those that come later.
                    later |= names
                else:
                    if problem not in problems:
                        problems.append(problem)
                    removed |= names
                for place in places:
                    gone += [place] if place else []
                    taken_away |= _remove(tree, place[len(prefix) :])
        removed |= later
        if not taken_away:
            break
    return None, problems


def _real_loc(loc: tuple[str | int, ...], tree: Any) -> Loc:
    """The place without the branch names of a union, which are in the library's location but not in the file."""
    out: list[str | int] = []
    here = tree
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        if isinstance(here, dict) and (part in here or last):
            out.append(part)
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int):
            out.append(part)
            here = here[part] if 0 <= part < len(here) else None
    return tuple(out)


def _emptied(fault: Any, faults: Sequence[Any]) -> bool:
    """True for a list that is too short only because its wrong items were not counted."""
    where = fault["loc"]
    return fault["type"] == "too_short" and any(o["loc"][: len(where)] == where != o["loc"] for o in faults)


def _consequence(fault: Any, problem: Problem, removed: set[str]) -> bool:
    """True for a complaint that only follows from a value that was taken away."""
    if fault["type"] == "missing":
        return problem.path in removed
    if fault["type"] == "value_error":
        return any(name in problem.what for name in removed)
    return False


def _remove(tree: Any, loc: Loc) -> bool:
    """Take the value at ``loc`` out of ``tree``; the list around an item goes as a whole. True when something went."""
    for index, part in enumerate(loc):
        if isinstance(part, int):
            return _remove(tree, loc[:index])
    here = tree
    for part in loc[:-1]:
        if not isinstance(here, dict) or part not in here:
            return False
        here = here[part]
    if loc and isinstance(here, dict) and loc[-1] in here:
        del here[loc[-1]]
        return True
    return False


def _problems(
    fault: Any,
    loc: Loc,
    document: Document,
    engines: EngineModels | None,
    hint: UnknownKey,
    model: type[BaseModel],
    depth: int,
) -> list[tuple[Problem, set[str], list[Loc]]]:
    """The problems in words (a check across keys may have several, one a line), with what is taken away for the next
    round: dotted paths whose later complaints are only consequences, and places."""
    if fault["type"] == "value_error":
        text = str(fault["ctx"]["error"]) if "error" in fault.get("ctx", {}) else fault["msg"].partition(", ")[2]
        return [_across_keys(line, loc, document, model, depth) for line in text.splitlines()]
    return [(*_problem(fault, loc, document, engines, hint, model, depth), [loc])]


def _problem(
    fault: Any,
    loc: Loc,
    document: Document,
    engines: EngineModels | None,
    hint: UnknownKey,
    model: type[BaseModel],
    depth: int,
) -> tuple[Problem, set[str]]:
    """The problem of one key in words, and the paths whose later complaints are only its consequence."""
    path = dotted(loc)
    origin = document.origin(loc)
    kind: str = fault["type"]
    field = annotation_at(loc[depth:], None if depth else engines, model)
    if kind == "extra_forbidden":
        advice, named = hint(loc[:-1], str(loc[-1]))
        return Problem(path, str(origin), "unknown key", hint=advice), {path, *named}
    if kind == "missing":
        if loc and isinstance(loc[-1], int):
            found = describe(document.get(loc[:-1]))
            outer = wanted(annotation_at(loc[depth:-1], engines, model))
            return Problem(
                dotted(loc[:-1]), str(document.origin(loc[:-1])), "", found, outer, _place(document, loc[:-1])
            ), {path}
        return Problem(path, str(_section_origin(document, loc)), "missing", "", wanted(field), _example(loc)), {path}
    if kind in ("too_long", "too_short") and loc:
        return Problem(path, str(origin), "", describe(document.get(loc)), wanted(field), _place(document, loc)), {path}
    found = document.get(loc)
    want = wanted(field, found) or _plain(fault["msg"])
    advice = ""
    if kind in ("literal_error", "enum"):
        choices = [
            choice.strip("'")
            for choice in str(fault.get("ctx", {}).get("expected", "")).replace(" or ", ", ").split(", ")
        ]
        advice = for_choice(found, choices)
    elif found is None and want.startswith("a section"):
        advice = f"write {loc[-1]}: {{}} or take the line out"
    elif want.startswith("a list") and isinstance(found, (str, int, float)) and not isinstance(found, bool):
        advice = f"write {loc[-1]}: [{describe(found) if not isinstance(found, str) else found[:60]}]"
    elif isinstance(found, str) and section_at(loc[depth:], engines, model) is None:
        advice = _text_advice(found, want)
    elif isinstance(found, (int, float)) and "text" in want:
        advice = f"put it in quotes: {loc[-1]}: '{describe(found)}'"
    return Problem(path, str(origin), "", describe(found), want, advice or _place(document, loc)), {path}


def _across_keys(
    text: str, loc: Loc, document: Document, model: type[BaseModel], depth: int
) -> tuple[Problem, set[str], list[Loc]]:
    """A check of a section complains of keys: the reader is led to those that its message names, dotted or bare."""
    words = [tuple(name.split(".")) for name in dict.fromkeys(_NAME.findall(text))]
    section = section_at(loc[depth:], None, model)
    keys = set(section.model_fields) if section else set()
    named = [w for w in words if len(w) > 1 and w[: len(loc)] == loc and annotation_at(w) is not None]
    named += [(*loc, w[0]) for w in words if len(w) == 1 and w[0] in keys and (*loc, w[0]) not in named]
    given = [place for place in named if document.has(place)]
    place = next(iter(given or named), loc) if section else loc
    hint = " or ".join(_place(document, p, by_name=len(given) > 1) for p in given) or _place(document, place)
    problem = Problem(dotted(place), str(document.origin(place)), text, hint=hint)
    return problem, {dotted(p) for p in given or [place]}, given or [place]


def _section_origin(document: Document, loc: Loc) -> Origin:
    return document.origin(loc[:-1]) if len(loc) > 1 else document.origins.get((), document.origin(()))


def _example(loc: Loc) -> str:
    examples: dict[Loc, str] = {
        ("model",): "add model: with path: a directory or hub id, or give --model",
        ("data",): "add data: with train_files: [rows.jsonl] or task:, or give --data",
    }
    return examples.get(loc, f"add {loc[-1]}: to {dotted(loc[:-1]) or 'the file'}")


def _text_advice(found: str, want: str) -> str:
    """Why a word is not the number or switch that it looks like."""
    low = found.strip().lower()
    if "true or false" in want and low in ("yes", "on", "y", "no", "off", "n", "true", "false", "1", "0"):
        return f"write {'true' if low in ('yes', 'on', 'y', 'true', '1') else 'false'}, without quotes"
    if "number" in want:
        try:
            if not math.isfinite(float(low.replace(",", "").replace("_", ""))):
                return ""
        except ValueError:
            return ""
        return f"write {low.replace(',', '').replace('_', '')}, without quotes or separators"
    return ""


def _place(document: Document, loc: Loc, by_name: bool = False) -> str:
    """The remedy where there is no better one: which line, override or flag to change (spelt out with ``by_name``)."""
    origin = document.origin(loc)
    name = dotted(loc) or "the file"
    if origin.kind == "file":
        return f"change {name} at line {origin.line}"
    if origin.on_command_line:
        return f"change the {origin.text if by_name else origin.kind}"
    return f"set {name}"


def _plain(message: str) -> str:
    """A library's message for a type this module has no words for, without its jargon."""
    for phrase, words in (
        ("Input should be ", ""),
        ("a valid string", "text"),
        ("a valid integer", "a whole number"),
        ("a valid dictionary", "a mapping"),
        ("an object", "a section"),
    ):
        message = message.replace(phrase, words)
    return message[:1].lower() + message[1:] if message else "a value"
