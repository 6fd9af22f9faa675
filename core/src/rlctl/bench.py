"""The training step of several backends side by side: one batch, one dtype, one kind of checkpointing for all.

Each backend runs in processes of its own, one after the other, so that memory is its own and the machine is not shared.
Every backend gets the same tokens: R rows of L tokens, of which the last half are scored, as one mini-batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlctl import registry
from rlctl.capabilities import require_topology
from rlctl.config.engine_sections import config_model
from rlctl.config.schema import ModelConfig, OptimConfig
from rlctl.constraints import ModelFacts
from rlctl.device import Device
from rlctl.errors import RlctlError, UsageError
from rlctl.plugins import BackendRecord, PluginSet
from rlctl.records import Axis, BackendKind, ModelType
from rlctl.runtime.boots import make_boots, threads_of_a_rank
from rlctl.runtime.group import Limits, WorkerGroup
from rlctl.runtime.records import BuildSpec
from rlctl.topology import Topology

DTYPE_KEY = "param_dtype"
"""Key of a backend's ``engine`` section that makes backends equal, beside that of checkpointing. One without them runs as it
is, and says so."""


@dataclass(frozen=True)
class Workload:
    """What every backend does.

    Args:
        rows, length: of one mini-batch; ``length`` in tokens.
        micro_tokens: token budget of a micro-batch on one device.
        dtype: of the computation; master weights keep the model's dtype.
        checkpointing: keep each layer's input only.
        steps, warmup: measured and unmeasured optimizer steps.
    """

    rows: int = 8
    length: int = 256
    micro_tokens: int = 2048
    dtype: str = "float32"
    checkpointing: bool = False
    steps: int = 5
    warmup: int = 2
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.rows * self.length


@dataclass(frozen=True)
class Measured:
    """One backend's figures; ``problem`` says why there are none.

    Args:
        step_s: seconds of each measured step, sorted.
        peak_gib: largest peak over the ranks: of the device's allocator, on a CPU of the process.
        forecast_gib: what ``rlctl plan`` computes for it, None where it has no model of this backend or family.
        loss: after the last step; backends that computed the same thing agree on it.
        notes: what was not equal, and what the engine chose.
    """

    backend: str
    axes: Mapping[str, int] = field(default_factory=dict)
    ranks: int = 1
    tokens: int = 0
    step_s: tuple[float, ...] = ()
    peak_gib: float | None = None
    forecast_gib: float | None = None
    loss: float | None = None
    notes: tuple[str, ...] = ()
    problem: str = ""

    @property
    def tokens_per_s_per_device(self) -> float | None:
        return self.tokens / statistics.median(self.step_s) / self.ranks if self.step_s else None

    def to_json(self) -> dict[str, Any]:
        times = self.step_s
        return {
            "backend": self.backend,
            "topology": dict(self.axes),
            "ranks": self.ranks,
            "step_s": {"median": statistics.median(times), "min": times[0], "max": times[-1]} if times else None,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "peak_gib": self.peak_gib,
            "forecast_gib": self.forecast_gib,
            "loss": self.loss,
            "notes": list(self.notes),
            "problem": self.problem or None,
        }


def installed_backends(plugins: PluginSet, device: Device) -> list[str]:
    """Training backends whose requirements are met and that answer this device."""
    return [
        record.spec.name
        for record in plugins.backends()
        if record.spec.kind is BackendKind.TRAIN
        and not record.problems
        and any(place[0] == device.type for place in record.spec.devices)
    ]


def measure(
    plugins: PluginSet,
    backend: str,
    model: ModelConfig,
    facts: ModelFacts,
    topology: Topology,
    work: Workload,
    device: Device,
    *,
    engine: Mapping[str, Any] | None = None,
    forecast: Callable[[BackendRecord, Mapping[str, Any]], float | None] = lambda record, section: None,
    progress: Callable[[int], None] = lambda steps: None,
) -> Measured:
    """Build ``backend`` in processes of its own and time its training steps.

    Args:
        engine: further keys of the backend's own section.
        forecast: GiB a rank that are expected of (record, engine section).
        progress: told each finished step, warm-up included.

    Returns:
        The figures; a backend that cannot run comes back with its problem in one line.
    """
    axes = {axis.value: int(getattr(topology, axis.value)) for axis in Axis}
    shown = topology.axes()
    try:
        record = registry.resolve_backend(
            plugins, backend, BackendKind.TRAIN, ModelType.LANGUAGE_MODEL, device.type, device.vendor
        )
        require_topology(record, topology, device.type, device.vendor, facts=facts)
        section, notes = _equal_section(record, work, engine or {})
        spec = BuildSpec(
            role="actor",
            kind="train",
            backend=record.spec.name,
            model={**model.model_dump(), "seed": work.seed},
            engine=section,
            axes=axes,
            optimizer=OptimConfig(lr=1e-5).model_dump(),
        )
        times, loss, peak, chosen = _run(spec, topology.world_size, device, work, progress)
    except RlctlError as error:
        return Measured(backend, shown, topology.world_size, problem=_one_line(error))
    return Measured(
        record.spec.name,
        shown,
        topology.world_size,
        work.tokens,
        tuple(sorted(times)),
        peak,
        forecast(record, section),
        loss,
        (*notes, *chosen),
    )


def _equal_section(
    record: BackendRecord, work: Workload, engine: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    from rlctl.catalogue_memory import train_policy

    model = config_model(record.spec)
    notes: list[str] = []
    section: dict[str, Any] = {}
    recompute, without, with_ = train_policy(record.spec.name).checkpointing
    for key, value in ((DTYPE_KEY, work.dtype), (recompute, with_ if work.checkpointing else without)):
        if key in model.model_fields:
            section[key] = value
        else:
            notes.append(f"has no engine.{key}: runs as it is")
    try:
        checked = model(**{**section, **engine})
    except ValueError as error:
        raise UsageError(f"the engine section of {record.spec.name} is refused", found=str(error)) from error
    return checked.model_dump(mode="json"), tuple(notes)


def _run(
    spec: BuildSpec, world_size: int, device: Device, work: Workload, progress: Callable[[int], None]
) -> tuple[list[float], float, float, tuple[str, ...]]:
    from rlctl.algorithms.losses import CrossEntropyLoss
    from rlctl.microbatch import MicroBatchPlan
    from rlctl.runtime.remote import RemoteEngine
    from rlctl.runtime.transports.process import ProcessTransport
    from rlctl.runtime.worker import Worker

    boots = make_boots(
        "bench", world_size, device, num_threads=threads_of_a_rank(world_size), collective_timeout_s=600.0
    )
    group = WorkerGroup("bench", ProcessTransport(), boots, Worker, Limits(hang_s=600.0))
    group.start()
    try:
        engine = RemoteEngine.build(group, spec)
        plan = MicroBatchPlan(max_tokens=max(work.micro_tokens, work.length))
        times: list[float] = []
        loss = 0.0
        for step in range(work.warmup + work.steps):
            # A new batch each step, the same for every backend.
            batch = _batch(work, engine.info.vocab_size, step)
            start = time.perf_counter()
            loss = engine.train_batch(batch, CrossEntropyLoss(), plan).loss
            if step >= work.warmup:
                times.append(time.perf_counter() - start)
            progress(1)
        memory = engine.memory()
    finally:
        group.close()
    peak = memory.get("perf/max_memory_allocated_gb", memory["perf/max_rss_gb"])
    chosen = tuple(f"{key}: {text}" for key, text in engine.info.notes.items() if key in ("attention", "logits"))
    return times, loss, peak, chosen


def _batch(work: Workload, vocab_size: int, step: int) -> Any:
    import torch

    from rlctl.batch import pack

    generator = torch.Generator().manual_seed(work.seed + step)
    ids = torch.randint(0, vocab_size, (work.rows, work.length), generator=generator)
    mask = torch.arange(work.length) >= max(1, work.length // 2)
    return pack({"input_ids": list(ids), "loss_mask": [mask] * work.rows})


def ranked(results: Sequence[Measured]) -> list[Measured]:
    """Fastest first; those without figures last."""
    return sorted(results, key=lambda m: -(m.tokens_per_s_per_device or 0.0))


def _one_line(error: RlctlError) -> str:
    found = f" (found {error.found})" if error.found else ""
    following = f"; next: {error.next}" if error.next else ""
    return f"{error.what}{found}{following}"


def forecast_gib(
    model: ModelConfig, config: Mapping[str, Any] | None, topology: Topology, work: Workload, device: Device
) -> Callable[[BackendRecord, Mapping[str, Any]], float | None]:
    """`rlctl plan`'s memory model for this workload: (record, engine section) -> GiB of tensors on the fullest rank.

    Args:
        config: the model's Hugging Face config; None, or a family that the model does not know, gives no forecast.
    """
    from rlctl.catalogue_memory import train_policy
    from rlctl.config.schema import RunConfig
    from rlctl.plan.engine_memory import engine_setting
    from rlctl.plan.memory import GIB, Load
    from rlctl.plan.parameters import count_parameters
    from rlctl.plan.shapes import model_shape
    from rlctl.plan.training import TrainMemory

    shape = None if config is None else model_shape(config)
    # The memory model reads dtypes and the optimizer from a run's configuration; data and trainer do not matter to it.
    run = RunConfig.model_validate(
        {"model": model.model_dump(), "data": {"task": {"name": "sort_digits"}}, "trainer": {"type": "sft"}}
    )
    rows_a_rank = -(-work.rows // topology.dp_size)
    rows = min(rows_a_rank, max(1, max(work.micro_tokens, work.length) * topology.usp * topology.cp // work.length))
    sharing = topology.usp * topology.cp
    scored = work.length - max(1, work.length // 2)
    load = Load(
        tokens=-(-rows * (work.length - 1) // sharing),
        scored=-(-rows * scored // sharing),
        longest=work.length,
        ragged=False,
        micro_batches=-(-rows_a_rank // rows),
    )

    def forecast(record: BackendRecord, section: Mapping[str, Any]) -> float | None:
        if shape is None:
            return None
        precision, setting = engine_setting(train_policy(record.spec.name), section, topology, run, device.type, shape)
        memory = TrainMemory("actor", shape, count_parameters(shape), precision, setting, load)
        return max(moment.num_bytes for moment in memory.moments()) / GIB

    return forecast
