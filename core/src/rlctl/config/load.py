"""From a recipe or file, flags and overrides to one checked configuration. Imports no torch.

Everything that is wrong is reported at once, each with its dotted path and where it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.config.check import check
from rlctl.config.document import Document, dotted, leaves
from rlctl.config.engines import FOLLOWED, FOLLOWERS, resolve_engines
from rlctl.config.idle_faults import idle_problems
from rlctl.config.names import name_problems
from rlctl.config.overrides import apply_flags, apply_overrides
from rlctl.config.paths import resolve_paths
from rlctl.config.placement import is_derived, place_roles
from rlctl.config.problems import InvalidConfigError, Problem
from rlctl.config.recipes import find_source
from rlctl.config.schema import RunConfig
from rlctl.config.schema_environment import add_environment_reward
from rlctl.config.schema_paths import EngineModels
from rlctl.config.yaml_dump import dump
from rlctl.config.yaml_source import parse, read

if TYPE_CHECKING:
    from rlctl.plugins import PluginSet


@dataclass(frozen=True)
class ResolvedConfig:
    """A checked configuration: all defaults filled in, all paths absolute.

    Args:
        config: the configuration; ``engine`` sections are complete and valid for their backends.
        origins: dotted path of each leaf to where its value came from: ``run.yaml:12``, ``override actor.optim.lr=1e-5``,
            ``flag --model``, ``as actor.backend``, or ``default``.
        base_dir: directory of the file.
        source: the recipe's name, or the file's path as it was given.
    """

    config: RunConfig
    origins: dict[str, str]
    base_dir: Path
    source: str

    def to_yaml(self) -> str:
        """The configuration as YAML that loads back to an equal one.

        What a role takes from the actor without having said so is left out: it goes on to follow the actor, also where the
        actor's sizes are others when the run is resumed. So is the pool that a role has for its interpreter alone.
        """
        values = self.config.model_dump(mode="json")
        self._leave_out_pools(values)
        for role in FOLLOWERS:
            section = values.get(role)
            if isinstance(section, dict) and self._follows(f"{role}.backend"):
                for key in ("backend", *FOLLOWED):
                    _leave_out(section, key, lambda path, role=role: self._unsaid(f"{role}.{path}"))
        return dump(values)

    def _leave_out_pools(self, values: dict[str, Any]) -> None:
        for path in [path for path, origin in self.origins.items() if is_derived(origin)]:
            *way, key = path.split(".")
            section = values
            for part in way:
                section = section[part]
            section.pop(key)
        pools = values["runtime"]["pools"]
        for name in [name for name, pool in pools.items() if not pool]:
            pools.pop(name)

    def _follows(self, path: str) -> bool:
        return self.origins.get(path, "").startswith("as actor.")

    def _unsaid(self, path: str) -> bool:
        return self._follows(path) or self.origins.get(path) == "default"


def _leave_out(section: dict[str, Any], key: str, unsaid: Callable[[str], bool]) -> None:
    value = section.get(key)
    if isinstance(value, dict):
        kept = {name: item for name, item in value.items() if not unsaid(f"{key}.{name}")}
        if kept:
            section[key] = kept
        else:
            section.pop(key)
    elif key in section and unsaid(key):
        section.pop(key)


def load_config(
    source: str,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    plugins: PluginSet | None = None,
    notice: Callable[[str], None] | None = None,
    *,
    backends: bool = True,
) -> ResolvedConfig:
    """Read, merge, complete and check the configuration of one run.

    Args:
        source: a recipe's name or the path of a YAML file.
        overrides: ``KEY=VALUE`` with dotted keys and YAML values.
        flags: values of command line flags (see :data:`rlctl.config.overrides.FLAGS`); None stands for not given.
        plugins: where backends and recipes come from; default: what is installed.
        notice: called with one line for what the user should know although it is no fault (an alias was used).
        backends: False for what starts none: one that is not there, or does not answer, is then no fault.

    Raises:
        InvalidConfigError: something is wrong; all problems are in it.
        ConfigError: there is no such file, or it is no YAML.
        BackendUnavailableError: the one problem is a backend that does not answer.
    """
    found = examine(source, overrides, flags, plugins, notice)
    if not backends:
        found = replace(found, problems=tuple(p for p in found.problems if p.error is None))
    if found.problems or found.config is None:
        raise found.error()
    for line in found.notices:
        (notice or (lambda text: None))(line)
    values = found.config.model_dump(mode="json")
    origins = {dotted(loc): str(found.document.leaf_origin(loc)) for loc, _ in leaves(values)}
    return ResolvedConfig(found.config, origins, found.base_dir, found.name)


@dataclass(frozen=True)
class Examined:
    """A configuration with everything that is wrong with it.

    Args:
        config: None where the schema refuses it.
        problems: in the order in which they were found; some name one thing twice.
        document: the values before validation; ``engine_models`` are the config models of the roles' engine sections.
        name: what the user called it.
        notices: what a flag made void.
    """

    config: RunConfig | None
    problems: tuple[Problem, ...]
    document: Document
    engine_models: EngineModels
    base_dir: Path
    name: str
    notices: tuple[str, ...]

    def error(self) -> Exception:
        """The error that carries all problems."""
        return _error(self.name, self.problems)


def examine(
    source: str,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    plugins: PluginSet | None = None,
    notice: Callable[[str], None] | None = None,
) -> Examined:
    """As :func:`load_config`, but what is wrong is handed back, for callers that can say more about it.

    Raises:
        ConfigError: there is no such file, or it is no YAML.
    """
    if plugins is None:
        from rlctl.plugins import load_plugins

        plugins = load_plugins()
    tell = notice or (lambda text: None)
    place = find_source(source, plugins)
    document, problems = parse(read(place.path, place.label), place.label)
    base_dir = place.path.parent.absolute()
    notices = apply_flags(document, flags or {}, problems)
    apply_overrides(document, overrides, problems)
    problems += resolve_paths(document, base_dir, tell)
    problems += name_problems(document, plugins)
    place_roles(document)
    add_environment_reward(document)
    engines = resolve_engines(document, plugins, tell)
    config, faults = check(RunConfig, document, engines=engines.models)
    # What the reference takes from the actor is at fault there, and was reported there.
    problems += [fault for fault in faults if not fault.origin.startswith("as actor.")]
    problems += engines.problems
    problems += [] if config is None else idle_problems(document, config)
    return Examined(config, tuple(problems), document, engines.models, base_dir, place.name, tuple(notices))


def _error(source: str, problems: Sequence[Problem]) -> Exception:
    assert problems, "a configuration was refused without a reason"
    unique = list({(problem.path, str(problem)): problem for problem in problems}.values())
    if len(unique) == 1 and unique[0].error is not None:
        # The other part of rlctl has said it best: a backend that is not installed shows its install command.
        return unique[0].error
    return InvalidConfigError(source, unique, "mend the lines above; rlctl config schema lists every key")
