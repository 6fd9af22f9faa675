"""Stage 2 for one plugin: import its light module, verify its hooks, collect its backend records.

Runs in this process for ``train`` and in a child for ``doctor``. What the module prints is caught, also below Python's
own streams, so that no plugin can spoil a ``--json`` output.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pluggy

from rlctl import constraints, hookspecs
from rlctl.discovery import Candidate
from rlctl.errors import PluginError
from rlctl.records import API_VERSION, BackendSpec

T = TypeVar("T")


@dataclass(frozen=True)
class Declared:
    """A plugin that got through stage 2. ``output`` is what it printed meanwhile."""

    plugin: object
    backends: tuple[BackendSpec, ...]
    output: str = ""


def new_manager() -> pluggy.PluginManager:
    """A plugin manager that knows the discovery hooks."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs.DiscoverySpecs)
    return manager


def declare(candidate: Candidate, manager: pluggy.PluginManager) -> Declared:
    """Import the light module of ``candidate``, register it and ask for its backends.

    Raises:
        PluginError: a hook that does not exist, a record of another type, or an API version that does not fit.
        BaseException: whatever the module raises, SystemExit included; the caller is the boundary.
    """
    with captured_output() as read:
        plugin = load_object(candidate.target)
        register(manager, plugin, candidate)
        try:
            backends = records_of(manager, plugin, "rlctl_backends", BackendSpec)
            for spec in backends:
                check_api_version(spec, candidate)
                check_constraints(spec, candidate)
        except BaseException:
            manager.unregister(plugin)
            raise
        return Declared(plugin, backends, read())


def load_object(target: str) -> Any:
    """Import ``module`` or ``module:attribute.attribute``."""
    module, _, attributes = target.partition(":")
    found: Any = importlib.import_module(module.strip())
    for name in filter(None, attributes.strip().split(".")):
        found = getattr(found, name)
    return found


def register(manager: pluggy.PluginManager, plugin: object, candidate: Candidate) -> None:
    """Register and verify. A plugin that names an unknown hook is taken out again.

    Raises:
        PluginError: what pluggy found.
    """
    try:
        if manager.is_registered(plugin):
            raise PluginError(
                f"{candidate.target!r} is registered already, under the name {manager.get_name(plugin)!r}"
            )
        manager.register(plugin, candidate.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        # pluggy leaves a plugin registered when check_pending fails, and does not when register fails.
        if manager.is_registered(plugin):
            manager.unregister(plugin)
        raise PluginError(
            f"a hook of {candidate.label} does not fit the contract",
            found=str(error).strip(),
            wanted="the hooks and argument names of rlctl.hookspecs",
        ) from error


def call_one(manager: pluggy.PluginManager, plugin: object, hook: str, **arguments: Any) -> list[Any]:
    """Call ``hook`` of one plugin alone, so that its exception is its own. Empty when it does not implement it."""
    others = {p for p in manager.get_plugins() if p is not plugin}
    results: list[Any] = manager.subset_hook_caller(hook, others)(**arguments)
    return results


def records_of(
    manager: pluggy.PluginManager, plugin: object, hook: str, kind: type[T], **arguments: Any
) -> tuple[T, ...]:
    """The records that one plugin returns from ``hook``, checked for their type.

    Raises:
        PluginError: it returned something else.
    """
    records: list[T] = []
    for result in call_one(manager, plugin, hook, **arguments):
        if isinstance(result, (str, bytes, kind)) or not isinstance(result, Iterable):
            raise PluginError(f"{hook} returned {type(result).__name__}", wanted=f"a list of {kind.__name__}")
        for record in result:
            if not isinstance(record, kind):
                raise PluginError(f"{hook} returned a {type(record).__name__}", wanted=f"{kind.__name__} records")
            records.append(record)
    return tuple(records)


def check_api_version(spec: BackendSpec, candidate: Candidate) -> None:
    """Major numbers must be equal, and the plugin's minor number no newer than ours.

    Raises:
        PluginError: they are not.
    """
    try:
        major, minor = (int(n) for n in spec.api_version)
    except (TypeError, ValueError):
        raise PluginError(
            f"backend {spec.name!r} of {candidate.label} has no readable api_version",
            found=repr(spec.api_version),
            wanted="two whole numbers, such as (1, 0)",
        ) from None
    if major == API_VERSION[0] and minor <= API_VERSION[1]:
        return
    newer = (major, minor) > API_VERSION
    raise PluginError(
        f"backend {spec.name!r} of {candidate.label} was written for {'a newer' if newer else 'an older'} rlctl",
        found=f"hook API {major}.{minor}",
        wanted=f"hook API {API_VERSION[0]}.0 to {API_VERSION[0]}.{API_VERSION[1]}",
        next="pip install --upgrade rlctl-core" if newer else f"pip install --upgrade {candidate.dist}",
    )


def check_constraints(spec: BackendSpec, candidate: Candidate) -> None:
    """Every constraint that a capability names must be one that core can evaluate.

    Raises:
        PluginError: it names another.
    """
    for capability in spec.capabilities:
        try:
            constraints.named(capability.constraint)
        except KeyError as error:
            raise PluginError(
                f"backend {spec.name!r} of {candidate.label} names a constraint that does not exist",
                found=f"{error.args[0]!r} on axis {capability.axis}",
                wanted="one of " + ", ".join(constraints.CONSTRAINTS),
            ) from None


@contextlib.contextmanager
def captured_output() -> Iterator[Callable[[], str]]:
    """Send stdout to a buffer while a foreign module runs: ``sys.stdout`` and file descriptor 1 alike.

    Yields a function that returns what came so far. stderr stays as it is, so that a crash can still be read.
    """
    buffer = io.StringIO()
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # started without a stdout: nothing below Python's own stream can be spoilt
        with contextlib.redirect_stdout(buffer):
            yield buffer.getvalue
        return
    with tempfile.TemporaryFile() as low:
        os.dup2(low.fileno(), 1)

        def read() -> str:
            return buffer.getvalue() + os.pread(low.fileno(), 1 << 16, 0).decode(errors="replace")

        try:
            with contextlib.redirect_stdout(buffer):
                yield read
        finally:
            os.dup2(saved, 1)
            os.close(saved)


def guarded(action: Callable[[], T]) -> T | BaseException:
    """Run foreign code and hand back what it raised instead of raising it. Ctrl-C still interrupts."""
    try:
        return action()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # plugin boundary: SystemExit and worse must not end the others
        return error
