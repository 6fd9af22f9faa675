"""SFT on the training rows' own answers before RL, so that a sparse reward has something to find."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.config.schema import ModelConfig, TrainRole, WarmStartConfig
from rlctl.data.prompts import PromptEncoder
from rlctl.data.rewards import RewardScorer
from rlctl.data.rows import Row
from rlctl.data.sampler import BatchSampler
from rlctl.environments.episodes import Episodes
from rlctl.errors import DataError
from rlctl.roles.budget import SkipBudget
from rlctl.roles.rollout import RolloutRole
from rlctl.trainers.evaluation import score_completions
from rlctl.trainers.setup import (
    Context,
    build_rollout_engine,
    build_train_engine,
    copy_dtype,
    token_plan,
    transfer,
    with_schedule,
)
from rlctl.trainers.sft import SFTTrainer

_SEED_STREAM = 7_919


def warm_start(
    context: Context,
    model: ModelConfig,
    encoder: PromptEncoder,
    scorer: RewardScorer,
    train_rows: Sequence[Row],
    val_rows: Sequence[Row],
    dest: Path,
    episodes: Episodes | None = None,
) -> ModelConfig:
    """Train ``warm_start.steps`` SFT steps, export to ``dest/export`` and return the model section that loads it.

    Stops early once the sampled score of (up to 128) validation rows reaches ``warm_start.stop_at_score``: a model that
    already answers everything leaves RL nothing to learn. Metrics go to ``dest/metrics.jsonl``.

    Raises:
        DataError: a row that is too long, or a score to stop at and no rows to score.
        NonFiniteStepsError: too many steps in a row had a gradient that is not finite.
    """
    settings = context.config.warm_start
    assert settings is not None
    start = model if settings.lora else model.without_lora()
    trained = supervised_start(
        context, start, encoder, scorer, train_rows, val_rows, dest,
        settings=settings, role=context.config.actor, name="warm_start", words="warm start", episodes=episodes,
    )  # fmt: skip
    return trained.model_copy(update={"lora": model.lora})


def supervised_start(
    context: Context,
    model: ModelConfig,
    encoder: PromptEncoder,
    scorer: RewardScorer,
    train_rows: Sequence[Row],
    val_rows: Sequence[Row],
    dest: Path,
    *,
    settings: WarmStartConfig,
    role: TrainRole,
    name: str,
    words: str,
    episodes: Episodes | None = None,
) -> ModelConfig:
    """:func:`warm_start` for any role that trains.

    Args:
        settings: how long, and the optimizer; its section is ``warm_start``, or ``teacher.train`` for the teacher.
        role: where the model is trained; its ``backend`` is filled in.
        name: name of the engine; that of its rollout engine is ``NAME_rollout``.
        words: what messages call it.
        episodes: the run's environment, where its score is that of conversations.
    """
    config = context.config
    section = "warm_start" if name == "warm_start" else "teacher.train"
    if settings.stop_at_score is not None and not val_rows:
        raise DataError(
            f"{section}.stop_at_score needs validation rows",
            found="none",
            wanted=f"rows to score after every {section}.eval_freq steps",
            next=f"set data.val_files, or {section}.stop_at_score=null",
        )
    batch_size = min(settings.batch_size, len(train_rows))
    if batch_size < settings.batch_size:
        context.reporter.message(
            f"{section}.batch_size={settings.batch_size} is more than the data has: {batch_size} rows a step"
        )
    dest.mkdir(parents=True, exist_ok=True)
    optim = with_schedule(settings.optim, settings.steps)
    engine = build_train_engine(context, role, model, name=name, optim=optim)
    trainer = SFTTrainer(
        context,
        engine,
        token_plan(role, config),
        encoder,
        BatchSampler(len(train_rows), batch_size, True, config.trainer.seed + _SEED_STREAM),
        train_rows,
        val_rows,
        config.data.max_prompt_length + config.data.max_response_length,
        SkipBudget(config.guards.nonfinite_step_budget, f"{section}.optim.lr"),
    )
    rollout: RolloutRole | None = None
    if settings.stop_at_score is not None:
        sampling = config.rollout.model_copy(update={"n": 1})
        rollout = RolloutRole(
            build_rollout_engine(context, model, name=f"{name}_rollout"),
            sampling,
            config.data.max_response_length,
            encoder.stop_token_ids,
            dtype=copy_dtype(config),
            transfer=transfer(config),
            episodes=episodes,
        )
    log: list[dict[str, Any]] = []
    with context.reporter.phase(f"{words} (SFT)", settings.steps) as bar:
        for step in range(1, settings.steps + 1):
            metrics: dict[str, Any] = trainer.step(step)
            bar.advance(1)
            if rollout is not None and (step % settings.eval_freq == 0 or step == settings.steps):
                metrics["val/score/mean"] = _sampled_score(rollout, trainer, scorer, config.trainer.seed + step)
            log.append(metrics)
            if (
                settings.stop_at_score is not None
                and metrics.get("val/score/mean", -math.inf) >= settings.stop_at_score
            ):
                break
    trainer.budget.require_finite()
    (dest / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in log))
    last = log[-1]
    score = f", sampled score {last['val/score/mean']:.3f}" if "val/score/mean" in last else ""
    context.reporter.message(f"{words}: {len(log)} SFT steps, loss {last['train/loss']:.3f}{score}")
    engine.export_directory((dest / "export").absolute(), model)
    if rollout is not None:
        rollout.engine.shutdown()
    engine.shutdown()
    return trained_model(model, dest)


def trained_model(model: ModelConfig, dest: Path) -> ModelConfig:
    """The model section that loads what :func:`supervised_start` has left in ``dest``."""
    export = str(dest / "export")
    return model.model_copy(update={"path": export, "config": None, "init": "pretrained", "tokenizer": export})


def _sampled_score(rollout: RolloutRole, trainer: SFTTrainer, scorer: RewardScorer, seed: int) -> float:
    rows = trainer.val_rows[:128]
    rollout.sync(trainer.engine)
    prompts, completions = rollout.converse(rows, trainer.encoder, "sample", seed)
    scored = score_completions(rows, prompts, completions, trainer.encoder, scorer)
    return sum(scored.scores) / len(scored.scores)
