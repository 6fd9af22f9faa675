"""Which environment answers for a role: this one, or that of the interpreter that its pool of processes has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl import catalogue
from rlctl.config.document import Document, Loc
from rlctl.config.placement import python_of
from rlctl.config.problems import Problem, from_error
from rlctl.errors import RlctlError
from rlctl.interpreters.faults import told_there
from rlctl.interpreters.program import locate
from rlctl.records import BackendKind, BackendSpec, ModelType

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlctl.config.schema import RunConfig
    from rlctl.device import Device
    from rlctl.plugins import BackendRecord, PluginSet


_PYTHON = {BackendKind.TRAIN: "actor.python", BackendKind.ROLLOUT: "rollout.python"}


@dataclass(frozen=True)
class Home:
    """An environment.

    Args:
        plugins: what it has.
        python: its interpreter; None for this one.
    """

    plugins: PluginSet
    python: str | None = None

    def require_backend(self, name: str, kind: BackendKind, device: Device | None = None) -> tuple[BackendRecord, ...]:
        """As :func:`rlctl.registry.require_backend`, in this environment; on a device that was named, as ``require_device`` too.

        Raises:
            BackendUnavailableError: none is usable.
        """
        from rlctl.registry import require_backend, require_device

        try:
            found = require_backend(name, kind, self.plugins)
            if device is not None:
                require_device(name, kind, self.plugins, device.type, device.vendor)
            return found
        except RlctlError as error:
            if self.python is not None:
                told_there(error, self.python)
            elif catalogue.find(name, kind) is not None:
                # What it requires may not go together with what is installed here.
                words = f"or, where its requirements want an environment of their own: {_PYTHON[kind]}=PATH, with it in there"
                error.details = (*error.details, words)
            raise

    def resolve_backend(
        self,
        name: str,
        kind: BackendKind,
        model_type: ModelType,
        device: Device,
        notice: Callable[[str], None] | None = None,
    ) -> BackendRecord:
        """As :func:`rlctl.registry.resolve_backend`, in this environment.

        Raises:
            BackendUnavailableError: no such backend, or it has no engine for this head or device.
        """
        from rlctl.registry import resolve_backend

        try:
            return resolve_backend(self.plugins, name, kind, model_type, device.type, device.vendor, notice=notice)
        except RlctlError as error:
            if self.python is not None:
                told_there(error, self.python)
            raise

    def checked_section(
        self, document: Document, role: str, spec: BackendSpec
    ) -> tuple[dict[str, Any] | None, list[Problem]]:
        """See :func:`rlctl.config.engine_sections.checked_section`; the config model is the one of this environment."""
        if self.python is None:
            from rlctl.config.engine_sections import checked_section

            return checked_section(document, role, spec, self.plugins)
        from rlctl.interpreters.asking import check_section

        return check_section(self.python, document, role, spec)


def home(python: str | None, plugins: PluginSet, backend: tuple[str, BackendKind] | None = None) -> Home:
    """The environment of ``python``; of None, this one with its ``plugins``.

    Args:
        backend: what it is wanted for, for the words of an error.

    Raises:
        InterpreterError: it does not answer, or has not our rlctl.
    """
    if python is None:
        return Home(plugins)
    from rlctl.interpreters.asking import look

    return Home(look(python, backend).plugins, python)


def require_backends(config: RunConfig, plugins: PluginSet) -> None:
    """The backend of every role that takes part, from metadata alone: on the run's device, where one was named.

    Raises:
        RlctlError: one is not there, where its role lives.
    """
    from rlctl.config.engine_sections import kind_of_role
    from rlctl.device import named_device

    device = named_device(config.trainer.device)
    for role, pool in config.roles_used().items():
        name, kind = config.backend_of(role)
        there = home(config.runtime.python_of(pool), plugins, (name, kind))
        there.require_backend(name, kind_of_role(there.plugins, role, name), device)


def require_imports(config: RunConfig, plugins: PluginSet, device: str | None, notice: Callable[[str], None]) -> None:
    """The backends of roles that live in other interpreters load there. Those of this environment are tried in each rank.

    Args:
        device: the run's, where it is known.
        notice: told what takes its time.

    Raises:
        RlctlError: one does not.
    """
    from rlctl.config.engine_sections import find_of_role, kind_of_role
    from rlctl.interpreters.asking import require_import

    asked = {
        (python, *config.backend_of(role)): role
        for role, pool in config.roles_used().items()
        if (python := config.runtime.python_of(pool)) is not None
    }
    for (python, name, kind), role in sorted(asked.items()):
        there = home(python, plugins, (name, kind))
        there.require_backend(name, kind_of_role(there.plugins, role, name))
        record = find_of_role(there.plugins, role, name, device)
        assert record is not None, "it was found a line above"
        require_import(python, record, config.runtime.start_timeout_s, notice)


class Homes:
    """The environments of the roles of a configuration that is being read. What is wrong with one is said once."""

    def __init__(self, document: Document, plugins: PluginSet) -> None:
        self.problems: list[Problem] = []
        self._document = document
        self._plugins = plugins
        self._homes: dict[str, Home | None] = {}

    def python_of(self, role: str) -> str | None:
        """The interpreter of a role, as far as the document can be read."""
        found = python_of(self._document, role)
        return None if found is None else found[0]

    def of(self, role: str, backend: tuple[str, BackendKind]) -> Home | None:
        """The environment of a role; None where it does not answer."""
        found = python_of(self._document, role)
        if found is None:
            return Home(self._plugins)
        python, loc = found
        if python not in self._homes:
            self._homes[python] = self._asked(python, loc, backend)
        return self._homes[python]

    def _asked(self, python: str, loc: Loc, backend: tuple[str, BackendKind]) -> Home | None:
        if locate(Path(python)) is None:
            return None  # its path has been refused
        try:
            return home(python, self._plugins, backend)
        except RlctlError as error:
            self.problems.append(from_error(loc, self._document, error))
            return None
