"""From the name of an environment to its process: a built-in one, a plugin's, or the user's own. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.data.faults import show_path
from rlctl.environments.client import EnvironmentClient, Target
from rlctl.errors import ConfigError
from rlctl.named_records import is_own, known_records, unknown
from rlctl.records import EnvironmentSpec

if TYPE_CHECKING:
    from rlctl.config.schema_environment import EnvironmentConfig
    from rlctl.plugins import PluginSet

BUILTIN: Mapping[str, EnvironmentSpec] = {
    spec.name: spec
    for spec in (
        EnvironmentSpec("calculator", "rlctl.environments.calculator:Calculator", "arithmetic with a tool"),
        EnvironmentSpec("reasoning_gym", "rlctl.environments.gym:ReasoningGym", "attempts at a reasoning_gym task"),
        EnvironmentSpec("verifiers", "rlctl.environments.verifiers:Verifiers", "an environment of that library"),
    )
}
OWN = "path/to/file.py:Class"


def open_environment(config: EnvironmentConfig, plugins: PluginSet | None, base_dir: Path) -> EnvironmentClient:
    """Start the environment's process. The path of a user's file is relative to ``base_dir``.

    Raises:
        ConfigError: there is none of that name, or two dists claim it.
        DataError: it does not load, or refuses its arguments.
    """
    name = config.name
    if not is_own(name):
        known = known_records("rlctl_environments", "environment", BUILTIN, plugins)
        if name not in known:
            key = "rollout.environment.name"
            raise unknown(name, known, words="environment", own=OWN, key=key, default="calculator")
        where, meant = known[name][1].target, None
    else:
        place, _, kind = name.rpartition(":")
        if not place or not kind.isidentifier():
            raise ConfigError(
                f"the environment {name!r} is named without a class",
                wanted="path/to/file.py:Class, or module:Class",
                next=f"rollout.environment.name={name.partition(':')[0]}:CLASS",
            )
        where = name
        beside = next((at / f"{place}.py" for at in (Path.cwd(), base_dir) if (at / f"{place}.py").is_file()), None)
        meant = None if beside is None else f"{show_path(beside)}:{kind}"
        if place.endswith(".py"):
            path = Path(os.path.normpath(base_dir / Path(place).expanduser()))
            if not path.is_file():
                raise ConfigError(
                    f"there is no file {path}", wanted="a Python file", next="check rollout.environment.name"
                )
            where = f"{path}:{kind}"
    return EnvironmentClient(Target(where, name, meant), config.args, config.timeout_s, config.max_concurrency)
