"""Translate a configuration of another project (verl's sections, TRL's flat arguments) into rlctl's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.config.check import check
from rlctl.config.document import Document, Loc, Origin, PlaceError, dotted, leaves
from rlctl.config.foreign import our_path
from rlctl.config.migrate_correction_rules import RULES as CORRECTION_RULES
from rlctl.config.migrate_kinds import Left, UnclearSwitchError
from rlctl.config.migrate_lora_rules import RULES as LORA_RULES
from rlctl.config.migrate_reward_rules import RULES as REWARD_RULES
from rlctl.config.migrate_rules import RULES as VERL_RULES
from rlctl.config.migrate_rules import SECTIONS
from rlctl.config.migrate_trl_rules import RULES as TRL_RULES
from rlctl.config.overrides import parse_key
from rlctl.config.schema import RunConfig
from rlctl.config.schema_critic import needs_critic
from rlctl.config.schema_paths import annotation_at, describe, section_at, walk
from rlctl.config.suggest import for_key
from rlctl.config.yaml_dump import dump
from rlctl.config.yaml_source import parse, parse_value

RULES = {**VERL_RULES, **REWARD_RULES, **CORRECTION_RULES, **LORA_RULES, **TRL_RULES}
_WRAPPER = "actor_rollout_ref"
_DEFAULTS = ("data.train_batch_size", "actor.ppo_mini_batch_size", "rollout.n", "trainer.total_epochs")
"""Keys that have defaults in both and on which a run's numbers rest."""
_REFERENCE = re.compile(r"^\$\{(?:oc\.select:)?([\w.]+)(?:,([^{}]*))?\}$")


@dataclass(frozen=True)
class LeftOut:
    """A key of the old file that sets nothing in the new one. ``needless``: nothing is lost by that."""

    path: str
    line: int
    found: str
    reason: str
    needless: bool


@dataclass(frozen=True)
class Migration:
    """The new configuration, which old key each value came from, what was left out, what is still to be set, and what to look at."""

    values: dict[str, Any]
    origins: dict[str, str]
    left_out: tuple[LeftOut, ...]
    to_set: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def to_yaml(self) -> str:
        """The new configuration in the order of the schema."""
        order = list(RunConfig.model_fields)
        return dump({key: self.values[key] for key in sorted(self.values, key=order.index)}) if self.values else ""


def migrate(text: str, label: str) -> Migration:
    """Translate YAML text.

    Args:
        text: the old configuration.
        label: how messages name the file.

    Raises:
        ConfigError: the text is no YAML mapping.
    """
    document, problems = parse(text, label)
    out = Document({})
    left_out = [LeftOut(p.path, _line(p.origin), "", p.what, False) for p in problems]
    old = {loc: _resolve(value, document) for loc, value in leaves(document.data) if loc}
    by_path = {dotted(_name(loc)): value for loc, value in old.items()}
    sections = dict(SECTIONS)
    if needs_critic(by_path.get("algorithm.adv_estimator")):
        del sections["critic"]
    for name, section in sections.items():
        if any(loc[0] == name and not _has_rule(loc) for loc in old) or document.data.get(name) == {}:
            line = document.origin((name,)).line
            left_out.append(LeftOut(name, line, describe(document.data[name]), section.reason, section.needless))
    for loc, value in old.items():
        if loc[0] in sections and not _has_rule(loc):
            continue
        outcome = _translate(loc, value, by_path)
        line = document.origin(loc).line
        if isinstance(outcome, Left):
            left_out.append(LeftOut(dotted(loc), line, describe(value), outcome.reason, outcome.needless))
            continue
        for path, item in outcome.items():
            place = tuple(path.split("."))
            held = out.get(place)
            if out.has(place):
                if held != item:
                    reason = f"{path} is already {describe(held)}, from {out.origin(place)}"
                    left_out.append(LeftOut(dotted(loc), line, describe(value), reason, False))
                continue
            try:
                out.set(place, item, Origin("derived", dotted(loc)))
            except PlaceError as error:
                reason = f"{dotted(error.loc)} is {describe(out.get(error.loc))} already"
                left_out.append(LeftOut(dotted(loc), line, describe(value), reason, False))
    if needs_critic(out.get(("algorithm", "adv_estimator"))) and not out.has(("critic",)):
        out.set(("critic",), {}, Origin("derived", "algorithm.adv_estimator"))
    refused, to_set = _refused(out, {dotted(loc): document.origin(loc).line for loc in old})
    origins = {dotted(loc): str(out.origin(loc)) for loc, _ in leaves(out.data)} if out.data else {}
    ordered = tuple(sorted([*left_out, *refused], key=lambda item: item.line))
    return Migration(out.data, origins, ordered, to_set, tuple(_notes(document, by_path, out)))


def _notes(document: Document, by_path: Mapping[str, Any], out: Document) -> Iterator[str]:
    """What the new file says or leaves unsaid although nothing in the old one was lost."""
    unset = [key for key in _DEFAULTS if out.data and not out.has(tuple(key.split(".")))]
    if document.has((_WRAPPER,)) and unset:
        yield f"the file leaves these to verl's defaults, and rlctl's may differ: set {', '.join(unset)}"
    flat = by_path.get("kl_coef") and not document.has((_WRAPPER,))
    if flat and not out.has(("algorithm", "adv_estimator")):
        yield "kl_coef is of TRL's PPO or of its older RLOO: set algorithm.adv_estimator to gae or rloo"
    if by_path.get("algorithm.filter_groups.metric") == "acc" and out.has(("algorithm", "filter_groups", "metric")):
        yield (
            "algorithm.filter_groups.metric acc, which a reward function returns there, became score: the weighted sum of "
            "reward.components"
        )


def _refused(out: Document, lines: Mapping[str, int]) -> tuple[list[LeftOut], tuple[str, ...]]:
    """Take values out again that the schema does not take (an estimator that is not built, a name for a number)."""
    refused: list[LeftOut] = []
    _, problems = check(RunConfig, out)
    to_set: list[str] = []
    for problem in problems:
        loc = parse_key(problem.path) or ()
        while loc and isinstance(loc[len(loc) - 1], int):
            loc = loc[:-1]
        if not out.has(loc) or problem.what:
            to_set.append(f"{problem.path}: {problem.what}" + (f", wanted {problem.wanted}" if problem.wanted else ""))
            continue
        source = str(out.origin(loc))
        reason = f"{problem.path} takes {problem.wanted}"
        refused.append(LeftOut(source, lines.get(source, 0), describe(out.get(loc)), reason, False))
        out.delete(loc)
        while len(loc) > 1 and out.get(loc[:-1]) == {}:
            loc = loc[:-1]
            out.delete(loc)
    return refused, tuple(to_set)


def _has_rule(loc: Loc) -> bool:
    """True for a key that sets something although it stands in a section that does not."""
    return dotted(_name(loc)) in REWARD_RULES


def _name(loc: Loc) -> Loc:
    """The place without verl's wrapper around model, actor, ref and rollout."""
    return loc[1:] if loc[0] == _WRAPPER and len(loc) > 1 else loc


def _translate(loc: Loc, value: Any, by_path: Mapping[str, Any]) -> dict[str, Any] | Left:
    short = _name(loc)
    path, key = dotted(short), str(short[len(short) - 1])
    if isinstance(value, str) and "${" in value:
        return Left("the reference in it cannot be worked out; write the value itself")
    if path in RULES:
        try:
            return RULES[path](value, by_path)
        except UnclearSwitchError as error:
            return Left(error.reason)
    if any(isinstance(part, int) or "." in part for part in short):
        return Left("a value inside a list; copy it by hand")
    if _is_ours(short):
        if value is None and _is_null_by_default(short):
            return Left("not set there, and so by default here", needless=True)
        return {path: value} if value is not None or len(short) > 1 else Left("empty", needless=True)
    foreign = our_path(key, short)
    if foreign is not None and _is_ours(tuple(foreign[0].split("."))):
        if value is None:
            return Left("not set there", needless=True)
        return _if_it_fits(foreign[0], value, foreign[1])
    same = [place for place, _ in walk() if place[len(place) - 1] == key and 0 not in place]
    if len(short) == 1 and len(same) == 1:
        return {dotted(same[0]): value}
    hint, _ = for_key(short[:-1], key)
    return Left(f"rlctl has no such key; {hint}" if hint.startswith("did you mean") else "rlctl has no such key")


def _is_ours(loc: Loc) -> bool:
    """True for a key of the schema, and for anything inside a free mapping such as ``model.config``."""
    if annotation_at(loc) is not None:
        return True
    free = (
        ("model", "config"),
        ("actor", "engine"),
        ("ref", "engine"),
        ("critic", "engine"),
        ("rollout", "engine"),
        ("data", "task", "args"),
    )
    return any(loc[: len(place)] == place and len(loc) > len(place) for place in free)


def _is_null_by_default(loc: Loc) -> bool:
    """True for a key that nothing is the default of: written down it can only make a section where there was none."""
    section = section_at(loc[:-1])
    field = None if section is None else section.model_fields.get(str(loc[len(loc) - 1]))
    return field is not None and field.default is None


def _if_it_fits(path: str, value: Any, remark: str) -> dict[str, Any] | Left:
    """Set a renamed key, unless the remark says that it counts something else there."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
        return Left("not set there", needless=True)
    if remark:
        return Left(f"set {path} by hand ({remark})")
    return {path: value}


def _resolve(value: Any, document: Document, depth: int = 0) -> Any:
    """Follow a ``${section.key}`` (or ``${oc.select:section.key,default}``) that is the whole value."""
    match = _REFERENCE.match(value) if isinstance(value, str) else None
    if match is None or depth > 8:
        return value
    place = tuple(match[1].split("."))
    if document.has(place):
        return _resolve(document.get(place), document, depth + 1)
    if match[2] is None:
        return value
    return parse_value(match[2])


def _line(origin: str) -> int:
    tail = origin.rpartition(":")[2]
    return int(tail) if tail.isdecimal() else 0
