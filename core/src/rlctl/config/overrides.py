"""What the command line sets: ``actor.optim.lr=1e-6`` and the flags that stand for dotted paths.

Precedence, lowest first: defaults, the file, flags, overrides; of two overrides of one key the later one wins. A flag and an
override that want different values for one key are a problem, not a race.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.config.document import Document, Loc, Origin, PlaceError, dotted
from rlctl.config.problems import Problem
from rlctl.config.schema_paths import (
    accepts_text_list,
    accepts_text_only,
    accepts_text_too,
    annotation_at,
    describe,
    wanted,
)
from rlctl.config.yaml_source import parse_value
from rlctl.errors import ConfigError

FLAGS: dict[str, tuple[str, ...]] = {
    "model": ("model.path",),
    "tokenizer": ("model.tokenizer",),
    "data": ("data.train_files",),
    "val_data": ("data.val_files",),
    "backend": ("actor.backend", "ref.backend", "critic.backend"),
    "rollout": ("rollout.backend",),
    "algorithm": ("algorithm.adv_estimator", "trainer.type"),
    "nproc": ("runtime.nproc",),
    "launcher": ("runtime.launcher",),
    "address": ("runtime.ray.address",),
    "device": ("trainer.device",),
    "seed": ("trainer.seed",),
    "steps": ("trainer.total_training_steps",),
    "name": ("trainer.experiment_name",),
}
"""Flag (without dashes, ``-`` as ``_``) to the dotted paths that it sets."""

REPLACES: dict[str, tuple[str, ...]] = {
    "model": ("model.config", "model.init", "model.tokenizer", "model.revision", "model.chat_template"),
    "data": ("data.task", "data.val_files", "data.columns"),
}
"""Keys of the file that speak of what the flag replaces, and therefore go with it."""

_PART = re.compile(r"""(?:^|\.)(?:'([^']*)'|"([^"]*)"|([^.\[\]'"]+))|\[(\d{1,9})\]""")


def parse_key(text: str) -> Loc | None:
    """``reward.components[0].weight`` (or ``.0.``) as a place; None when it cannot be read."""
    loc: list[str | int] = []
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        if match is None or match.end() == position:
            return None
        single, double, plain, index = match.groups()
        if index is not None:
            loc.append(int(index))
        else:
            loc.append(next(part for part in (single, double, plain) if part is not None))
        position = match.end()
    return tuple(loc) or None


def apply_flags(document: Document, flags: Mapping[str, Any], problems: list[Problem]) -> list[str]:
    """Set what the flags say (None: not given). Returns a line for each key of the file that a flag made void."""
    notices: list[str] = []
    for name, value in flags.items():
        if value is None or value == ():
            continue
        assert name in FLAGS, f"flag {name!r} has no place in the configuration"
        origin = Origin("flag", f"flag --{name.replace('_', '-')}")
        gone = [path for path in REPLACES.get(name, ()) if document.has(_loc(path))]
        for path in gone:
            document.delete(_loc(path))
        if gone:
            notices.append(f"--{name.replace('_', '-')} replaces {', '.join(gone)} of the file too")
        for path, item in _flag_values(document, name, value):
            _set(document, _loc(path), item, origin, problems)
    return notices


def _flag_values(document: Document, name: str, value: Any) -> list[tuple[str, Any]]:
    if name in ("data", "val_data"):
        return [(FLAGS[name][0], [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)])]
    if name == "algorithm":
        # SFT and what learns from pairs have no advantages; everything else says how rewards become advantages.
        return (
            [("trainer.type", value)]
            if value in ("sft", "dpo", "rm")
            else [(FLAGS[name][0], value), ("trainer.type", "rl")]
        )
    if name == "backend":
        # Reference and critic follow the actor unless the file gives them a backend of their own: then all change together.
        return [(path, value) for path in FLAGS[name] if path == "actor.backend" or document.get(_loc(path))]
    return [(FLAGS[name][0], value)]


def apply_overrides(document: Document, overrides: Sequence[str], problems: list[Problem]) -> None:
    """Set each ``KEY=VALUE``; what cannot be read becomes a problem and leaves the document as it was."""
    for text in overrides:
        origin = Origin("override", f"override {_shown(text)}")
        key, equals, raw = text.partition("=")
        key = key.strip()
        loc = parse_key(key)
        if not equals:
            hint = f"write {_shown(key) or 'KEY'}=VALUE, for example actor.optim.lr=1e-6"
            problems.append(Problem("", str(origin), "no value is given", hint=hint))
            continue
        if loc is None or isinstance(loc[0], int) or not key.isprintable() or key[:1] in ("+", "~"):
            hint = "write KEY=VALUE with a dotted key, without + or ~ in front, for example actor.optim.lr=1e-6"
            problems.append(Problem("", str(origin), f"{_shown(key)!r} is no dotted key", hint=hint))
            continue
        loc = _indexed(document, loc)
        value = _value(raw, annotation_at(loc), loc, origin, problems)
        if value is _UNREADABLE:
            continue
        held = document.origins.get(loc)
        if held is not None and held.kind == "flag" and document.get(loc) != value:
            what = f"{held} says {describe(document.get(loc))} and the override says {describe(value)}"
            problems.append(Problem(dotted(loc), str(origin), what, hint="give one of the two"))
            continue
        _set(document, loc, value, origin, problems)


def _shown(text: str) -> str:
    """An argument on one line of bounded length."""
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= 80 else text[:77] + "..."


_UNREADABLE = object()


def _value(raw: str, known: Any, loc: Loc, origin: Origin, problems: list[Problem]) -> Any:
    raw = raw.strip()
    if known is not None and accepts_text_only(known):
        return _text(raw, known)
    try:
        value = parse_value(raw)
    except ConfigError as error:
        hint = "put text in quotes: KEY='\"...\"', and a list in brackets: KEY='[a, b]'"
        problems.append(Problem(dotted(loc), str(origin), "the value is no YAML", error.found or "", hint=hint))
        return _UNREADABLE
    if known is not None and accepts_text_list(known) and isinstance(value, str):
        return value if accepts_text_too(known) and _is_no_name(raw) else [value]
    return value


def _is_no_name(raw: str) -> bool:
    """Of a setting that takes names in a list, or other text: text in quotes, or with what no name has (a regular expression)."""
    return re.fullmatch(r"[\w.]+", raw) is None


def _text(raw: str, known: Any) -> str | None:
    """What is typed for a text is the text itself (``123``, ``a: b``, ``x # y``), unless it is null or in quotes."""
    if raw in ("", "null", "~") and "null" in wanted(known):
        return None
    if raw[:1] in ("'", '"'):
        try:
            value = parse_value(raw)
        except ConfigError:
            return raw
        return value if isinstance(value, str) else raw
    return raw


def _indexed(document: Document, loc: Loc) -> Loc:
    """Digits become an index where a list stands: ``components.0.weight`` as well as ``components[0].weight``."""
    out: Loc = ()
    for part in loc:
        if isinstance(part, str) and part.isdecimal() and len(part) < 10 and isinstance(document.get(out), list):
            part = int(part)
        out = (*out, part)
    return out


def _set(document: Document, loc: Loc, value: Any, origin: Origin, problems: list[Problem]) -> None:
    if not _is_text(value):
        # Bytes of the command line that are no UTF-8 arrive as lone surrogates.
        problems.append(
            Problem(dotted(loc), str(origin), "the value is not UTF-8 text", hint=f"change the {origin.kind}")
        )
        return
    try:
        document.set(loc, value, origin)
    except PlaceError as error:
        there = document.get(error.loc)
        problems.append(
            Problem(
                dotted(loc),
                str(origin),
                f"{dotted(error.loc)} cannot be gone into",
                found=describe(there) if document.has(error.loc) else "nothing there",
                wanted=error.wanted,
                hint=f"set {dotted(error.loc)} itself, or mend it at {document.origin(error.loc)}",
            )
        )


def _is_text(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_text(item) for item in value)
    if isinstance(value, dict):
        return all(_is_text(key) and _is_text(item) for key, item in value.items())
    return not isinstance(value, str) or not any("\ud800" <= char <= "\udfff" for char in value)


def _loc(path: str) -> Loc:
    return tuple(path.split("."))
