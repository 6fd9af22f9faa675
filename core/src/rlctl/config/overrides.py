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
from rlctl.config.schema_paths import accepts_text_list, accepts_text_only, annotation_at, describe
from rlctl.config.yaml_source import parse_value
from rlctl.errors import ConfigError

FLAGS: dict[str, tuple[str, ...]] = {
    "model": ("model.path",),
    "tokenizer": ("model.tokenizer",),
    "data": ("data.train_files",),
    "val_data": ("data.val_files",),
    "backend": ("actor.backend", "ref.backend"),
    "rollout": ("rollout.backend",),
    "algorithm": ("algorithm.name", "trainer.type"),
    "nproc": ("trainer.nproc",),
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
        # SFT is a trainer of its own and has no advantages; everything else is a name of the algorithm section.
        return [("trainer.type", "sft")] if value == "sft" else [("algorithm.name", value), ("trainer.type", "rl")]
    if name == "backend":
        # The reference follows the actor unless the file gives it a backend of its own: then both change together.
        both = [path for path in FLAGS[name] if path != "ref.backend" or document.get(("ref", "backend"))]
        return [(path, value) for path in both]
    return [(FLAGS[name][0], value)]


def apply_overrides(document: Document, overrides: Sequence[str], problems: list[Problem]) -> None:
    """Set each ``KEY=VALUE``; what cannot be read becomes a problem and leaves the document as it was."""
    for text in overrides:
        shown = text if len(text) <= 80 else text[:77] + "..."
        origin = Origin("override", f"override {shown}")
        key, equals, raw = text.partition("=")
        loc = parse_key(key.strip())
        if not equals:
            problems.append(
                Problem(
                    "",
                    str(origin),
                    "no value is given",
                    hint=f"write {key.strip() or 'KEY'}=VALUE, for example actor.optim.lr=1e-6",
                )
            )
            continue
        if loc is None or not text.isprintable() or key.lstrip()[:1] in ("+", "~"):
            hint = "write KEY=VALUE with a dotted key, without + or ~ in front, for example actor.optim.lr=1e-6"
            problems.append(Problem("", str(origin), f"{key.strip()!r} is no dotted key", hint=hint))
            continue
        loc = _indexed(document, loc)
        known = annotation_at(loc)
        value = _value(raw, known, loc, origin, problems)
        if value is _UNREADABLE:
            continue
        held = document.origins.get(loc)
        if held is not None and held.kind == "flag" and document.get(loc) != value:
            problems.append(
                Problem(
                    dotted(loc),
                    str(origin),
                    f"{held} says {describe(document.get(loc))} and the override says {describe(value)}",
                    hint="give one of the two",
                )
            )
            continue
        _set(document, loc, value, origin, problems)


_UNREADABLE = object()


def _value(raw: str, known: Any, loc: Loc, origin: Origin, problems: list[Problem]) -> Any:
    try:
        value = parse_value(raw.strip())
    except ConfigError as error:
        value = error
    if known is not None and accepts_text_only(known) and value is not None and not isinstance(value, str):
        return raw.strip()
    if isinstance(value, ConfigError):
        problems.append(
            Problem(
                dotted(loc),
                str(origin),
                "the value is no YAML",
                found=value.found or "",
                hint="put it in quotes: KEY='\"...\"'",
            )
        )
        return _UNREADABLE
    if known is not None and accepts_text_list(known) and isinstance(value, str):
        return [value]
    return value


def _indexed(document: Document, loc: Loc) -> Loc:
    """Digits become an index where a list stands: ``components.0.weight`` as well as ``components[0].weight``."""
    out: Loc = ()
    for part in loc:
        if isinstance(part, str) and part.isdecimal() and len(part) < 10 and isinstance(document.get(out), list):
            part = int(part)
        out = (*out, part)
    return out


def _set(document: Document, loc: Loc, value: Any, origin: Origin, problems: list[Problem]) -> None:
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


def _loc(path: str) -> Loc:
    return tuple(path.split("."))
