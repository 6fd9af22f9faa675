"""Words that name something elsewhere: algorithms, rewards, metric sinks, procedural tasks. Each must exist before anything starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlctl.config.document import Document, Loc, dotted
from rlctl.config.problems import Problem
from rlctl.config.suggest import nearest

if TYPE_CHECKING:
    from rlctl.plugins import PluginSet


def name_problems(document: Document, plugins: PluginSet) -> list[Problem]:
    """A problem for each name that neither core nor a plugin knows."""
    from rlctl.algorithms.lookup import BUILTIN, KEYS, OWN, WORDS, elsewhere
    from rlctl.data.procedural import REASONING_GYM, TASKS
    from rlctl.data.rewards.registry import BUILTIN as REWARDS
    from rlctl.data.rewards.registry import is_user_function
    from rlctl.environments import registry as environments
    from rlctl.named_records import is_own
    from rlctl.tracking import BUILTIN as SINKS

    problems: list[Problem] = []
    formulas = [spec for _, spec in plugins.records("rlctl_algorithms")]
    for kind, key in KEYS.items():
        place: Loc = tuple(key.split("."))
        name = document.get(place)
        if isinstance(name, str) and name and not is_own(name):
            known = {*BUILTIN[kind], *(spec.name for spec in formulas if spec.kind == kind)}
            problems += _unknown(document, place, name, WORDS[kind], known, f", or {OWN}", elsewhere(name))
    components = document.get(("reward", "components"))
    rewards = {*REWARDS, *(spec.name for _, spec in plugins.records("rlctl_rewards"))}
    for index in range(len(components) if isinstance(components, list) else 0):
        loc: Loc = ("reward", "components", index, "name")
        name = document.get(loc)
        if isinstance(name, str) and name and not is_user_function(name):
            problems += _unknown(document, loc, name, "reward", rewards, ", or path/to/file.py:function")
    environment = document.get(("rollout", "environment", "name"))
    if isinstance(environment, str) and environment and not is_own(environment):
        known = {*environments.BUILTIN, *(spec.name for _, spec in plugins.records("rlctl_environments"))}
        place = ("rollout", "environment", "name")
        problems += _unknown(document, place, environment, "environment", known, f", or {environments.OWN}")
    logger = document.get(("trainer", "logger"))
    sinks = {*SINKS, *(spec.name for _, spec in plugins.records("rlctl_trackers"))}
    for index, name in enumerate(logger if isinstance(logger, list) else []):
        if isinstance(name, str):
            problems += _unknown(document, ("trainer", "logger", index), name, "metrics sink", sinks)
    task = document.get(("data", "task", "name"))
    if isinstance(task, str) and task and not task.startswith(REASONING_GYM):
        problems += _unknown(
            document, ("data", "task", "name"), task, "procedural task", TASKS, f", or {REASONING_GYM}NAME"
        )
    return problems


def _unknown(
    document: Document,
    loc: Loc,
    name: str,
    kind: str,
    known: Iterable[str],
    further: str = "",
    meant: str | None = None,
) -> list[Problem]:
    """A problem where ``name`` is not known; ``meant`` says what it means here, where that is no name of the kind."""
    names = sorted(known)
    if name in names:
        return []
    close = nearest(name, names)
    return [
        Problem(
            dotted(loc),
            str(document.origin(loc)),
            f"there is no {kind} {name[:60]!r}",
            wanted="one of " + ", ".join(names) + further,
            hint=f"that is {meant}" if meant else f"did you mean {close}?" if close else "take one of these",
        )
    ]
