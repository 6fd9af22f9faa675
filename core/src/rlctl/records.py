"""The records that plugins return. Standard library only: a plugin's light module builds these without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

API_VERSION: tuple[int, int] = (1, 0)
"""Version of the hook contract. A plugin built for another major number, or a newer minor one, is refused."""


class BackendKind(StrEnum):
    TRAIN = "train"
    ROLLOUT = "rollout"


class ModelType(StrEnum):
    """The head of a model, never its family."""

    LANGUAGE_MODEL = "language_model"
    VALUE_MODEL = "value_model"


class Axis(StrEnum):
    """Parallel axes. ``usp`` (Ulysses), ``sp`` (Megatron's activation sharding) and ``cp`` are three different things."""

    DP_SHARD = "dp_shard"
    DP_REPLICATE = "dp_replicate"
    TP = "tp"
    SP = "sp"
    PP = "pp"
    VPP = "vpp"
    CP = "cp"
    EP = "ep"
    ETP = "etp"
    USP = "usp"
    DCP = "dcp"


class Support(StrEnum):
    SUPPORTED = "supported"
    CONDITIONAL = "conditional"
    UNSUPPORTED = "unsupported"
    NOT_APPLICABLE = "not_applicable"


class EvidenceLevel(StrEnum):
    """What was proved, lowest to highest. Only ``declared`` may be written by hand."""

    DECLARED = "declared"
    IMPORTABLE = "importable"
    BUILDABLE = "buildable"
    PARITY = "parity"
    END_TO_END = "end_to_end"

    @property
    def rank(self) -> int:
        return list(EvidenceLevel).index(self)


@dataclass(frozen=True)
class Capability:
    """One cell of the matrix: what a backend does on one axis for one head on one device.

    Args:
        axis: the parallel axis.
        support: the level.
        reason: the condition (``conditional``), or what refuses it and which backend to take (``unsupported``).
        model_type: the head this cell speaks of.
        device: device type, ``cpu``, ``cuda`` or ``npu``.
        vendor: narrower than the device, or None for every vendor.
        constraint: names of predicates in :mod:`rlctl.constraints` that a topology must satisfy (``a & b``), or None.
    """

    axis: Axis
    support: Support
    reason: str = ""
    model_type: ModelType = ModelType.LANGUAGE_MODEL
    device: str = "cpu"
    vendor: str | None = None
    constraint: str | None = None


@dataclass(frozen=True)
class BackendSpec:
    """What a plugin says of one backend. Strings only: nothing here imports the backend's libraries.

    Args:
        name: name in configs and on the command line, for example ``fsdp2``.
        kind: training or rollout engine.
        engine: ``module:Class`` of the engine; the class takes no constructor arguments.
        config: ``module:Class`` of the pydantic model of this backend's ``engine`` section; imports no torch.
        api_version: the :data:`API_VERSION` it was written for.
        model_types: heads it has.
        devices: (device, vendor) pairs it answers; vendor None stands for every vendor.
        capabilities: its cells of the matrix.
        requirements: PEP 508 strings of its real requirements, compared with what is installed; ``a>=1 | b>=1`` holds
            when one of them does.
        imports: modules whose import proves that its libraries load, in order.
        install_hint: the command that installs it.
        aliases: further names that reach it, with a one-line notice.
        summary: one line for tables.
        env: environment variables that a probe of it needs (rarely).
        remedies: what brings a requirement that no package index has, by the name of its distribution (rarely).
        routing_tests: the test that covers how a run on a device reaches this backend, by device type, for devices that it was
            never proved on (``path/to/file.py::test``). It stands beside the level and raises none.
        one_layout: engines of one process must have the same parallel sizes (the library keeps its groups in globals).
        one_engine: a process has one engine of it at a time.
        scores: of a rollout backend: its engine has ``rlctl_score``, so it can be a teacher.
        lora: of a training backend: its engine trains adapters (``model.lora``) and has ``rlctl_set_adapters``.
    """

    name: str
    kind: BackendKind
    engine: str
    config: str
    api_version: tuple[int, int]
    model_types: tuple[ModelType, ...]
    devices: tuple[tuple[str, str | None], ...]
    capabilities: tuple[Capability, ...]
    requirements: tuple[str, ...]
    imports: tuple[str, ...]
    install_hint: str
    aliases: tuple[str, ...] = ()
    summary: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    one_layout: bool = False
    remedies: Mapping[str, str] = field(default_factory=dict)
    routing_tests: Mapping[str, str] = field(default_factory=dict)
    one_engine: bool = False
    scores: bool = False
    lora: bool = False


class CheckStatus(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one doctor check. ``next`` is the command that mends it."""

    name: str
    status: CheckStatus
    found: str = ""
    wanted: str = ""
    next: str = ""


@dataclass(frozen=True)
class Check:
    """A doctor check: ``run`` imports nothing heavy and returns data; only the command line prints."""

    name: str
    run: Callable[[], CheckResult]
    quick: bool = True


@dataclass(frozen=True)
class TrackerSpec:
    """A metrics sink: ``module:Class``; the class takes (run_dir, config dict) and has ``log(metrics, step)``, ``close()``."""

    name: str
    target: str
    requirements: tuple[str, ...] = ()


@dataclass(frozen=True)
class RewardSpec:
    """A named reward: ``module:function`` that builds it from its settings (see :mod:`rlctl.data.rewards`)."""

    name: str
    target: str
    summary: str = ""


@dataclass(frozen=True)
class EnvironmentSpec:
    """A named environment: ``module:Class``, see :mod:`rlctl.environments`."""

    name: str
    target: str
    summary: str = ""


class AlgorithmKind(StrEnum):
    """The two places where a formula of one's own can stand."""

    ADVANTAGE = "advantage"
    POLICY_LOSS = "policy_loss"


@dataclass(frozen=True)
class AlgorithmSpec:
    """A named formula: ``module:function``, called by keyword with what its signature names (docs/algorithms.md).

    Args:
        name: the value of ``algorithm.adv_estimator`` or ``actor.policy_loss.loss_mode``.
        kind: which of the two.
        target: ``module:function``; imported where it is called, in the controller (advantages) or in every rank (losses).
        summary, paper: for tables.
        groups: an advantage that compares the samples of one prompt, so that one sample says nothing.
        per_token: an advantage that differs between the tokens of a row.
        needs: inputs of an advantage that cost a pass of their own, see :data:`rlctl.algorithms.table.COSTLY`.
        settings: keys of its section of the configuration that it reads.
        vanishes: a loss without value and gradient wherever the advantage is zero; such rows may be left out.
        prepare: ``module:function`` of a loss that chooses among the tokens of a whole mini-batch, before it is split; it
            is called in the controller and returns item fields, which the loss then names.
    """

    name: str
    kind: AlgorithmKind
    target: str
    summary: str = ""
    paper: str = ""
    groups: bool = False
    per_token: bool = False
    needs: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    vanishes: bool = False
    prepare: str = ""


@dataclass(frozen=True)
class RecipeSpec:
    """A shipped configuration file; ``path`` is a YAML file inside the plugin's package."""

    name: str
    path: str
    summary: str = ""


@dataclass(frozen=True)
class WeightTransportSpec:
    """A way to carry weights from a training engine to a rollout engine.

    ``target`` is ``module:Class``, a :class:`rlctl.runtime.transfer.WeightLink`. ``scope`` says how far it reaches: one ``device``
    (all processes on the same GPU), ``host`` (processes of one host, which may share a device) or ``network``; within one
    ``process`` engines hand over themselves.
    """

    name: str
    target: str
    scope: Literal["process", "device", "host", "network"]
    devices: tuple[str, ...]
    summary: str = ""


@dataclass(frozen=True)
class EvidenceRecord:
    """One proof: what ran, with which versions, on what, and the measured deltas. Written by tests and tools only."""

    backend: str
    model_type: str
    device: str
    vendor: str | None
    axes: Mapping[str, int]
    level: EvidenceLevel
    model_family: str
    what: str
    versions: Mapping[str, str]
    world_size: int
    deltas: Mapping[str, float]
    date: str
    simulated: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
