"""A run's teachers: their models found and compared with the student, trained where the run trains its own, and built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.algorithms.distillation_loss import DistillationLoss
from rlctl.config.engine_sections import find_of_role
from rlctl.config.schema import ActorConfig, ModelConfig, RunConfig, TeacherConfig
from rlctl.config.schema_distillation import DistillationConfig
from rlctl.data.prompts import PromptEncoder
from rlctl.data.rewards import RewardScorer
from rlctl.data.rows import Row
from rlctl.data.same_tokens import require_same_tokens
from rlctl.data.tokenizer import load_tokenizer
from rlctl.environments.episodes import Episodes
from rlctl.models import resolve_model_source
from rlctl.records import BackendKind
from rlctl.roles.actor import ActorRole
from rlctl.roles.teacher import ONE, TeacherRole, teacher_of
from rlctl.runtime.remote import RemoteEngine
from rlctl.trainers import setup
from rlctl.trainers.warm_start import supervised_start, trained_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlctl.batch import PackedBatch


def find_teachers(context: setup.Context, tokenizer: PreTrainedTokenizerBase) -> dict[str, ModelConfig]:
    """Name to model of each teacher, empty without one; checked before any process is started.

    Raises:
        RlctlError: a teacher's backend does not answer or cannot run the topology, its files are not there, or its tokens are
            not the student's.
    """
    section = context.config.teacher
    if section is None:
        return {}
    given = section.models or {ONE: _one(section)}
    models = {name: resolve_model_source(m, notice=context.reporter.message) for name, m in given.items()}
    for name, model in models.items():
        if _scores_by_rollout(context):
            setup.scoring_spec(context, section, model, name=engine_name(name))
        else:
            backend, engine = _backend(context.config)
            setup.train_spec(
                context, section, model, name=engine_name(name), optim=None, backend=backend, engine_section=engine
            )
        require_same_tokens(tokenizer, load_tokenizer(model), name=name)
    return models


def require_teachers(rows: Sequence[Row], config: RunConfig, names: Sequence[str]) -> None:
    """Look up the teacher of every row, so that none is missed in the middle of a run.

    Raises:
        DataError: a row has none.
    """
    if config.teacher is not None:
        for row in rows:
            teacher_of(row, config.teacher.route_by, names)


def train_teacher(
    context: setup.Context,
    models: Mapping[str, ModelConfig],
    encoder: PromptEncoder,
    scorer: RewardScorer,
    train_rows: Sequence[Row],
    val_rows: Sequence[Row],
    dest: Path,
    episodes: Episodes | None = None,
) -> dict[str, ModelConfig]:
    """``models`` with the teacher trained and exported to ``dest/export``, where ``teacher.train`` asks for it.

    A run that is resumed takes the teacher that it trained before.
    """
    section = context.config.teacher
    if section is None or section.train is None:
        return dict(models)
    [(name, model)] = models.items()
    if (dest / "export").is_dir():
        return {name: trained_model(model, dest)}
    backend, engine = _backend(context.config)
    with_backend = section.model_copy(update={"backend": backend, "engine": engine})
    if _scores_by_rollout(context):
        # It cannot train: the actor's backend does, where the actor lives.
        actor = context.config.actor
        as_actor = {name: getattr(actor, name) for name in ("backend", "engine", "parallel", "pool")}
        with_backend = section.model_copy(update=as_actor)
    trained = supervised_start(
        context, model, encoder, scorer, train_rows, val_rows, dest,
        settings=section.train, role=with_backend, name="teacher_training", words="teacher", episodes=episodes,
    )  # fmt: skip
    return {name: trained}


def build_teachers(
    context: setup.Context, models: Mapping[str, ModelConfig], student: RemoteEngine
) -> TeacherRole | None:
    """The teacher role, its engines built forward-only; None without a teacher."""
    section, distillation = context.config.teacher, context.config.distillation
    if section is None or distillation is None:
        return None
    backend, engine = _backend(context.config)
    by_rollout = _scores_by_rollout(context)
    engines = {
        name: setup.build_scoring_engine(context, section, model, name=engine_name(name))
        if by_rollout
        else setup.build_train_engine(
            context, section, model, name=engine_name(name), optim=None, backend=backend, engine_section=engine
        )
        for name, model in models.items()
    }
    return TeacherRole(engines, setup.token_plan(section, context.config), distillation, student.info.vocab_size)


def engine_name(teacher: str) -> str:
    """The role of a teacher's engine, in messages and in the manifest."""
    return f"teacher {teacher}" if teacher else "teacher"


def held_out_kl(teacher: TeacherRole, actor: ActorRole, batches: Sequence[tuple[PackedBatch, Sequence[str]]]) -> float:
    """KL(teacher || student) in nats, the mean over the completions' tokens: a lower bound, from the teacher's top-k.

    It is measured alike in every loss mode, so that runs can be compared.

    Args:
        batches: completions of held-out prompts, with the teacher of each row.
    """
    most = min([teacher.student_vocab, *(engine.info.vocab_size for engine in teacher.engines.values())])
    measure = DistillationConfig(loss_mode="forward_kl_topk", topk=min(teacher.config.topk, most))
    asking = replace(teacher, config=measure)
    total, tokens = 0.0, 0
    for batch, names in batches:
        count = int(batch.items["loss_mask"].sum())
        annotated = asking.annotate(batch, names, actor.engine, actor.plan)
        _, sums = actor.engine.eval_loss(annotated, DistillationLoss(ActorConfig(), measure), actor.plan)
        total, tokens = total + sums["distillation/loss"] * count, tokens + count
    return total / max(tokens, 1)


def _one(section: TeacherConfig) -> ModelConfig:
    assert section.model is not None, "the schema asks for one of model and models"
    return section.model


def _scores_by_rollout(context: setup.Context) -> bool:
    """True for teachers on a rollout backend (see :mod:`rlctl.config.teacher_engine`)."""
    backend, _ = _backend(context.config)
    there = context.home(context.config.pool_of("teacher")).plugins
    record = find_of_role(there, "teacher", backend, context.device.type)
    return record is not None and record.spec.kind is BackendKind.ROLLOUT


def _backend(config: RunConfig) -> tuple[str, dict[str, object]]:
    """Backend of the teachers and its section: the actor's where they have none of their own."""
    section = config.teacher
    assert section is not None, "only a run with a teacher asks"
    if section.backend:
        return section.backend, section.engine
    return config.actor.backend, section.engine or config.actor.engine
