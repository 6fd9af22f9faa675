"""Memory of one training engine: its settings, and the largest micro-batch that the batch arithmetic gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.catalogue_memory import MemoryPolicy, train_policy
from rlctl.config.schema import RunConfig, TrainRole
from rlctl.config.schema_lora import LoraConfig
from rlctl.plan.activations import Precision
from rlctl.plan.adapters import AdapterMemory, AdapterState, count_adapters
from rlctl.plan.arithmetic import micro_bound, rows_a_rank, scored_tokens
from rlctl.plan.layout import RoleLayout
from rlctl.plan.memory import Load, Setting
from rlctl.plan.parameters import ParameterCount
from rlctl.plan.request import Request
from rlctl.plan.shapes import ModelShape
from rlctl.plan.training import StateMemory, TrainMemory
from rlctl.topology import Topology
from rlctl.trainer_kinds import PAIR_TRAINERS

_CHUNK_BYTES = {"cpu": 8 << 20}
_CHUNK_BYTES_ACCELERATOR = 512 << 20


@dataclass(frozen=True)
class ModelSize:
    """What is known of the model's size.

    Args:
        total: weights, or None.
        how: where the number comes from.
    """

    shape: ModelShape | None
    count: ParameterCount | None
    total: int | None
    how: str


def train_memory(
    name: str,
    role: TrainRole,
    engine: Mapping[str, Any],
    layout: RoleLayout,
    size: ModelSize,
    request: Request,
    trained: bool,
) -> TrainMemory | StateMemory | None:
    """The memory of one training engine; StateMemory where only the number of weights is known, None where nothing is."""
    if layout.topology is None or size.total is None:
        return None
    policy = train_policy(layout.backend)
    config = _as_trained(request.config, name)
    precision, setting = engine_setting(policy, engine, layout.topology, config, request.device, size.shape)
    lora = _adapters_of(config, name) if trained else None
    if size.shape is None or size.count is None:
        if lora is not None:  # on layers that are not known here: next to nothing beside the weights
            return AdapterState(name, size.total, 0, precision, setting)
        return StateMemory(name, size.total, size.total, precision, setting)
    load = engine_load(role, layout.topology, config, whole_batch=not trained)
    if lora is not None:
        count = count_adapters(size.shape, lora)
        return AdapterMemory(name, size.shape, size.count, precision, setting, load, count)
    return TrainMemory(name, size.shape, size.count, precision, setting, load, trained)


def _adapters_of(config: RunConfig, name: str) -> LoraConfig | None:
    """The adapters that a role trains in the place of its weights; None where it trains those. A critic has its own section's."""
    if name == "critic":
        own = config.critic.model if config.critic is not None else None
        return None if own is None else own.lora
    return config.model.lora


def _as_trained(config: RunConfig, name: str) -> RunConfig:
    """The configuration with a critic's optimizer and mini-batch where the actor's are looked up."""
    critic, actor = config.critic, config.actor
    if name != "critic" or critic is None:
        return config
    mini = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
    as_actor = actor.model_copy(update={"optim": critic.optim, "ppo_mini_batch_size": mini})
    return config.model_copy(update={"actor": as_actor})


def engine_setting(
    policy: MemoryPolicy,
    engine: Mapping[str, Any],
    topology: Topology,
    config: RunConfig,
    device: str,
    shape: ModelShape | None,
) -> tuple[Precision, Setting]:
    """dtypes and switches of an engine, from its section and its policy."""
    master = config.model.dtype
    wanted = str(engine.get(policy.compute) or "auto")
    compute = wanted if wanted != "auto" else master if device == "cpu" else "bfloat16"
    wrapped = policy.gathers and (topology.world_size > 1 or engine.get(policy.wrap) == "always")
    reduce = str(engine.get(policy.reduce) or "auto")
    if policy.gathers:
        shards = topology.dp_shard * topology.usp * topology.cp
    else:
        shards = topology.dp_size * topology.cp if _shards_optimizer(policy, engine, topology, config) else 1
    head = 0 if shape is None else shape.head_dim
    setting = Setting(
        policy=policy,
        shards=shards,
        moments=config.actor.optim.name != "sgd",
        moments_away=device != "cpu" and bool(engine.get(policy.optimizer_offload)),
        wrapped=wrapped,
        reshard=engine.get(policy.reshard) is not False,
        checkpointing=engine.get(policy.checkpointing[0], policy.checkpointing[1]) == policy.checkpointing[2],
        logits_budget=int(engine.get("logits_budget_mib") or 1024) << 20 if policy.chunked_logits else None,
        chunk_bytes=_CHUNK_BYTES.get(device, _CHUNK_BYTES_ACCELERATOR),
        flash=device == "cuda" and compute != "float32" and head % 8 == 0 and head <= 256,
        reduce="float32" if reduce == "auto" else reduce,
        tp=topology.tp,
        pp=topology.pp,
        ep=topology.ep,
    )
    return Precision(master, compute, policy.autocast and not wrapped and compute != master), setting


def _shards_optimizer(policy: MemoryPolicy, engine: Mapping[str, Any], topology: Topology, config: RunConfig) -> bool:
    choice = engine.get(policy.shards_optimizer) or "auto"
    if not policy.shards_optimizer or choice != "auto":
        return choice != "never"
    return topology.dp_size > 1 and config.actor.optim.name != "sgd"


def engine_load(role: TrainRole, topology: Topology, config: RunConfig, *, whole_batch: bool = False) -> Load:
    """The largest micro-batch that the batch arithmetic allows on one rank.

    Args:
        whole_batch: the engine scores every row of a step at once, instead of one mini-batch.
    """
    rl = config.trainer.type == "rl"
    prompts = config.data.train_batch_size
    if rl and not whole_batch:
        prompts = min(prompts, config.actor.ppo_mini_batch_size or prompts)
    rows = prompts * (config.rollout.n if rl else 2 if config.trainer.type in PAIR_TRAINERS else 1)
    policy_loss = rl and not whole_batch
    scaled = rl and config.rollout.temperature != 1.0
    return load_of(role, topology, config, rows, entropy=policy_loss, scaled=scaled)


def load_of(
    role: TrainRole,
    topology: Topology,
    config: RunConfig,
    num_rows: int,
    *,
    entropy: bool = False,
    scaled: bool = False,
) -> Load:
    """The largest micro-batch when ``num_rows`` rows are split over the data parallel ranks."""
    rows = rows_a_rank(num_rows, topology.dp_size)
    token_ranks = topology.usp * topology.cp
    bound = micro_bound(role, config, token_ranks)
    whole = bound.tokens(rows)
    # The last token of each row predicts nothing and is not run.
    tokens = whole - -(-whole // bound.longest)
    return Load(
        tokens=max(1, -(-tokens // token_ranks)),
        scored=max(1, -(-scored_tokens(config, whole, rows) // token_ranks)),
        longest=bound.longest,
        ragged=rows > 1,
        micro_batches=bound.micro_batches(rows),
        entropy=entropy,
        scaled=scaled,
    )
