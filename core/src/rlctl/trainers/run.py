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
from rlctl.errors import CheckpointError, RlctlError
from rlctl.interrupts import shielded
from rlctl.manifest import build_manifest
from rlctl.plugins import PluginSet
from rlctl.roles.budget import NonFiniteStepsError
from rlctl.rundir import RunDirectory
from rlctl.runtime.remote import RemoteEngine
from rlctl.tracking import build_tracker
from rlctl.tracking.reporter import Reporter
from rlctl.trainers import setup
from rlctl.trainers.build import build, prepare
from rlctl.trainers.trainer import Trainer


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
    def _build(self) -> Trainer:
        prepared = prepare(self.context)
        self.total_steps = prepared.total_steps
        self.checkpoint = self._find_checkpoint() if self.resuming else None
        built = build(prepared, self.run.path, resuming=self.resuming, closing=self.closing)
        self.engines, self.models = built.engines, built.models
        return built.trainer

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
                self._say_how_to_go_on(result.steps)
            else:
                text = str(error) if isinstance(error, RlctlError) else f"{type(error).__name__}: {error}"
                self.run.finish("failed", error=text, last_step=result.steps)
        except Exception as second:
            if not isinstance(second, CheckpointError) and not files.is_disk_error(second):
                raise
            # A full disk; the first error is the one to show.
            self.reporter.message(f"how the run ended could not be written: {second}")

    def _say_how_to_go_on(self, steps: int) -> None:
        """After an interruption: where a resumed run begins."""
        saved = max((step for step, _ in list_checkpoints(self.run.path)), default=None)
        if saved is None and steps:
            self.reporter.message(f"no checkpoint was saved (trainer.save_freq): the {steps} steps done are lost")
        elif saved is not None:
            self.reporter.message(
                f"{steps} steps were done; rlctl train --resume {shlex.quote(str(self.run.path))} goes on from step {saved}"
            )

    def _loop(self, trainer: Trainer, result: RunResult) -> None:
        cfg = self.config.trainer
        start = result.steps = self._resume(trainer) if self.resuming else 0
        self.run.update_manifest(
            engines=setup.describe_engines(self.engines),
            runtime=self.context.pools.describe(),
            total_training_steps=self.total_steps,
        )
        self.reporter.message(setup.start_line(self.context, self.engines, self.total_steps))
        plain = self.config.model_dump(mode="json")
        resume_step = start if self.resuming else None
        tracker = build_tracker(
            cfg.logger, self.run.path, plain, self.plugins, resume_step=resume_step, reporter=self.reporter
        )
        try:
            if facts := trainer.begin():
                self.run.update_manifest(runtime={**self.context.pools.describe(), **facts})
            if start == 0 and cfg.val_before_train and trainer.val_rows:
                tracker.log(self._validate(trainer, 0, result) | {"training/global_step": 0.0}, 0)
            for step in range(start + 1, self.total_steps + 1):
                metrics = self._step(trainer, step)
                last = step == self.total_steps
                if last:
                    trainer.budget.require_finite()
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
                if "critic" in self.engines:
                    self._export(self.run.critic, "critic")
        finally:
            tracker.close()
        if result.history and all(metrics.get("actor/rows_with_gradient") == 0 for metrics in result.history):
            self.reporter.message(
                "nothing was learnt: in every step all samples of a prompt were rewarded alike, so no row had a gradient (rlctl "
                "report shows samples; another reward, easier rows, a longer warm_start or more of rollout.n can change that)"
            )
        result.best_step = self.best[1] if self.best else None
        self.run.finish("done", last_step=result.steps)

    def _step(self, trainer: Trainer, step: int) -> dict[str, float]:
        metrics, samples = trainer.advance(step)
        if samples:
            self.run.write_samples(samples)
        return metrics

    # ---- validation, saving, resuming -------------------------------------------------------------------------
    def _validate(self, trainer: Trainer, step: int, result: RunResult) -> dict[str, float]:
        found = trainer.assess(step)
        if found.samples:
            self.run.write_samples(found.samples)
        result.validation.append((step, found.metrics))
        better = math.isfinite(found.score) and (self.best is None or found.score > self.best[0])
        if step > 0 and self.config.trainer.save_best and better:
            self.best = (found.score, step)
            self._export(self.run.best)
            self.run.update_manifest(best={"step": step, **found.metrics})
        return found.metrics

    def _export(self, dest: Path, role: str = "actor") -> None:
        self.engines[role].export_directory(dest.absolute(), self.models[role])
        if self.models[role].lora is not None and role == "actor":
            self.engines[role].export_adapters(self.run.adapters_of(dest).absolute())

    def _parts(self) -> dict[str, RemoteEngine]:
        """Engines that learn beside the actor's, by their name in a checkpoint."""
        return {name: engine for name, engine in self.engines.items() if name == "critic"}

    def _save(self, trainer: Trainer, step: int) -> None:
        state = {"step": step, "trainer": trainer.state_dict(), "best": list(self.best) if self.best else None}
        with self.reporter.phase("saving", None):
            keep = self.config.trainer.max_ckpt_to_keep
            save_checkpoint(self.run, step, self.engines["actor"], state, keep, self._parts())

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
            critic, sizes = self.config.critic, self.context.pools.size
            parts = {} if critic is None else {"critic": sizes(critic.pool or self.config.actor.pool)}
            require_world_size(checkpoint, sizes(self.config.actor.pool), parts)
        if checkpoint is not None and checkpoint.step >= self.total_steps:
            raise CheckpointError(
                f"nothing is left to train: the run stands at step {checkpoint.step} of {self.total_steps}",
                next="raise trainer.total_training_steps, or start a new run",
            )
        return checkpoint

    def _resume(self, trainer: Trainer) -> int:
        """Load the checkpoint, and take the directory back to its step. Returns the step."""
        step = 0
        if self.checkpoint is None:
            self.reporter.message(f"no complete checkpoint in {self.run.path}: starting from step 0")
        else:
            state: Mapping[str, Any] = load_checkpoint(self.checkpoint, self.engines["actor"], self._parts())
            trainer.load_state_dict(dict(state["trainer"]))
            self.best = (float(state["best"][0]), int(state["best"][1])) if state.get("best") else None
            step = int(state["step"])
            self.reporter.message(f"resumed from step {step}")
        self.begun = True
        self.run.rewind(step, self.resolved.to_yaml())
        return step
