"""Metrics sinks and what a run shows while it goes on."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from rlctl import files
from rlctl.errors import ConfigError
from rlctl.records import TrackerSpec
from rlctl.tracking.reader import STEP
from rlctl.tracking.reporter import Reporter

BUILTIN: dict[str, TrackerSpec] = {
    spec.name: spec
    for spec in (
        TrackerSpec("console", "rlctl.tracking.sinks:ConsoleTracker"),
        TrackerSpec("jsonl", "rlctl.tracking.sinks:JsonlTracker"),
        TrackerSpec("tensorboard", "rlctl.tracking.sinks:TensorboardTracker", ("tensorboard>=2.16",)),
        TrackerSpec("wandb", "rlctl.tracking.sinks:WandbTracker", ("wandb>=0.18",)),
    )
}
"""The sinks of core. Others come from the ``rlctl_trackers`` records of plugins."""

_OPTIONAL = frozenset({"tensorboard"})
"""On by default but not a dependency: without its dist it is left out with a notice, where others are an error."""

Notice = Callable[[str], None]


class PluginRecords(Protocol):
    """What is needed of a plugin set: ``records(hook) -> [(dist, record)]``."""

    def records(self, hook: str) -> list[tuple[str, Any]]: ...


class Sink(Protocol):
    """A metrics sink."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class Tracker:
    """Several sinks as one. A sink that fails is reported once and left out; training and the other sinks go on.

    ``jsonl`` alone is tried again at each step: it is the record that everything else is made from.
    """

    def __init__(self, sinks: Mapping[str, Sink], notice: Notice) -> None:
        self._sinks = dict(sinks)
        self._notice = notice
        self._told: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sinks)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one step's metrics to every sink."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.log(metrics, step)
            except (
                Exception
            ) as error:  # a sink may be a plugin's, or need a network or a disk: no reason to stop training
                self._failed(name, error)

    def close(self) -> None:
        """Close every sink; safe to call twice."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.close()
            except Exception as error:  # as in log
                self._failed(name, error)
        self._sinks.clear()

    def _failed(self, name: str, error: Exception) -> None:
        keep = name == "jsonl"
        if name not in self._told:
            self._told.add(name)
            after = "trying again at each step" if keep else "left out from here on"
            self._notice(f"tracker {name} failed, {after}: {type(error).__name__}: {error}")
        if not keep:
            self._sinks.pop(name, None)


def build_tracker(
    names: Sequence[str],
    run_dir: Path,
    config: Mapping[str, Any],
    plugins: PluginRecords | None,
    *,
    resume_step: int | None = None,
    reporter: Reporter | None = None,
    notice: Notice | None = None,
) -> Tracker:
    """The sinks named in ``trainer.logger`` as one tracker.

    Args:
        names: sink names; ``console`` is left to ``reporter`` when there is one, since it shows each step already.
        run_dir: the run directory.
        config: the resolved configuration as plain data.
        plugins: the loaded plugins, for their ``rlctl_trackers`` records.
        resume_step: the step that a resumed run goes on from; later lines of ``metrics.jsonl`` move to a backup.
        notice: told about sinks that are left out; default: the reporter's message, or a log warning.

    Raises:
        ConfigError: an unknown name, a name claimed twice, or a sink whose dist is missing or does not start.
    """
    if notice is None:
        notice = reporter.message if reporter is not None else logging.getLogger("rlctl").warning
    table = _table(plugins)
    sinks: dict[str, Sink] = {}
    for name in dict.fromkeys(names):
        if name not in table:
            near = get_close_matches(name, table, n=1)
            raise ConfigError(
                f"trainer.logger: unknown tracker {name!r}",
                found=name,
                wanted=f"one of {', '.join(sorted(table))}",
                next=f"write {near[0]}" if near else None,
            )
        spec = table[name]
        if name == "console" and reporter is not None:
            continue
        missing = _missing(spec)
        if missing and name in _OPTIONAL:
            notice(f"{name} is not installed, its files are not written (pip install '{missing[0]}')")
            continue
        if missing:
            raise ConfigError(
                f"trainer.logger: {name} needs what is not installed",
                found=f"without {', '.join(missing)}",
                next=f"pip install {' '.join(repr(m) for m in missing)}, or take {name} out of trainer.logger",
            )
        if name == "jsonl" and resume_step is not None:
            files.move_lines_after(run_dir / "metrics.jsonl", STEP, resume_step)
        sinks[name] = _start(spec, run_dir, config, resume_step)
    return Tracker(sinks, notice)


def _table(plugins: PluginRecords | None) -> dict[str, TrackerSpec]:
    table = dict(BUILTIN)
    owners = dict.fromkeys(BUILTIN, "rlctl-core")
    for dist, spec in plugins.records("rlctl_trackers") if plugins is not None else []:
        if spec.name in table:
            raise ConfigError(
                f"two dists bring a tracker named {spec.name!r}",
                found=f"{owners[spec.name]} and {dist}",
                next=f"RLCTL_DISABLE_PLUGINS={dist} or uninstall one of them",
            )
        table[spec.name] = spec
        owners[spec.name] = dist
    return table


def _missing(spec: TrackerSpec) -> list[str]:
    """Requirements of ``spec`` that are not met, from metadata alone."""
    from importlib import metadata

    from packaging.requirements import Requirement

    out = []
    for text in spec.requirements:
        requirement = Requirement(text)
        try:
            if not requirement.specifier.contains(metadata.version(requirement.name), prereleases=True):
                out.append(text)
        except metadata.PackageNotFoundError:
            out.append(text)
    return out


def _start(spec: TrackerSpec, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> Sink:
    module, _, attribute = spec.target.partition(":")
    extra = {"resume_step": resume_step} if spec is BUILTIN["tensorboard"] else {}
    try:
        return getattr(importlib.import_module(module), attribute)(run_dir, config, **extra)
    except Exception as error:  # plugin and third-party code; before training starts, so worth stopping for
        raise ConfigError(
            f"trainer.logger: {spec.name} does not start",
            found=f"{type(error).__name__}: {error}",
            next=f"mend it, or take {spec.name} out of trainer.logger",
        ) from error
