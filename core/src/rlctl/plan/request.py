"""What is to be planned: a configuration with its faults, the device, and the ranks of each role."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from rlctl import catalogue
from rlctl.config.check import check
from rlctl.config.homes import home
from rlctl.config.load import examine
from rlctl.config.problems import Problem
from rlctl.config.schema import RunConfig
from rlctl.device import DEVICE_VARIABLE, VENDOR_VARIABLE, in_sight
from rlctl.interpreters.faults import InterpreterError
from rlctl.records import BackendKind, BackendSpec

if TYPE_CHECKING:
    from rlctl.plugins import PluginSet

VENDORS = {"cuda": "nvidia", "npu": "huawei"}


class _WithoutSums(RunConfig):
    """The schema without its checks across sections, so that a plan can show the arithmetic that they refuse."""

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> Self:
        return self


@dataclass(frozen=True)
class Request:
    """A configuration to plan.

    Args:
        config: complete; faults that leave it readable are in ``faults``.
        device, vendor: what each rank runs on; ``device_words`` says how that is known.
        critic: plan as if a value model were trained beside the actor.
    """

    config: RunConfig
    source: str
    faults: tuple[Problem, ...]
    notices: tuple[str, ...]
    device: str
    vendor: str | None
    device_words: str
    critic: bool = False


def read_request(
    source: str,
    overrides: Sequence[str],
    plugins: PluginSet,
    *,
    world_size: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    critic: bool = False,
) -> Request:
    """Read a recipe or file as ``rlctl train`` would, and keep what it would refuse.

    Args:
        world_size: ranks of the main pool, in place of the configuration's.
        device: device type, in place of the configuration's.

    Raises:
        InvalidConfigError: the configuration cannot be read at all (unknown keys, wrong types).
        ConfigError: there is no such file, or it is no YAML.
    """
    notices: list[str] = []
    flags: dict[str, Any] = {"backend": backend, "device": device}
    found = examine(source, with_world_size(overrides, world_size), flags, plugins, notices.append)
    config = found.config
    if config is None:
        config, _ = check(_WithoutSums, found.document, engines=found.engine_models)
    if config is None:
        raise found.error()
    kind, words = _device(config)
    vendor = os.environ.get(VENDOR_VARIABLE) or VENDORS.get(kind)
    faults = tuple({(p.path, str(p)): p for p in found.problems}.values())
    return Request(config, found.name, faults, (*notices, *found.notices), kind, vendor, words, critic)


def with_world_size(overrides: Sequence[str], world_size: int | None) -> tuple[str, ...]:
    """The overrides, with the number of ranks last."""
    return (*overrides, *(() if world_size is None else (f"runtime.nproc={world_size}",)))


def ranks_of(config: RunConfig, role: str) -> int:
    """How many ranks a role has: those of its pool. (A pool that is not there is the schema's fault; it counts as one.)"""
    return config.runtime.sizes().get(config.pool_of(role), 1)


def python_of(config: RunConfig, role: str) -> str | None:
    """The interpreter of a role's pool; None for this one."""
    pool = config.pool_of(role)
    return config.runtime.python_of(pool) if pool in config.runtime.sizes() else None


def plugins_of(config: RunConfig, role: str, plugins: PluginSet) -> PluginSet:
    """The plugins of the environment where a role lives; ``plugins`` where that is this one, or does not answer (which the
    configuration's faults say)."""
    try:
        return home(python_of(config, role), plugins, config.backend_of(role)).plugins
    except InterpreterError:
        return plugins


def _device(config: RunConfig) -> tuple[str, str]:
    """(device type, how it is known). Devices are looked for by their files: asking a runtime would import torch."""
    if config.trainer.device != "auto":
        return config.trainer.device, "trainer.device"
    if forced := os.environ.get(DEVICE_VARIABLE):
        return forced, DEVICE_VARIABLE
    for kind in VENDORS:
        if in_sight(kind):
            return kind, "this machine has one"
    return "cpu", "this machine shows no accelerator; --device cuda plans for another one"


def find_spec(plugins: PluginSet, name: str, kind: BackendKind, device: str) -> BackendSpec | None:
    """The record of a backend: the installed plugin's, else the catalogue's; of two, the one that answers ``device``."""
    installed = [r.spec for r in plugins.backends()]
    for known in (installed, [e.spec for e in catalogue.entries()]):
        named = [s for s in known if s.kind is kind and name in (s.name, *s.aliases)]
        if named:
            return min(named, key=lambda s: device not in {d for d, _ in s.devices})
    return None
