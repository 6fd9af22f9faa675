"""What both suites share: how the backend under test is described and built, and checks of its record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Protocol

import pydantic
import pytest
import torch
from packaging.requirements import Requirement

from rlctl import plugins as plugin_loading
from rlctl import registry
from rlctl.config.schema import ModelConfig, OptimConfig
from rlctl.declare import load_object
from rlctl.engine import Engine
from rlctl.records import API_VERSION, BackendKind, BackendSpec, ModelType
from rlctl.topology import Topology

Weights = dict[str, torch.Tensor]


class Build(Protocol):
    """Makes a built engine; the ``build`` fixture. Each engine is shut down after its test."""

    def __call__(
        self, seed: int = 0, optim: Mapping[str, Any] | None = None, forward_only: bool = False, **model: Any
    ) -> Engine: ...


class BackendConformance:
    """Attributes of a suite; a subclass sets those it needs.

    Args:
        backend: name in the registry; the plugin is found as ``rlctl`` finds it, so its dist must be installed.
        model: the ``model`` section of a tiny model, a few thousand parameters and at least 16 positions.
        settings: the backend's own ``engine`` section.
        vocab_size: token ids below it are used.
        device, vendor, model_type, topology: where and as what it is built.
        spec: the record itself, for a backend that no installed dist declares (then ``light_module`` names its module).
    """

    backend: ClassVar[str] = ""
    model: ClassVar[Mapping[str, Any]] = {}
    settings: ClassVar[Mapping[str, Any]] = {}
    vocab_size: ClassVar[int] = 16
    device: ClassVar[str] = "cpu"
    vendor: ClassVar[str | None] = None
    model_type: ClassVar[ModelType] = ModelType.LANGUAGE_MODEL
    topology: ClassVar[Topology] = Topology()
    spec: ClassVar[BackendSpec | None] = None
    light_module: ClassVar[str] = ""
    kind: ClassVar[BackendKind]

    # ---- building -------------------------------------------------------------------------------------------------
    @pytest.fixture
    def model_section(self) -> Mapping[str, Any]:
        """The tiny model; override it where a path has to be made first."""
        return self.model

    @pytest.fixture
    def build(self, model_section: Mapping[str, Any]) -> Iterator[Build]:
        """Makes engines, and shuts them down after the test."""
        engines: list[Engine] = []

        def make(
            seed: int = 0, optim: Mapping[str, Any] | None = None, forward_only: bool = False, **model: Any
        ) -> Engine:
            engines.append(self.make_engine())
            self.build_engine(engines[-1], {**model_section, **model}, seed, optim, forward_only)
            return engines[-1]

        yield make
        for engine in reversed(engines):
            engine.shutdown()

    def build_engine(
        self,
        engine: Engine,
        model: Mapping[str, Any],
        seed: int = 0,
        optim: Mapping[str, Any] | None = None,
        forward_only: bool = False,
    ) -> None:
        """Build as the trainers do: whole sections, defaults filled in."""
        optimizer = None if forward_only else OptimConfig(**(optim or {})).model_dump()
        section = {**_MODEL_DEFAULTS, **model, "seed": seed}
        engine.build(self.topology, self.engine_settings(), section, optimizer, forward_only)

    def record(self) -> BackendSpec:
        """The backend's record, by name from the installed plugins."""
        return self.spec if self.spec is not None else self._registered().spec

    def engine_settings(self) -> dict[str, Any]:
        """The ``engine`` section as an engine gets it: validated by the backend's own model, plus ``device``."""
        config = load_object(self.record().config)
        return {**config.model_validate(dict(self.settings)).model_dump(), "device": self.device}

    def make_engine(self) -> Engine:
        """An engine that is not built yet."""
        if self.spec is not None:
            return Engine(load_object(self.spec.engine)(), self.spec.kind, self.spec.name)
        return registry.create_engine(
            _plugins(), self._registered(), role="conformance", settings=self.engine_settings()
        )

    def _registered(self) -> plugin_loading.BackendRecord:
        assert self.backend, "set the attribute backend to the name of the backend under test"
        return registry.resolve_backend(_plugins(), self.backend, self.kind, self.model_type, self.device, self.vendor)

    # ---- the record -------------------------------------------------------------------------------------------------
    def test_record_speaks_this_contract(self) -> None:
        """The record is complete and was written for this version of the hooks."""
        spec = self.record()
        assert spec.kind is self.kind
        assert spec.api_version[0] == API_VERSION[0]
        assert spec.api_version[1] <= API_VERSION[1]
        assert self.model_type in spec.model_types
        assert self.device in {device for device, _ in spec.devices}
        assert spec.name
        assert spec.name not in spec.aliases
        assert spec.install_hint
        assert spec.imports
        for requirement in spec.requirements:
            for alternative in requirement.split("|"):
                Requirement(alternative)
        for cell in spec.capabilities:
            assert cell.reason or cell.support == "supported", f"{cell.axis}: a refusal or condition gives its reason"

    def test_targets_resolve(self) -> None:
        """The engine's class takes no argument, and the config model is a pydantic model."""
        spec = self.record()
        for target in (spec.engine, spec.config):
            assert target.count(":") == 1, f"{target!r} is not module:Class"
        assert issubclass(load_object(spec.config), pydantic.BaseModel)
        load_object(spec.engine)()
        for module in spec.imports:
            __import__(module)

    def test_unknown_settings_are_refused(self) -> None:
        """A misspelt key of the engine section is an error, never ignored."""
        config = load_object(self.record().config)
        config.model_validate(dict(self.settings))
        with pytest.raises(pydantic.ValidationError):
            config.model_validate({**self.settings, "no_such_setting": 1})

    def test_light_module_is_light(self) -> None:
        """The module behind the entry point imports the standard library, ``rlctl`` and its own package alone."""
        module = self.light_module
        if not module:
            name = self._registered().spec.name
            entry = next(e for e in _plugins().entries if any(b.name == name for b in e.backends))
            module = entry.target.partition(":")[0]
        assert heavy_imports(module) == []

    def test_config_model_needs_no_torch(self) -> None:
        """A configuration is checked before anything heavy is imported."""
        assert "torch" not in _roots_after(self.record().config.partition(":")[0])


_MODEL_DEFAULTS: dict[str, Any] = {name: f.get_default() for name, f in ModelConfig.model_fields.items()}


@cache
def _plugins() -> plugin_loading.PluginSet:
    return plugin_loading.load_plugins()


_LIST_MODULES = """
import importlib, json, sys
before = set(sys.modules)
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
sys.stdout.write("\\n" + json.dumps(sorted(set(sys.modules) - before)))
"""


@cache
def _modules_after(*names: str) -> tuple[str, ...]:
    command = [sys.executable, "-c", _LIST_MODULES, json.dumps(names)]
    # The parent's path: a test may have put a module's folder there itself.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def _roots_after(*names: str) -> set[str]:
    return {m.partition(".")[0] for m in _modules_after(*names)}


def heavy_imports(module: str) -> list[str]:
    """Top-level packages that importing ``module`` loads beyond its own, the standard library and what rlctl needs."""
    loaded = _modules_after(module)
    ours = tuple(m for m in loaded if m == "rlctl" or m.startswith("rlctl."))
    allowed = _roots_after(*ours) if ours else set()
    return sorted(
        root
        for root in {m.partition(".")[0] for m in loaded} - allowed - set(sys.stdlib_module_names)
        # CPython's build settings, whose module has a name of its own on each platform.
        if root != module.partition(".")[0] and not root.startswith("_sysconfigdata")
    )


def clone_weights(engine: Engine, dtype: str | None = None) -> Weights:
    """The exported weights, copied: an engine may hand out its live tensors."""
    return {name: tensor.detach().clone().cpu() for name, tensor in engine.export_weights(dtype)}


def same_weights(a: Weights, b: Weights) -> bool:
    """True when names and every bit agree."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
