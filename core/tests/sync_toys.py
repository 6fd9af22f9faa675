"""Engines that hold any tensors, in processes of their own, and every way in which a sync of theirs can go wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch

from rlctl.engine import Engine, EngineInfo, MeshInfo
from rlctl.errors import EngineError
from rlctl.plugins import PluginSet
from rlctl.runtime.dispatch import Dispatch, dispatch
from rlctl.runtime.group import Limits, WorkerGroup
from rlctl.runtime.records import Boot, BuildSpec
from rlctl.runtime.remote import RemoteEngine
from rlctl.runtime.transports.process import ProcessTransport
from rlctl.runtime.worker import Worker
from rlctl.sync import fingerprint_tensor

SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (0,),
    (1,),
    (3, 0, 2),
    (7,),
    (5, 3),
    (2, 3, 5),
    (1031,),
    (129, 67),
    (40_000,),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64)


def drawn(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random values, of bool both."""
    values = torch.randn(tuple(shape), generator=generator) * 9
    return values > 0 if dtype is torch.bool else values.to(dtype)


def odd_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Every dtype in every shape, special values and views with strides among them."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            name = f"{str(dtype).removeprefix('torch.')}.{'x'.join(map(str, shape)) or 'scalar'}"
            found[name] = drawn(shape, dtype, generator)
    found["special"] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    whole = torch.randn(33, 17, generator=generator)
    return {**found, "transposed": whole.t(), "every.third": whole[::3, 1::2]}


class Source:
    """A training engine: its weights are :func:`odd_tensors` of the number of steps it has done.

    Args:
        settings: ``fault``, ``rank`` and ``at`` (which tensor) of what goes wrong.
    """

    def __init__(self, settings: Mapping[str, Any], boot: Boot) -> None:
        self.settings, self.boot = settings, boot
        self.mesh = MeshInfo(rank=boot.rank, world_size=boot.world_size, dp_rank=boot.rank, dp_size=boot.world_size)
        self.seed = 0

    def build(self, *_: Any, **__: Any) -> EngineInfo:
        return EngineInfo(1, 1, "toy")

    def move(self, device: str) -> None:
        """Another step: other weights."""
        self.seed = int(device)

    def export_weights(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        fault = self.settings.get("fault", "") if self.settings.get("rank", 0) == self.boot.rank else ""
        for i, (name, tensor) in enumerate(odd_tensors(self.seed).items()):
            if i == self.settings.get("at", 20):
                strike(fault)
                if fault == "double":
                    yield name, tensor
                if fault == "misname":
                    name += ".other"
                if fault == "leave out":
                    continue
            yield name, tensor

    def shutdown(self) -> None:
        pass


class Sink:
    """A rollout engine that keeps what it is given, and expects the names of :func:`odd_tensors`."""

    def __init__(self, settings: Mapping[str, Any], boot: Boot) -> None:
        self.settings, self.boot = settings, boot
        self.mesh = MeshInfo(rank=boot.rank, world_size=boot.world_size, dp_rank=boot.rank, dp_size=boot.world_size)
        self.held: dict[str, torch.Tensor] = {}

    def build(self, *_: Any, **__: Any) -> EngineInfo:
        return EngineInfo(1, 1, "toy")

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        mine = self.settings.get("rank", 0) == self.boot.rank and version == self.settings.get("version", 1)
        fault = self.settings.get("fault", "") if mine else ""
        wanted = set(odd_tensors(0))
        held: dict[str, torch.Tensor] = {}
        for i, (name, tensor) in enumerate(weights):
            if i == self.settings.get("at", 20):
                strike(fault)
                if fault == "corrupt":
                    tensor.view(-1)[0] += 1
                if fault == "stop":
                    break
            if name in wanted:
                held[name] = tensor.clone()
        if fault != "stale":
            self.held = held
        return {"loaded": list(held), "missing": sorted(wanted - set(held))}

    def weight_fingerprint(self, names: Sequence[str]) -> dict[str, str]:
        return {name: fingerprint_tensor(self.held[name]) for name in names if name in self.held}

    def shutdown(self) -> None:
        pass


def strike(fault: str) -> None:
    """What ends a rank in the middle of things."""
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("a fault on purpose")
        case "refuse":
            raise EngineError("a refusal on purpose", found="a fault", wanted="none")
        case "hang":
            time.sleep(600)


class SyncWorker(Worker):
    """A worker whose engines are the toys of this module."""

    def __init__(self, boot: Boot, plugins: PluginSet | None, notice: Callable[[str], None]) -> None:
        super().__init__(boot, plugins or PluginSet(), notice)

    def _create(self, spec: BuildSpec, settings: Mapping[str, Any]) -> Engine:
        make: Callable[..., Any] = Source if spec.kind == "train" else Sink
        return cast(Engine, make(spec.engine, self.boot))

    @dispatch(Dispatch.ONE_TO_ALL)
    def num_links(self) -> int:
        """Links to other pools that are open here."""
        return len(self._links._links)

    @dispatch(Dispatch.ONE_TO_ALL)
    def held(self, role: str) -> dict[str, torch.Tensor]:
        """What a rollout engine holds."""
        return cast(Any, self.engines[role]).held


def pool(name: str, size: int, folder: Path, *, timeout_s: float = 60.0, hang_s: float = 60.0) -> WorkerGroup:
    """A started pool of processes; close it in the end."""
    boots = [Boot(name, r, size, r, size, num_threads=1, collective_timeout_s=timeout_s) for r in range(size)]
    transport = ProcessTransport(folder / name, allowed=("rlctl",), worker="sync_toys:SyncWorker", plugins=False)
    group = WorkerGroup(name, transport, boots, SyncWorker, Limits(60.0, hang_s, 3.0, 10.0))
    group.start()
    return group


def pools(folder: Path, **limits: float) -> tuple[WorkerGroup, WorkerGroup]:
    """One training rank and two rollout ranks; close both in the end."""
    with ThreadPoolExecutor(2) as threads:
        main, gen = (threads.submit(pool, name, size, folder, **limits) for name, size in (("main", 1), ("gen", 2)))
        return main.result(), gen.result()


def engine(group: WorkerGroup, kind: str, role: str = "", **settings: Any) -> RemoteEngine:
    """A toy engine in every rank of ``group``."""
    axes = {"dp_shard" if kind == "train" else "dp_replicate": group.world_size}
    role = role or ("actor" if kind == "train" else "rollout")
    return RemoteEngine.build(group, BuildSpec(role, kind, "toy", {}, settings, axes))
