"""From a context to a trainer over built roles: data first, then models, so that a fault of data costs no start-up."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.algorithms.lookup import Algorithm
from rlctl.config.schema import ModelConfig
from rlctl.config.schema_critic import warmup_fault
from rlctl.config.schema_lora import random_base_words, reference_is_base
from rlctl.config.schema_preference import extra_tokens
from rlctl.config.staleness import GREEDY
from rlctl.data.lengths import fit_rows, model_positions
from rlctl.data.pairs import fit_pairs
from rlctl.data.prompts import PromptEncoder
from rlctl.data.rewards import build_reward
from rlctl.data.rewards.sources import require_sources
from rlctl.data.rows import Row, load_rows
from rlctl.data.sampler import BatchSampler
from rlctl.data.tokenizer import load_tokenizer
from rlctl.environments.episodes import Episodes
from rlctl.errors import ConfigError
from rlctl.manifest import filtered_sampling
from rlctl.records import AlgorithmKind, ModelType
from rlctl.roles.actor import ActorRole
from rlctl.roles.budget import SkipBudget
from rlctl.roles.reference import ReferenceRole
from rlctl.roles.rollout import RolloutRole
from rlctl.runtime.remote import RemoteEngine
from rlctl.trainer_kinds import PAIR_TRAINERS
from rlctl.trainers import setup, teachers
from rlctl.trainers.advantages import AdvantageStage
from rlctl.trainers.ahead import Ahead
from rlctl.trainers.algorithms import find_algorithms
from rlctl.trainers.critic import build_critic, find_critic
from rlctl.trainers.entropy import EntropyStage
from rlctl.trainers.environments import build_episodes, turn_weight
from rlctl.trainers.preference import DPO, PairTrainer, RewardModel
from rlctl.trainers.rewards import RewardStage
from rlctl.trainers.rl import RLTrainer
from rlctl.trainers.rollout_correction import correction_stage
from rlctl.trainers.sft import SFTTrainer
from rlctl.trainers.trainer import Trainer
from rlctl.trainers.warm_start import trained_model, warm_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Prepared:
    """What a run has before its first engine.

    Args:
        model: the section that loads the weights from which training starts.
        total_steps: global steps of the whole run.
        teachers: name to model of each teacher.
        algorithms: advantage estimator and policy loss, for RL.
        critic: the section of a critic that does not start from the actor's weights.
    """

    context: setup.Context
    model: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    encoder: PromptEncoder
    train_rows: list[Row]
    val_rows: list[Row]
    sampler: BatchSampler
    total_steps: int
    teachers: dict[str, ModelConfig] = field(default_factory=dict)
    algorithms: dict[AlgorithmKind, Algorithm] = field(default_factory=dict)
    critic: ModelConfig | None = None


@dataclass
class Built:
    """A trainer, its engines by role, and by role the model section that an export is described by."""

    trainer: Trainer
    engines: dict[str, RemoteEngine]
    models: dict[str, ModelConfig]


def prepare(context: setup.Context) -> Prepared:
    """Find model, tokenizer and rows, and check the roles against them.

    Raises:
        RlctlError: something is missing, or does not fit; no process was started.
    """
    config, reporter = context.config, context.reporter
    if (words := random_base_words(config)) is not None:
        reporter.message(words)
    rl, pairs = config.trainer.type == "rl", config.trainer.type in PAIR_TRAINERS
    with reporter.phase("start-up", None):
        model = setup.prepare_model(context)
        setup.check_roles(context, model)
        algorithms = find_algorithms(config, context.plugins) if rl else {}
        tokenizer = load_tokenizer(model)
        critic = find_critic(context, model, algorithms[AlgorithmKind.ADVANTAGE], tokenizer) if algorithms else None
        teacher_models = teachers.find_teachers(context, tokenizer)
        encoder = PromptEncoder(tokenizer, config.data)
        train_rows, val_rows = (load_rows(config.data, split, pairs=pairs) for split in ("train", "val"))
        if rl:
            require_sources(config.reward, [*train_rows, *val_rows])
        teachers.require_teachers([*train_rows, *val_rows], config, list(teacher_models))
    with reporter.phase("encoding rows", None):
        positions = model_positions(model)
        if pairs:
            fit = partial(fit_pairs, extra=extra_tokens(config))
        else:
            fit = partial(fit_rows, sft=not rl, talks=rl and config.rollout.environment is not None)
        given = len(train_rows), len(val_rows)
        train_rows = fit(train_rows, encoder, config.data, positions=positions)
        val_rows = fit(val_rows, encoder, config.data, positions=positions)
    for split, before, left in zip(("training", "validation"), given, (train_rows, val_rows), strict=True):
        if len(left) < before:
            reporter.message(
                f"{before - len(left)} of {before} {split} rows are too long and left out (data.overlong_prompts)"
            )
    drawn = config.data.gen_batch_size if rl else None
    sampler = BatchSampler(
        len(train_rows),
        drawn or config.data.train_batch_size,
        config.data.shuffle,
        config.trainer.seed,
        setting="data.gen_batch_size" if drawn else "data.train_batch_size",
    )
    steps = setup.schedule_length(config, len(train_rows))
    if (fault := warmup_fault(config, steps)) is not None:
        raise ConfigError(fault, next="lower critic.warmup_steps, or raise trainer.total_epochs")
    return Prepared(
        context, model, tokenizer, encoder, train_rows, val_rows, sampler, steps, teacher_models, algorithms, critic
    )


def build(prepared: Prepared, run_dir: Path, *, resuming: bool, closing: ExitStack) -> Built:
    """Start the processes and build the engines of every role.

    Args:
        run_dir: what is trained before the run itself (teacher, warm start) is kept there.
        resuming: take what was trained before the run from ``run_dir``, where it is.
        closing: what must be closed when the run ends is pushed here.
    """
    kind = prepared.context.config.trainer.type
    if kind == "sft":
        return _build_sft(prepared)
    if kind in PAIR_TRAINERS:
        return _build_pairs(prepared)
    return _build_rl(prepared, run_dir, resuming=resuming, closing=closing)


def _build_sft(p: Prepared) -> Built:
    config = p.context.config
    optim = setup.with_schedule(config.actor.optim, p.total_steps)
    engine = setup.build_train_engine(p.context, config.actor, p.model, name="actor", optim=optim)
    longest = config.data.max_prompt_length + config.data.max_response_length
    plan, budget = setup.token_plan(config.actor, config), SkipBudget(config.guards.nonfinite_step_budget)
    trainer = SFTTrainer(p.context, engine, plan, p.encoder, p.sampler, p.train_rows, p.val_rows, longest, budget)
    return Built(trainer, {"actor": engine}, {"actor": p.model})


def _build_pairs(p: Prepared) -> Built:
    config, context = p.context.config, p.context
    scores = config.trainer.type == "rm"
    head = ModelType.VALUE_MODEL if scores else ModelType.LANGUAGE_MODEL
    optim = setup.with_schedule(config.actor.optim, p.total_steps)
    engine = setup.build_train_engine(context, config.actor, p.model, name="actor", optim=optim, head=head)
    reference = _build_reference(context, p.model, engine)
    objective = RewardModel(config.rm) if scores else DPO(config.dpo, reference)
    plan, budget = setup.token_plan(config.actor, config), SkipBudget(config.guards.nonfinite_step_budget)
    trainer = PairTrainer(context, engine, plan, p.encoder, p.sampler, p.train_rows, p.val_rows, objective, budget)
    engines = {"actor": engine}
    if reference is not None and not reference.base:
        engines["ref"] = reference.engine
    return Built(trainer, engines, {"actor": p.model})


def _build_rl(p: Prepared, run_dir: Path, *, resuming: bool, closing: ExitStack) -> Built:
    config, context, model = p.context.config, p.context, p.model
    scorer = build_reward(config.reward, context.plugins, context.resolved.base_dir)
    closing.callback(scorer.close)
    episodes = build_episodes(context, model, p.encoder, p.algorithms[AlgorithmKind.ADVANTAGE], closing)
    teacher_models = teachers.train_teacher(
        context, p.teachers, p.encoder, scorer, p.train_rows, p.val_rows, run_dir / "teacher", episodes
    )
    if config.warm_start is not None:
        started = run_dir / "warm_start"
        if resuming and (started / "export").is_dir():
            model = trained_model(model, started)
        else:
            model = warm_start(context, model, p.encoder, scorer, p.train_rows, p.val_rows, started, episodes)
    mini = config.actor.ppo_mini_batch_size or config.data.train_batch_size
    # The steps in which a critic learns alone are none of the actor's.
    learning = p.total_steps - (config.critic.warmup_steps if config.critic else 0)
    updates = learning * config.actor.ppo_epochs * (config.data.train_batch_size // mini)
    optim = setup.with_schedule(config.actor.optim, updates)
    actor = setup.build_train_engine(context, config.actor, model, name="actor", optim=optim)
    rollout = setup.build_rollout_engine(context, model)
    engines = {"actor": actor, "rollout": rollout}
    reference = _build_reference(context, model, actor)
    if reference is not None and not reference.base:
        engines["ref"] = reference.engine
    models = {"actor": model}
    # The actor's adapters are not the critic's: without a section of its own it trains every weight.
    start = p.critic or model.without_lora()
    critic = build_critic(context, start, p.total_steps)
    if critic is not None:
        engines["critic"], models["critic"] = critic.role.engine, start
    teacher = teachers.build_teachers(context, teacher_models, actor)
    if teacher is not None:
        engines |= {teachers.engine_name(name): engine for name, engine in teacher.engines.items()}
    rollout_role = _rollout_role(p, rollout, episodes)
    ahead = _ahead(p, rollout_role, actor)
    actor_role = _actor_role(context, actor, p.algorithms[AlgorithmKind.POLICY_LOSS])
    trainer = RLTrainer(
        context,
        actor_role,
        rollout_role,
        reference,
        p.encoder,
        scorer,
        p.sampler,
        p.train_rows,
        p.val_rows,
        AdvantageStage(
            p.algorithms[AlgorithmKind.ADVANTAGE],
            config.algorithm,
            [(name, weight) for name, weight, _ in scorer.components],
        ),
        RewardStage(config.reward, config.algorithm, config.data.max_response_length, turn_weight=turn_weight(config)),
        EntropyStage(config.actor),
        teacher,
        critic,
        correction_stage(config, check_rollout=actor_role.check_rollout),
        ahead,
    )
    return Built(trainer, engines, models)


def _ahead(p: Prepared, rollout: RolloutRole, actor: RemoteEngine) -> Ahead | None:
    """Draws rollouts one step ahead, where ``trainer.max_staleness`` is 1."""
    trainer = p.context.config.trainer
    if not trainer.max_staleness:
        return None
    if p.algorithms[AlgorithmKind.ADVANTAGE].takes(GREEDY):
        raise ConfigError(
            "trainer.max_staleness keeps the rollout at work on the next batch",
            found=f"algorithm.adv_estimator {p.context.config.algorithm.adv_estimator}, which takes {GREEDY}",
            wanted="an estimator that needs no greedy completion of this batch",
            next="trainer.max_staleness=0",
        )

    if trainer.save_freq == 1:
        p.context.reporter.message(
            "trainer.save_freq=1 saves a checkpoint in every step, and over none is sampled ahead: trainer.max_staleness does "
            "nothing here"
        )

    def pauses(step: int) -> bool:
        return step == p.total_steps or bool(trainer.save_freq and step % trainer.save_freq == 0)

    ahead = Ahead(p.sampler, p.train_rows, p.encoder, rollout, actor, p.context.reporter, trainer.seed, pauses)
    p.context.pools.before_close.callback(ahead.stop)
    return ahead


def _build_reference(context: setup.Context, model: ModelConfig, actor: RemoteEngine) -> ReferenceRole | None:
    config, ref = context.config, context.config.ref
    if not config.needs_reference:
        return None
    if reference_is_base(config):
        context.reporter.message("the reference is the actor's model without its adapters: no second one is built")
        return ReferenceRole(actor, setup.token_plan(ref, config), base=True)
    engine = setup.build_train_engine(
        context,
        ref,
        model,
        name="ref",
        optim=None,
        backend=ref.backend or config.actor.backend,
        engine_section=ref.engine or config.actor.engine,
    )
    return ReferenceRole(engine, setup.token_plan(ref, config))


def _actor_role(context: setup.Context, engine: RemoteEngine, policy_loss: Algorithm) -> ActorRole:
    config, guards = context.config, context.config.guards
    # Filters change the sampling distribution, so its probabilities are not the trainer's and cannot be compared.
    filtered = filtered_sampling(config.rollout)
    if guards.rollout_logprob_check and filtered:
        context.reporter.message(f"guards.rollout_logprob_check cannot look: {filtered}")
    return ActorRole(
        engine,
        config.actor,
        setup.token_plan(config.actor, config),
        config.data.max_response_length,
        SkipBudget(guards.nonfinite_step_budget),
        check_rollout=guards.rollout_logprob_check and not filtered,
        distillation=config.distillation,
        policy_loss=policy_loss,
    )


def _rollout_role(p: Prepared, engine: RemoteEngine, episodes: Episodes | None) -> RolloutRole:
    config = p.context.config
    return RolloutRole(
        engine,
        config.rollout,
        config.data.max_response_length,
        stop_token_ids=p.encoder.stop_token_ids,
        verify_sync=config.guards.weight_fingerprint,
        dtype=setup.copy_dtype(config),
        transfer=setup.transfer(config),
        episodes=episodes,
    )
