"""One run from configuration to export: run directory, trainer, checkpoints, best weights, report of what happened."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl import files
from rlctl.batch import save_batch
from rlctl.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    require_world_size,
    save_checkpoint,
)
from rlctl.config.load import ResolvedConfig
from rlctl.data.lengths import fit_rows
from rlctl.data.prompts import PromptEncoder
from rlctl.data.rewards import build_reward
from rlctl.data.rows import load_rows
from rlctl.data.sampler import BatchSampler
from rlctl.data.tokenizer import load_tokenizer
from rlctl.errors import CheckpointError, RlctlError
from rlctl.interrupts import shielded
from rlctl.manifest import build_manifest, filtered_sampling
from rlctl.plugins import PluginSet
from rlctl.roles.actor import ActorRole
from rlctl.roles.budget import NonFiniteStepsError, SkipBudget
from rlctl.roles.reference import ReferenceRole
from rlctl.roles.rollout import RolloutRole
from rlctl.rundir import RunDirectory
from rlctl.runtime.remote import RemoteEngine
from rlctl.tracking import build_tracker
from rlctl.tracking.reporter import Reporter
from rlctl.trainers import setup, teachers
from rlctl.trainers.evaluation import watch_rows
from rlctl.trainers.rl import RLTrainer
from rlctl.trainers.sft import SFTTrainer
from rlctl.trainers.warm_start import trained_model, warm_start


@dataclass
class RunResult:
    """What a finished run shows: where it is, its first and last metrics, validation over time."""

    path: Path
    steps: int
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    validation: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    best_step: int | None = None
    history: list[dict[str, float]] = field(default_factory=list)


class Runner:
    """Drives a trainer over its steps. ``resume`` continues in an existing run directory."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        plugins: PluginSet,
        reporter: Reporter,
        *,
        run_dir: Path | None = None,
        resume: Path | None = None,
    ) -> None:
        self.resolved = resolved
        self.config = resolved.config
        self.reporter = reporter
        self.context = setup.make_context(resolved, plugins, reporter)
        self.plugins = plugins
        self.run = self._open_run(run_dir, resume)
        self.context.pools.log_dir = self.run.path.absolute() / "workers"
        self.resuming = resume is not None
        self.begun = not self.resuming
        self.checkpoint: Checkpoint | None = None
        reporter.message(f"run directory {self.run.path}")
        self.engines: dict[str, RemoteEngine] = {}
        self.closing = ExitStack()
        self.best: tuple[float, int] | None = None
        self.watched: list[tuple[int, int]] = []

    def _open_run(self, run_dir: Path | None, resume: Path | None) -> RunDirectory:
        if resume is not None:
            return RunDirectory.open(resume)
        manifest = build_manifest(self.resolved, self.plugins, device=self.context.device)
        text = self.resolved.to_yaml()
        if run_dir is not None:
            if run_dir.exists():
                raise CheckpointError(
                    f"the run directory {run_dir} exists already",
                    wanted="a new directory",
                    next=f"rlctl train --resume {run_dir}, or another --run-dir",
                )
            return RunDirectory.create(run_dir.parent, run_dir.name, text, manifest, exact=True)
        return RunDirectory.create(None, setup.run_name(self.resolved), text, manifest)

    # ---- building ---------------------------------------------------------------------------------------------
    def _build(self) -> RLTrainer | SFTTrainer:
        config, context = self.config, self.context
        with self.reporter.phase("start-up", None):
            model = setup.prepare_model(context)
            setup.check_roles(context, model)
            tokenizer = load_tokenizer(model)
            teacher_models = teachers.find_teachers(context, tokenizer)
            encoder = PromptEncoder(tokenizer, config.data)
            train_rows, val_rows = load_rows(config.data, "train"), load_rows(config.data, "val")
            teachers.require_teachers([*train_rows, *val_rows], config, list(teacher_models))
        sft = config.trainer.type == "sft"
        with self.reporter.phase("encoding rows", None):
            train_rows = fit_rows(train_rows, encoder, config.data, sft=sft)
            val_rows = fit_rows(val_rows, encoder, config.data, sft=sft)
        sampler = BatchSampler(len(train_rows), config.data.train_batch_size, config.data.shuffle, config.trainer.seed)
        self.tokenizer, self.model = tokenizer, model
        self.total_steps = setup.schedule_length(config, len(train_rows))
        self.checkpoint = self._find_checkpoint() if self.resuming else None
        longest = config.data.max_prompt_length + config.data.max_response_length
        plan = setup.token_plan(config.actor, config)
        if sft:
            optim = setup.with_schedule(config.actor.optim, self.total_steps)
            engine = setup.build_train_engine(context, config.actor, model, name="actor", optim=optim)
            self.engines["actor"] = engine
            budget = SkipBudget(config.guards.nonfinite_step_budget)
            return SFTTrainer(context, engine, plan, encoder, sampler, train_rows, val_rows, longest, budget)
        scorer = build_reward(config.reward, self.plugins, self.resolved.base_dir)
        self.closing.callback(scorer.close)
        teacher_models = teachers.train_teacher(
            context, teacher_models, encoder, scorer, train_rows, val_rows, self.run.path / "teacher"
        )
        if config.warm_start is not None:
            started = self.run.path / "warm_start"
            if self.resuming and (started / "export").is_dir():
                model = trained_model(model, started)
            else:
                model = warm_start(context, model, encoder, scorer, train_rows, val_rows, started)
            self.model = model
        mini = config.actor.ppo_mini_batch_size or config.data.train_batch_size
        updates = self.total_steps * config.actor.ppo_epochs * (config.data.train_batch_size // mini)
        optim = setup.with_schedule(config.actor.optim, updates)
        actor = setup.build_train_engine(context, config.actor, model, name="actor", optim=optim)
        rollout = setup.build_rollout_engine(context, model)
        self.engines |= {"actor": actor, "rollout": rollout}
        reference: ReferenceRole | None = None
        if config.actor.use_kl_loss:
            ref = config.ref
            engine = setup.build_train_engine(
                context,
                ref,
                model,
                name="ref",
                optim=None,
                backend=ref.backend or config.actor.backend,
                engine_section=ref.engine or config.actor.engine,
            )
            self.engines["ref"] = engine
            reference = ReferenceRole(engine, setup.token_plan(ref, config))
        teacher = teachers.build_teachers(context, teacher_models, actor)
        if teacher is not None:
            self.engines |= {teachers.engine_name(name): engine for name, engine in teacher.engines.items()}
        # Filters change the sampling distribution, so its probabilities are not the trainer's and cannot be compared.
        guards = config.guards
        filtered = filtered_sampling(config.rollout)
        if guards.rollout_logprob_check and filtered:
            self.reporter.message(f"guards.rollout_logprob_check cannot look: {filtered}")
        actor_role = ActorRole(
            actor,
            config.actor,
            plan,
            config.data.max_response_length,
            SkipBudget(guards.nonfinite_step_budget),
            check_rollout=guards.rollout_logprob_check and not filtered,
            distillation=config.distillation,
        )
        rollout_role = RolloutRole(
            rollout,
            config.rollout,
            config.data.max_response_length,
            stop_token_ids=encoder.stop_token_ids,
            verify_sync=guards.weight_fingerprint,
            dtype=setup.copy_dtype(config),
            transfer=setup.transfer(config),
        )
        return RLTrainer(
            context, actor_role, rollout_role, reference, encoder, scorer, sampler, train_rows, val_rows, teacher
        )

    # ---- the run ----------------------------------------------------------------------------------------------
    def execute(self) -> RunResult:
        """Run to the end. Whatever ends it, the run directory says so (done, failed, interrupted).

        A resume that is refused before it has changed anything leaves the directory as it was.

        Raises:
            CheckpointError: another process trains in this directory, nothing is left to train, or the directory cannot
                be written.
        """
        result = RunResult(self.run.path, 0)
        try:
            self.closing.enter_context(self.run.lock())
            trainer = self._build()
            self._loop(trainer, result)
        except BaseException as error:
            with shielded():
                self._record(error, result)
            if (fault := self._directory_fault(error)) is not None:
                raise fault from error
            raise
        finally:
            with shielded():
                self.context.pools.close()
                self.closing.close()
                self.reporter.close()
        return result

    def _directory_fault(self, error: BaseException) -> CheckpointError | None:
        """The error to show for one that comes from the disk under the run directory; None for any other."""
        if not files.is_disk_error(error):
            return None
        path = self.run.path
        what, cause = f"the run directory {path} cannot be written", files.disk_fault(error)
        if not path.is_dir():
            what, cause = f"the run directory {path} was removed while the run went on", "start a new run"
        elif cause is None or not str(getattr(error, "filename", None) or path).startswith(str(path)):
            return None
        elif latest_checkpoint(path, deep=False, notice=lambda text: None) is not None:
            cause += f", then rlctl train --resume {shlex.quote(str(path))}"
        return CheckpointError(what, found=str(error), next=cause)

    def _record(self, error: BaseException, result: RunResult) -> None:
        """Write down how the run ended: it must not claim to be running for ever."""
        if not self.begun:
            return
        try:
            if isinstance(error, NonFiniteStepsError):
                save_batch(error.batch, str(self.run.path / f"nonfinite_step_{result.steps + 1}.safetensors"))
            if isinstance(error, KeyboardInterrupt):
                self.run.finish("interrupted", last_step=result.steps)
            else:
                text = str(error) if isinstance(error, RlctlError) else f"{type(error).__name__}: {error}"
                self.run.finish("failed", error=text, last_step=result.steps)
        except Exception as second:
            if not isinstance(second, CheckpointError) and not files.is_disk_error(second):
                raise
            # A full disk; the first error is the one to show.
            self.reporter.message(f"how the run ended could not be written: {second}")

    def _loop(self, trainer: RLTrainer | SFTTrainer, result: RunResult) -> None:
        cfg = self.config.trainer
        start = result.steps = self._resume(trainer) if self.resuming else 0
        self.run.update_manifest(
            engines=setup.describe_engines(self.engines),
            runtime=self.context.pools.describe(),
            total_training_steps=self.total_steps,
        )
        self.reporter.message(setup.start_line(self.context, self.engines["actor"], self.total_steps))
        plain = self.config.model_dump(mode="json")
        resume_step = start if self.resuming else None
        tracker = build_tracker(
            cfg.logger, self.run.path, plain, self.plugins, resume_step=resume_step, reporter=self.reporter
        )
        try:
            if isinstance(trainer, RLTrainer):
                how = trainer.rollout.sync(trainer.actor.engine).how
                self.run.update_manifest(runtime={**self.context.pools.describe(), "weight_sync": how})
            if start == 0 and cfg.val_before_train and trainer.val_rows:
                tracker.log(self._validate(trainer, 0, result) | {"training/global_step": 0.0}, 0)
            for step in range(start + 1, self.total_steps + 1):
                metrics = self._step(trainer, step)
                last = step == self.total_steps
                if trainer.val_rows and (last or (cfg.test_freq and step % cfg.test_freq == 0)):
                    metrics |= self._validate(trainer, step, result)
                result.steps, result.last = step, metrics
                result.first = result.first or metrics
                result.history.append(metrics)
                tracker.log(metrics, step)
                self.reporter.step(step, self.total_steps, metrics)
                # A skipped step may mean broken weights: they must not push the last good checkpoint out.
                if last or (cfg.save_freq and step % cfg.save_freq == 0 and trainer.budget.in_a_row == 0):
                    self._save(trainer, step)
            with self.reporter.phase("saving", None):
                self._export(self.run.export)
        finally:
            tracker.close()
        result.best_step = self.best[1] if self.best else None
        self.run.finish("done", last_step=result.steps)

    def _step(self, trainer: RLTrainer | SFTTrainer, step: int) -> dict[str, float]:
        if isinstance(trainer, SFTTrainer):
            return trainer.step(step)
        metrics, rollout = trainer.step(step)
        limit = self.config.trainer.rollout_samples
        self.run.write_samples(rollout.samples(step, "train", limit, trainer.encoder))
        return metrics

    # ---- validation, saving, resuming -------------------------------------------------------------------------
    def _validate(self, trainer: RLTrainer | SFTTrainer, step: int, result: RunResult) -> dict[str, float]:
        if isinstance(trainer, SFTTrainer):
            metrics = trainer.validate()
            score = -metrics["val/loss"]
        else:
            metrics, parts = trainer.validate()
            limit = self.config.trainer.rollout_samples
            # The same rows each time, so that a report can set early and late side by side.
            self.watched = self.watched or watch_rows(parts, limit)
            for p, part in enumerate(parts):
                picks = [i for q, i in self.watched if q == p]
                self.run.write_samples(part.records(step, "val", picks, trainer.encoder))
            score = metrics["val/score/mean"]
        result.validation.append((step, metrics))
        better = math.isfinite(score) and (self.best is None or score > self.best[0])
        if step > 0 and self.config.trainer.save_best and better:
            self.best = (score, step)
            self._export(self.run.best)
            self.run.update_manifest(best={"step": step, **metrics})
        return metrics

    def _export(self, dest: Path) -> None:
        self.engines["actor"].export_directory(dest.absolute(), self.model)

    def _save(self, trainer: RLTrainer | SFTTrainer, step: int) -> None:
        state = {"step": step, "trainer": trainer.state_dict(), "best": list(self.best) if self.best else None}
        with self.reporter.phase("saving", None):
            save_checkpoint(self.run, step, self.engines["actor"], state, self.config.trainer.max_ckpt_to_keep)

    def _find_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to go on from, looked for before anything is built or changed.

        Raises:
            CheckpointError: all that are there are damaged; another number of ranks wrote it, or no step is left after it.
        """
        checkpoint = latest_checkpoint(self.run.path, notice=self.reporter.message)
        if checkpoint is None and (there := list_checkpoints(self.run.path)):
            # To begin again from step 0 would put a worse model in the place of the best one and the export.
            raise CheckpointError(
                "every checkpoint of this run is damaged",
                found=", ".join(path.name for _, path in there),
                wanted="one that is whole",
                next="start a new run with another --run-dir",
            )
        if checkpoint is not None:
            require_world_size(checkpoint, self.context.pools.size(self.config.actor.pool))
        if checkpoint is not None and checkpoint.step >= self.total_steps:
            raise CheckpointError(
                f"nothing is left to train: the run stands at step {checkpoint.step} of {self.total_steps}",
                next="raise trainer.total_training_steps, or start a new run",
            )
        return checkpoint

    def _resume(self, trainer: RLTrainer | SFTTrainer) -> int:
        """Load the checkpoint, and take the directory back to its step. Returns the step."""
        step = 0
        if self.checkpoint is None:
            self.reporter.message(f"no complete checkpoint in {self.run.path}: starting from step 0")
        else:
            state: Mapping[str, Any] = load_checkpoint(self.checkpoint, self.engines["actor"])
            trainer.load_state_dict(dict(state["trainer"]))
            self.best = (float(state["best"][0]), int(state["best"][1])) if state.get("best") else None
            step = int(state["step"])
            self.reporter.message(f"resumed from step {step}")
        self.begun = True
        self.run.rewind(step, self.resolved.to_yaml())
        return step
