"""What controller and ranks say to each other: plain frozen records, without torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlctl import __version__
from rlctl.engine_records import EngineInfo
from rlctl.records import API_VERSION
from rlctl.runtime.phases import Status


@dataclass(frozen=True)
class Boot:
    """What one rank is told when it starts.

    Args:
        pool: name of its worker group.
        rank, world_size: in the group.
        local_rank, local_world_size: on its host.
        device, vendor: as :class:`rlctl.device.Device`.
        num_threads: CPU threads of torch, None for torch's own choice.
        collective_timeout_s: limit of one collective.
        address: of its host, as ranks elsewhere reach it; the loopback's where all are on one host.
        store: where the ranks meet, a URL that ``torch.distributed`` takes (``file://`` or ``tcp://``); empty for one rank.
    """

    pool: str = "main"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device: str = "cpu"
    vendor: str | None = None
    num_threads: int | None = None
    collective_timeout_s: float = 1800.0
    store: str = ""
    address: str = "127.0.0.1"


@dataclass(frozen=True)
class Hello:
    """What a rank answers first: who and where it is.

    Args:
        python: version of its interpreter; ``executable`` is that interpreter.
        versions: of what its numbers depend on.
        rlctl, api: version and hook API of the rlctl that it runs.
    """

    rank: int
    host: str
    pid: int
    python: str
    versions: Mapping[str, str] = field(default_factory=dict)
    executable: str = sys.executable
    rlctl: str = __version__
    api: tuple[int, int] = API_VERSION


@dataclass(frozen=True)
class BuildSpec:
    """One engine to build in every rank of a group.

    Args:
        role: its name there (``actor``, ``ref``, ``rollout`` ...).
        kind: ``train`` or ``rollout``.
        backend, model_type: what to look for in the registry.
        model, optimizer, engine: the sections of the configuration, as dicts; ``optimizer`` None builds forward-only.
        axes: sizes of the parallel axes, already resolved for the group's world size.
    """

    role: str
    kind: str
    backend: str
    model: Mapping[str, Any]
    engine: Mapping[str, Any]
    axes: Mapping[str, int]
    optimizer: Mapping[str, Any] | None = None
    model_type: str = "language_model"


@dataclass(frozen=True)
class RankPlace:
    """One rank's place in one engine, as the engine's own mesh reports it (see :class:`rlctl.engine.MeshInfo`)."""

    rank: int
    dp_rank: int
    dp_size: int
    is_collect: bool
    coordinates: Mapping[str, int] = field(default_factory=dict)
    device: str = "cpu"
    token_multiplier: int = 1
    count_multiple: int = 1

    def words(self) -> str:
        """``rank 3 (dp_shard 1, usp 1)``: the coordinates on axes that are longer than one are the ones that tell."""
        inner = ", ".join(f"{k} {v}" for k, v in self.coordinates.items())
        return f"rank {self.rank}{f' ({inner})' if inner else ''}"


@dataclass(frozen=True)
class Built:
    """What one rank built."""

    place: RankPlace
    info: EngineInfo


@dataclass(frozen=True)
class Call:
    """One method of :class:`rlctl.runtime.worker.Worker` to run."""

    id: int
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ErrorRecord:
    """An exception on its way from a rank.

    Args:
        type: class name (``BatchError``, ``RuntimeError``).
        what, found, wanted, next, details: of an :class:`rlctl.errors.RlctlError`; ``what`` is the text of any other.
        mendable: it was an RlctlError.
        kinds: its class and the classes above it, ``module:Class``, nearest first.
        traceback: as Python prints it.
        status: what the rank was doing.
    """

    type: str
    what: str
    found: str | None = None
    wanted: str | None = None
    next: str | None = None
    details: tuple[str, ...] = ()
    mendable: bool = False
    traceback: str = ""
    status: Status = field(default_factory=Status)
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """The value that a call returned on one rank."""

    rank: int
    call_id: int
    value: Any


@dataclass(frozen=True)
class Raised:
    """The error that a call ended in on one rank. Call 0 is the start-up."""

    rank: int
    call_id: int
    error: ErrorRecord


@dataclass(frozen=True)
class Event:
    """Something a rank says while a call still runs (progress)."""

    rank: int
    call_id: int
    value: Any


@dataclass(frozen=True)
class Death:
    """A rank's process is gone.

    Args:
        cause: ``killed by SIGKILL``, ``exit code 1``, ``its node is gone``.
        output: the last lines it printed, a fatal-signal traceback included.
        status: what it did last, where that can still be read.
    """

    rank: int
    cause: str
    output: str = ""
    status: Status | None = None


Message = Result | Raised | Event | Death
