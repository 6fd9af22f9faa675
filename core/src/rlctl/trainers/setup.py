"""From a resolved configuration to engines, data and a run directory: what every trainer needs before its loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl import device as devices
from rlctl import registry, topology
from rlctl.config.load import ResolvedConfig
from rlctl.config.schema import ModelConfig, OptimConfig, RunConfig, TrainRole
from rlctl.device import Device, detect_device
from rlctl.engine import Engine
from rlctl.errors import CapabilityError
from rlctl.microbatch import MicroBatchPlan
from rlctl.models import resolve_model_source
from rlctl.plugins import PluginSet
from rlctl.records import BackendKind, ModelType
from rlctl.tracking.reporter import Reporter

DEFAULT_TOKENS_PER_DEVICE = 16_384


@dataclass(frozen=True)
class Context:
    """What stays the same for a whole run."""

    resolved: ResolvedConfig
    plugins: PluginSet
    device: Device
    reporter: Reporter

    @property
    def config(self) -> RunConfig:
        return self.resolved.config


def make_context(resolved: ResolvedConfig, plugins: PluginSet, reporter: Reporter) -> Context:
    """Detect the device and set the CPU threads.

    Raises:
        CapabilityError: more than one process is asked for, which this version cannot launch.
    """
    config = resolved.config
    if config.trainer.nproc != 1:
        raise CapabilityError(
            "this version trains in one process",
            found=f"trainer.nproc={config.trainer.nproc}",
            wanted="1; the engines already run on several ranks, the launcher for them is the next release's",
            next="leave --nproc out",
        )
    import torch

    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    return Context(resolved, plugins, detect_device(config.trainer.device), reporter)


def token_plan(role: TrainRole, config: RunConfig) -> MicroBatchPlan:
    """Bounds of a micro-batch of ``role``: its own setting, else 16384 tokens (or one whole row, if that is longer)."""
    if role.micro_batch_size_per_device is not None:
        return MicroBatchPlan(max_rows=role.micro_batch_size_per_device)
    longest = config.data.max_prompt_length + config.data.max_response_length
    return MicroBatchPlan(max_tokens=role.max_tokens_per_device or max(DEFAULT_TOKENS_PER_DEVICE, longest))


def prepare_model(context: Context) -> ModelConfig:
    """The model section with its source made local where it needs converting."""
    return resolve_model_source(context.config.model, notice=context.reporter.message)


def _engine(
    context: Context, name: str, kind: BackendKind, role: str, section: Mapping[str, Any]
) -> tuple[Engine, dict[str, Any]]:
    record = registry.resolve_backend(
        context.plugins,
        name,
        kind,
        ModelType.LANGUAGE_MODEL,
        context.device.type,
        context.device.vendor,
        notice=context.reporter.message,
    )
    settings = {**section, "device": context.device.type}
    return registry.create_engine(context.plugins, record, role=role, settings=settings), settings


def build_train_engine(
    context: Context,
    role: TrainRole,
    model: ModelConfig,
    *,
    name: str,
    optim: OptimConfig | None,
    backend: str | None = None,
    engine_section: Mapping[str, Any] | None = None,
) -> Engine:
    """Build a training engine for the role called ``name``; without ``optim`` it is forward-only."""
    engine, settings = _engine(
        context,
        backend or role.backend,
        BackendKind.TRAIN,
        name,
        role.engine if engine_section is None else engine_section,
    )
    seed = context.config.trainer.seed
    engine.build(
        topology.resolve(1, role.parallel.model_dump()),
        settings,
        {**model.model_dump(), "seed": seed},
        None if optim is None else optim.model_dump(),
        forward_only=optim is None,
    )
    return engine


def build_rollout_engine(context: Context, model: ModelConfig) -> Engine:
    """Build the rollout engine. Its weights come with the first sync."""
    config = context.config.rollout
    engine, settings = _engine(context, config.backend, BackendKind.ROLLOUT, "rollout", config.engine)
    engine.build(
        topology.resolve(1, config.parallel.model_dump()),
        settings,
        {**model.model_dump(), "seed": context.config.trainer.seed},
        None,
        forward_only=True,
    )
    return engine


def schedule_length(config: RunConfig, num_rows: int) -> int:
    """Number of trainer steps: ``total_training_steps``, else whole epochs."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return max(1, num_rows // config.data.train_batch_size) * config.trainer.total_epochs


def with_schedule(optim: OptimConfig, optimizer_steps: int) -> OptimConfig:
    """``optim`` with the length of its schedule, unless the user set one."""
    if optim.total_training_steps is not None:
        return optim
    return optim.model_copy(update={"total_training_steps": optimizer_steps})


def describe_engines(engines: Mapping[str, Engine]) -> dict[str, Any]:
    """Engine notes for the manifest."""
    out: dict[str, Any] = {}
    for role, engine in engines.items():
        info = engine.info
        out[role] = {
            "backend": engine.name,
            "num_parameters": info.num_parameters if info else None,
            "model_family": info.model_family if info else None,
            "notes": dict(info.notes) if info else {},
        }
    return out


def start_line(context: Context, actor: Engine, total_steps: int) -> str:
    """One line that says what is about to be trained, and how."""
    config, info = context.config, actor.info
    model = f"{info.model_family}, {info.num_parameters / 1e6:.1f}M parameters" if info else "a model"
    on = f"{devices.device_name(context.device)} ({actor.name})"
    if config.trainer.type == "sft":
        return f"SFT of {model}, on {on}: {total_steps} steps of {config.data.train_batch_size} rows"
    return (
        f"{config.algorithm.name} on {model}, on {on}: {total_steps} steps of {config.data.train_batch_size} prompts x "
        f"{config.rollout.n} samples; reward: mean over samples, val score: held-out rows"
        + (", greedy" if config.rollout.val_kwargs.temperature == 0 else "")
    )


def memory_metrics(device: Device) -> dict[str, float]:
    """Peak memory so far, in GB: of this process, and of the device where it has memory of its own."""
    metrics = {"perf/max_rss_gb": devices.peak_rss_gb()}
    if device.type != "cpu":
        metrics["perf/max_memory_allocated_gb"] = devices.max_memory_allocated_gb(device)
    return metrics


def run_name(resolved: ResolvedConfig) -> str:
    """Name of the run: experiment_name, else the recipe's or file's name."""
    return resolved.config.trainer.experiment_name or Path(resolved.source).stem
