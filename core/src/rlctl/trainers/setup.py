"""From a resolved configuration to engines, data and a run directory: what every trainer needs before its loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rlctl import device as devices
from rlctl import evidence, topology
from rlctl.capabilities import require_topology
from rlctl.config.algorithm_faults import algorithm_words
from rlctl.config.homes import Home, home, require_imports
from rlctl.config.load import ResolvedConfig
from rlctl.config.schema import ModelConfig, OptimConfig, RunConfig, TrainRole
from rlctl.constraints import facts_of, local_config
from rlctl.device import Device, detect_device
from rlctl.errors import CapabilityError
from rlctl.interpreters.program import short
from rlctl.microbatch import MicroBatchPlan
from rlctl.models import require_language_model, resolve_model_source
from rlctl.plugins import PluginSet
from rlctl.records import Axis, BackendKind, ModelType
from rlctl.runtime.carriage import Transfer
from rlctl.runtime.pools import Pools
from rlctl.runtime.records import BuildSpec
from rlctl.runtime.remote import RemoteEngine
from rlctl.runtime.scoring import ScoringEngine
from rlctl.runtime.transfer import CONTROLLER
from rlctl.topology import Topology
from rlctl.tracking.reporter import Reporter
from rlctl.trainer_kinds import PAIR_TRAINERS

DEFAULT_TOKENS_PER_DEVICE = 16_384


@dataclass(frozen=True)
class Context:
    """What stays the same for a whole run."""

    resolved: ResolvedConfig
    plugins: PluginSet
    device: Device
    reporter: Reporter
    pools: Pools

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    def home(self, pool: str) -> Home:
        """The environment in which a pool's processes run.

        Raises:
            InterpreterError: it is another one, and does not answer.
        """
        return home(self.pools.python(pool), self.plugins)


def make_context(resolved: ResolvedConfig, plugins: PluginSet, reporter: Reporter) -> Context:
    """Detect the device and describe the pools; no process is started yet."""
    config = resolved.config
    import torch

    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    device = detect_device(config.trainer.device)
    pools = Pools(config, plugins, device, notice=reporter.message)
    return Context(resolved, plugins, device, reporter, pools)


def token_plan(role: TrainRole, config: RunConfig) -> MicroBatchPlan:
    """Bounds of a micro-batch of ``role``: its own setting, else 16384 tokens (or one whole row, if that is longer)."""
    if role.micro_batch_size_per_device is not None:
        return MicroBatchPlan(max_rows=role.micro_batch_size_per_device)
    longest = config.data.max_prompt_length + config.data.max_response_length
    return MicroBatchPlan(max_tokens=role.max_tokens_per_device or max(DEFAULT_TOKENS_PER_DEVICE, longest))


def prepare_model(context: Context) -> ModelConfig:
    """The model section with its source made local where it needs converting."""
    return resolve_model_source(context.config.model, notice=context.reporter.message)


def train_spec(
    context: Context,
    role: TrainRole,
    model: ModelConfig,
    *,
    name: str,
    optim: OptimConfig | None,
    backend: str | None = None,
    engine_section: Mapping[str, Any] | None = None,
    head: ModelType = ModelType.LANGUAGE_MODEL,
) -> BuildSpec:
    """The training engine of the role called ``name``; without ``optim`` it is forward-only. Nothing is started.

    Raises:
        RlctlError: the backend does not answer, or cannot run the topology.
    """
    world = context.pools.size(_pool(context, role))
    axes = topology.resolve(world, role.parallel.model_dump())
    section = role.engine if engine_section is None else engine_section
    home = context.home(_pool(context, role))
    return _spec(context, home, name, BackendKind.TRAIN, backend or role.backend, section, axes, model, optim, head)


def rollout_spec(context: Context, model: ModelConfig, *, name: str = "rollout") -> BuildSpec:
    """The rollout engine. Its weights come with the first sync."""
    config = context.config.rollout
    axes = topology.resolve_rollout(context.pools.size(config.pool), config.parallel.model_dump())
    home = context.home(config.pool)
    return _spec(context, home, name, BackendKind.ROLLOUT, config.backend, config.engine, axes, model, None)


def scoring_spec(context: Context, role: TrainRole, model: ModelConfig, *, name: str) -> BuildSpec:
    """A rollout engine that only scores for ``role``, with the weights of ``model``. Nothing is started.

    Raises:
        RlctlError: the backend does not answer, or cannot run the topology.
    """
    axes = topology.resolve_rollout(context.pools.size(_pool(context, role)), role.parallel.model_dump())
    home = context.home(_pool(context, role))
    return _spec(context, home, name, BackendKind.ROLLOUT, role.backend, role.engine, axes, model, None)


def copy_dtype(config: RunConfig) -> str | None:
    """dtype in which a copy of the weights is sent to the rollout: the one that its engine section names, so that what
    it serves is what was sent. None: the master weights' own."""
    dtype = config.rollout.engine.get("dtype")
    return dtype if dtype in get_args(ModelConfig.model_fields["dtype"].annotation) else None


def transfer(config: RunConfig) -> Transfer:
    """How weights travel between pools."""
    return Transfer(config.runtime.weight_transport, config.runtime.weight_bucket_mib)


def _spec(
    context: Context,
    home: Home,
    name: str,
    kind: BackendKind,
    backend: str,
    section: Mapping[str, Any],
    axes: Topology,
    model: ModelConfig,
    optim: OptimConfig | None,
    head: ModelType = ModelType.LANGUAGE_MODEL,
) -> BuildSpec:
    device = context.device
    record = home.resolve_backend(backend, kind, head, device, notice=context.reporter.message)
    found = local_config(model.path) if model.path is not None and head is ModelType.LANGUAGE_MODEL else None
    if isinstance(found, dict):
        require_language_model(found.get("architectures"), model.path)
    facts = facts_of(model.config, model.path)
    for note in require_topology(record, axes, device.type, device.vendor, head, facts):
        context.reporter.message(f"{name}: {note}")
    sizes = {axis.value: int(getattr(axes, axis.value)) for axis in Axis}
    return BuildSpec(
        role=name,
        kind=str(kind),
        backend=record.spec.name,
        # Adapters are for training: every other engine holds the model that they are trained on, or what they were merged into.
        model={**(model.without_lora() if optim is None else model).model_dump(), "seed": context.config.trainer.seed},
        engine=dict(section),
        axes=sizes,
        optimizer=None if optim is None else optim.model_dump(),
        model_type=str(head),
    )


def check_roles(context: Context, model: ModelConfig) -> None:
    """Look every engine of the run up and check its topology, before any process is started.

    Raises:
        RlctlError: a backend does not answer, does not load in the interpreter that it shall run in, or cannot run its
            topology; or this host has fewer devices than the pools have ranks.
    """
    config = context.config
    _require_devices(context)
    require_imports(config, context.plugins, context.device.type, context.reporter.message)
    head = ModelType.VALUE_MODEL if config.trainer.type == "rm" else ModelType.LANGUAGE_MODEL
    train_spec(context, config.actor, model, name="actor", optim=None, head=head)
    if config.trainer.type == "rl":
        rollout_spec(context, model)
    if config.needs_reference:
        ref = config.ref
        backend, section = ref.backend or config.actor.backend, ref.engine or config.actor.engine
        train_spec(context, ref, model, name="ref", optim=None, backend=backend, engine_section=section)


def _require_devices(context: Context) -> None:
    """A later pool would else say so only when the first one has loaded its model."""
    device, pools = context.device, context.pools
    if pools.launcher != "process" or device.type == "cpu" or not devices.is_available(device.type):
        return
    seen = devices.device_count(device)
    if seen < pools.num_ranks:
        raise CapabilityError(
            f"the pools have more ranks than this host has {device.type} devices",
            found=f"{seen} devices, {_ranks_words(context)}",
            wanted=f"{pools.num_ranks} devices, one a rank",
            next="lower --nproc or runtime.pools, or launch with --launcher ray over several hosts",
        )


def build_train_engine(
    context: Context,
    role: TrainRole,
    model: ModelConfig,
    *,
    name: str,
    optim: OptimConfig | None,
    backend: str | None = None,
    engine_section: Mapping[str, Any] | None = None,
    head: ModelType = ModelType.LANGUAGE_MODEL,
) -> RemoteEngine:
    """Build a training engine in its pool, whose processes start with the first one; see :func:`train_spec`."""
    spec = train_spec(
        context, role, model, name=name, optim=optim, backend=backend, engine_section=engine_section, head=head
    )
    return _build(context, _pool(context, role), spec, balance=context.config.trainer.balance_batch)


def build_rollout_engine(context: Context, model: ModelConfig, *, name: str = "rollout") -> RemoteEngine:
    """Build the rollout engine in its pool; see :func:`rollout_spec`."""
    spec = rollout_spec(context, model, name=name)
    return _build(context, context.config.rollout.pool, spec)


def build_scoring_engine(context: Context, role: TrainRole, model: ModelConfig, *, name: str) -> RemoteEngine:
    """Build a rollout engine that is asked like a training engine; see :func:`scoring_spec`."""
    spec, balance = scoring_spec(context, role, model, name=name), context.config.trainer.balance_batch
    return _build(context, _pool(context, role), spec, balance=balance, kind=ScoringEngine)


def _build(
    context: Context, pool: str, spec: BuildSpec, *, balance: bool = True, kind: type[RemoteEngine] = RemoteEngine
) -> RemoteEngine:
    """Start the pool if it has not started yet, then build, with something to see meanwhile."""
    pools, reporter = context.pools, context.reporter
    if not pools.started(pool) and pools.launcher != "inline":
        ranks = pools.size(pool)
        with reporter.phase(f"start {ranks} {'rank' if ranks == 1 else 'ranks'} of pool {pool}", None):
            pools.group(pool)
    with reporter.phase(f"build {spec.role}", None):
        return kind.build(pools.group(pool), spec, balance=balance)


def _pool(context: Context, role: TrainRole) -> str:
    return role.pool or context.config.actor.pool


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


def describe_engines(engines: Mapping[str, RemoteEngine]) -> dict[str, Any]:
    """Engine notes for the manifest."""
    out: dict[str, Any] = {}
    for role, engine in engines.items():
        info = engine.info
        out[role] = {
            "backend": engine.name,
            "num_parameters": info.num_parameters,
            "model_family": info.model_family,
            "model_type": engine.model_type,
            "notes": dict(info.notes),
            "pool": engine.group.name,
            "python": engine.group.hellos[0].executable,
            "axes": {name: size for name, size in engine.axes.items() if size > 1},
        }
    return out


def start_line(context: Context, engines: Mapping[str, RemoteEngine], total_steps: int) -> str:
    """One line that says what is about to be trained, and how."""
    actor = engines["actor"]
    config, info = context.config, actor.info
    model = f"{info.model_family}, {info.num_parameters / 1e6:.1f}M parameters"
    sizes = {name: size for name, size in actor.axes.items() if size > 1}
    axes = f", {evidence.axes_words(sizes)}" if sizes else ""
    apart = context.pools.num_ranks > 1 or any(map(context.pools.python, config.pools_used()))
    ranks = f", {_ranks_words(context)}{axes}" if apart else ""
    on = f"{devices.device_name(context.device)} ({actor.name}{ranks})"
    if config.trainer.type == "sft":
        return f"SFT of {model}, on {on}: {total_steps} steps of {config.data.train_batch_size} rows"
    if config.trainer.type in PAIR_TRAINERS:
        kind = "reward model" if config.trainer.type == "rm" else f"DPO ({config.dpo.loss_type})"
        return f"{kind} of {model}, on {on}: {total_steps} steps of {config.data.train_batch_size} pairs"
    what = algorithm_words(config) if config.distillation is None else f"distillation ({config.distillation.loss_mode})"
    return (
        f"{what} on {model}{_critic_words(engines)}, on {on}: {total_steps} steps of {config.data.train_batch_size} prompts x "
        f"{config.rollout.n} samples; reward: mean over samples, val score: held-out rows"
        + (", greedy" if config.rollout.val_kwargs.temperature == 0 else "")
    )


def _critic_words(engines: Mapping[str, RemoteEngine]) -> str:
    """``, with a critic of 0.9M parameters (fsdp2, usp=2, pool judge)``; the pool where it is not the actor's."""
    actor, critic = engines["actor"], engines.get("critic")
    if critic is None:
        return ""
    words = [critic.name]
    if axes := {name: size for name, size in critic.axes.items() if size > 1}:
        words.append(evidence.axes_words(axes))
    if critic.group is not actor.group:
        words.append(f"pool {critic.group.name}")
    return f", with a critic of {critic.info.num_parameters / 1e6:.1f}M parameters ({', '.join(words)})"


def _ranks_words(context: Context) -> str:
    """``2 ranks by process``, or ``pools main 2, gen 1 (.venvs/gen) by process``."""
    sizes = context.config.pools_used()
    pythons = {pool: context.pools.python(pool) for pool in sizes}
    if len(sizes) == 1 and not any(pythons.values()):
        return f"{context.pools.num_ranks} ranks by {context.pools.launcher}"
    words = [f"{pool} {n}{f' ({short(python)})' if (python := pythons[pool]) else ''}" for pool, n in sizes.items()]
    return f"{'pools' if len(words) > 1 else 'pool'} {', '.join(words)} by {context.pools.launcher}"


def sync_note(source: RemoteEngine, target: RemoteEngine, how: str) -> str | None:
    """Why weights take the longer way, where the versions of their environments are the reason."""
    here, there = (engine.group.hellos[0].versions.get("torch") for engine in (source, target))
    if how != CONTROLLER or here == there:
        return None
    pools = f"{here} in pool {source.group.name}, {there} in pool {target.group.name}"
    return f"weights go by the controller: torch is {pools}, and collectives join one version alone"


def run_name(resolved: ResolvedConfig) -> str:
    """Name of the run: experiment_name, else the recipe's or file's name."""
    return resolved.config.trainer.experiment_name or Path(resolved.source).stem
