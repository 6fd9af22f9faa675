"""The RL loop: prompts, rollouts, rewards, advantages, update, sync."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from rlctl.algorithms.kl import FULL
from rlctl.batch import GROUP, PackedBatch, pack
from rlctl.data.prompts import PromptEncoder
from rlctl.data.rewards import RewardScorer
from rlctl.data.rows import Row
from rlctl.data.sampler import BatchSampler
from rlctl.errors import GuardError
from rlctl.roles.actor import ActorRole
from rlctl.roles.budget import SkipBudget
from rlctl.roles.reference import ReferenceRole
from rlctl.roles.rollout import RolloutRole
from rlctl.roles.teacher import TeacherRole, teacher_of
from rlctl.sync import SyncReport
from rlctl.trainers.advantages import AdvantageStage, advantage_metrics, by_group, rows_with_advantage
from rlctl.trainers.agreement import rollout_gap
from rlctl.trainers.ahead import Ahead
from rlctl.trainers.critic import CriticStage
from rlctl.trainers.entropy import EntropyStage
from rlctl.trainers.evaluation import ScoredRollout, length_metrics, score_completions, validate, watch_rows
from rlctl.trainers.rewards import RewardStage
from rlctl.trainers.rollout_correction import CorrectionStage
from rlctl.trainers.sampling import gather
from rlctl.trainers.seeds import step_seed
from rlctl.trainers.setup import Context, sync_note
from rlctl.trainers.teachers import held_out_kl
from rlctl.trainers.trainer import Assessment


@dataclass
class StepTimer:
    """``timing_s/<name>`` of one step, in seconds of wall time."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{name}": value for name, value in self.seconds.items()}


@dataclass
class RLTrainer:
    """One RL run over built roles. :meth:`step` is one global step; the runner owns checkpoints and reports."""

    context: Context
    actor: ActorRole
    rollout: RolloutRole
    reference: ReferenceRole | None
    encoder: PromptEncoder
    scorer: RewardScorer
    sampler: BatchSampler
    train_rows: Sequence[Row]
    val_rows: Sequence[Row]
    advantages: AdvantageStage
    rewards: RewardStage
    entropy: EntropyStage
    teacher: TeacherRole | None = None
    critic: CriticStage | None = None
    correction: CorrectionStage | None = None
    ahead: Ahead | None = None
    checked_all_rows: bool = False
    watched: list[tuple[int, int]] = field(default_factory=list)
    staleness: int = 0
    """Updates since the weights that the oldest row of this step was sampled with."""

    @property
    def budget(self) -> SkipBudget:
        # The one that is nearer to its end.
        budgets = [self.actor.budget, *([self.critic.role.budget] if self.critic else [])]
        return max(budgets, key=lambda budget: budget.in_a_row)

    # ---- what the runner calls --------------------------------------------------------------------------------
    def begin(self) -> dict[str, Any]:
        """See :class:`rlctl.trainers.trainer.Trainer`."""
        sync = self.rollout.sync(self.actor.engine)
        how = sync.how
        if self.ahead is not None:
            self.ahead.started(sync)
        if (note := sync_note(self.actor.engine, self.rollout.engine, how)) is not None:
            self.context.reporter.message(note)
        alone = self.critic.warmup_steps if self.critic else 0
        if alone:
            self.context.reporter.message(f"the first {alone} steps train the critic alone (critic.warmup_steps)")
        return {"weight_sync": how}

    def advance(self, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """See :class:`rlctl.trainers.trainer.Trainer`."""
        metrics, rollout = self.step(step)
        return metrics, rollout.samples(step, "train", self.context.config.trainer.rollout_samples, self.encoder)

    def assess(self, step: int) -> Assessment:
        """See :class:`rlctl.trainers.trainer.Trainer`."""
        if self.ahead is not None:
            self.ahead.settle(step, StepTimer())
        metrics, parts = self.validate()
        # The same rows each time, so that a report can set early and late side by side.
        self.watched = self.watched or watch_rows(parts, self.context.config.trainer.rollout_samples)
        samples: list[dict[str, Any]] = []
        for p, part in enumerate(parts):
            samples += part.records(step, "val", [i for q, i in self.watched if q == p], self.encoder)
        return Assessment(metrics, metrics["val/score/mean"], samples)

    # ---- one step ---------------------------------------------------------------------------------------------
    def step(self, step: int) -> tuple[dict[str, float], ScoredRollout]:
        """Sample, reward, update and sync; ``step`` counts from 1."""
        timer = StepTimer()
        start = time.perf_counter()
        gathered = gather(self, step, timer)
        rollout, self.staleness = gathered.rollout, gathered.staleness
        batch, inputs = self.advantage_inputs(self.pack(rollout), rollout, step, timer)
        if (note := self.rollout.rest()) is not None:
            self.context.reporter.message(note)
        with timer("adv"):
            batch = self.advantages(batch, rollout.rewards, inputs)
        scores = torch.tensor(rollout.scores, dtype=torch.float64)
        if self.teacher is not None:
            with timer("teacher"), self.context.reporter.phase("teacher", None):
                batch = self.teacher.annotate(batch, self.teachers(rollout), self.actor.engine, self.actor.plan)
        with self.context.reporter.phase("update", None):
            metrics = self.update(batch, step, timer)
        sync = self.ahead.last_sync if self.ahead is not None else self.synced(timer)
        assert sync is not None, "there is one before the first step"
        elapsed = time.perf_counter() - start
        total_tokens = batch.num_items
        metrics |= {
            "training/global_step": float(step),
            "training/epoch": float(self.sampler.epoch),
            "critic/score/mean": scores.mean().item(),
            "critic/score/max": scores.max().item(),
            "critic/score/min": scores.min().item(),
            **gathered.metrics,
            **self.rewards.metrics,
            **advantage_metrics(batch),
            **length_metrics(rollout),
            **{f"reward/{k}": v for k, v in _component_means(rollout).items()},
            **timer.metrics(),
            "timing_s/step": elapsed,
            "sync/seconds": sync.seconds,
            "sync/bytes": float(sync.num_bytes),
            "perf/sync_gb_per_s": sync.gb_per_s,
            "sync/peak_bytes": float(sync.peak_bytes),
            "perf/time_per_step": elapsed,
            "perf/total_num_tokens": float(total_tokens),
            "perf/throughput": total_tokens / elapsed / self.context.pools.num_ranks,
            "perf/gen_throughput": gathered.num_tokens / gathered.seconds,
            **self.actor.engine.seqlen_metrics(batch),
            **self.memory(),
        }
        return metrics, rollout

    def synced(self, timer: StepTimer) -> SyncReport:
        """Serve the weights of this moment."""
        with timer("update_weights"):
            return self.rollout.sync(self.actor.engine)

    def advantage_inputs(
        self, batch: PackedBatch, rollout: ScoredRollout, step: int, timer: StepTimer
    ) -> tuple[PackedBatch, dict[str, torch.Tensor]]:
        """What the estimator names and has to be made (:data:`rlctl.algorithms.table.COSTLY`), by name.

        Old log-probs stay in the batch, where the update would else make them.
        """
        takes, inputs = self.advantages.takes, dict[str, torch.Tensor]()
        batch, rewards = self.rewards.mask(batch, rollout), self.rewards.shape(rollout)
        if takes("greedy_scores"):
            with timer("gen_max"), self.context.reporter.phase("greedy baseline", None):
                seed = step_seed(self.context.config.trainer.seed, step, 3)
                prompts, completions = self.rollout.converse(rollout.rows, self.encoder, "greedy", seed)
                greedy = score_completions(rollout.rows, prompts, completions, self.encoder, self.scorer)
            # On the scale of the samples' rewards.
            inputs["greedy_scores"] = by_group(batch, completions, self.rewards.shape(greedy, learn=False).tolist())
        if self.critic is not None:
            with timer("values"), self.context.reporter.phase("values", None):
                batch = self.critic.judge(batch)
        if self.context.config.algorithm.bypass_mode:
            batch = batch.with_items(old_log_probs=batch.items["rollout_log_probs"])
        asked = takes("old_log_probs") or self.rewards.uses_kl
        want = ("log_probs",) if asked and "old_log_probs" not in batch.items else ()
        want += ("sum_p2",) if takes("sum_p2") else ()
        if want:
            with timer("old_log_prob"):
                inputs |= self.actor.score(batch, want)
        if "log_probs" in inputs:
            batch = batch.with_items(old_log_probs=inputs.pop("log_probs"))
        if self.rewards.uses_kl:
            batch = self.with_reference(batch, timer)
        return batch, inputs | self.rewards.inputs(batch, rollout, rewards)

    def with_reference(self, batch: PackedBatch, timer: StepTimer) -> PackedBatch:
        """``batch`` with what the reference says of its tokens, where there is one and the batch has not got it yet."""
        if self.reference is None or "ref_log_probs" in batch.items:
            return batch
        whole = self.context.config.actor.use_kl_loss and self.context.config.actor.kl_loss_type == FULL
        with timer("ref"):
            return batch.with_items(**self.reference.score(batch, whole=whole))

    def memory(self) -> dict[str, float]:
        """Peak memory in GiB: the largest over the ranks of every pool."""
        engines = [self.actor.engine, *([self.reference.engine] if self.reference else [])]
        # Its processes may be at work on the next rollouts.
        engines += [] if self.ahead else [self.rollout.engine]
        engines += self.teacher.engines.values() if self.teacher else []
        engines += [self.critic.role.engine] if self.critic else []
        found = [engine.memory() for engine in {engine.group.name: engine for engine in engines}.values()]
        found += [self.ahead.memory] if self.ahead else []
        return {name: max(m[name] for m in found) for name in found[0]}

    def pack(self, rollout: ScoredRollout) -> PackedBatch:
        """Rows of prompt and completion tokens as one batch.

        Item fields: ``input_ids``, ``loss_mask`` (the tokens that the policy sampled) and ``rollout_log_probs``; row field: the
        group.
        """
        ids, mask, log_probs = [], [], []
        for c in rollout.completions:
            prompt = rollout.prompts[c.prompt_index]
            ids.append([*prompt, *c.token_ids])
            mask.append([False] * len(prompt) + c.sampled)
            log_probs.append([0.0] * len(prompt) + c.log_probs)
        return pack(
            {"input_ids": ids, "loss_mask": mask, "rollout_log_probs": log_probs},
            rows={GROUP: [c.prompt_index for c in rollout.completions]},
            meta={"temperature": self.context.config.rollout.temperature},
            dtypes={"input_ids": torch.long, "loss_mask": torch.bool, "rollout_log_probs": torch.float32},
        )

    def teachers(self, rollout: ScoredRollout) -> list[str]:
        """The name of the teacher of each completion."""
        section = self.context.config.teacher
        assert section is not None, "asked only where there is a teacher"
        assert self.teacher is not None, "asked only where there is a teacher"
        known = list(self.teacher.engines)
        return [teacher_of(rollout.rows[c.prompt_index], section.route_by, known) for c in rollout.completions]

    # ---- the update -------------------------------------------------------------------------------------------
    def update(self, batch: PackedBatch, step: int, timer: StepTimer) -> dict[str, float]:
        """Score what has to be scored, drop rows without a gradient, run the optimizer steps."""
        config = self.context.config
        actor_cfg = config.actor
        rows_per_step = (actor_cfg.ppo_mini_batch_size or config.data.train_batch_size) * config.rollout.n
        one_step = actor_cfg.ppo_epochs == 1 and rows_per_step >= batch.num_rows
        metrics: dict[str, float] = {}
        if not self.checked_all_rows and self.actor.check_rollout:
            # Before the first update every row is compared, whatever the update below leaves out. The step's own metric stays
            # what the update measures, as in every step: a resume, which compares anew, must not change a number.
            with timer("old_log_prob"):
                scored = self.actor.score(batch)["log_probs"]
            self.compare(batch, scored)
            self.checked_all_rows = True
        if self.critic is not None:
            with timer("update_critic"):
                shuffle = torch.Generator().manual_seed(step_seed(config.trainer.seed, step, 4))
                batch, learnt = self.critic.learn(batch, shuffle)
            metrics |= learnt
            if self.critic.warms_up(step):
                metrics |= self.gap_without_update(batch, rows_per_step, step, timer)
                self.guard(metrics)
                return metrics
        compared = self.actor.formula.chooser is not None or self.correction is not None
        if "old_log_probs" not in batch.items and (not one_step or compared):
            # With exactly one optimizer step the old log-probs are the current ones: a pass of its own adds nothing, unless
            # tokens are chosen, weighed or rejected by them before that step.
            with timer("old_log_prob"):
                batch = batch.with_items(old_log_probs=self.actor.score(batch)["log_probs"])
        corrected: dict[str, float] = {}
        if self.correction is not None:
            batch, corrected = self.correction(batch)
        keep = self.rows_with_gradient(batch)
        metrics["actor/rows_with_gradient"] = len(keep) / batch.num_rows
        if actor_cfg.use_kl_loss:
            batch = self.with_reference(batch, timer)
        if self.correction is None and keep.isdisjoint(range(rows_per_step)):
            # The first mini-batch trains nothing, so that the update, which measures the gap, will not see it.
            metrics |= self.gap_without_update(batch, rows_per_step, step, timer)
        generator = torch.Generator().manual_seed(step_seed(config.trainer.seed, step, 1))
        self.actor.config = self.entropy.actor_config()
        with timer("update_actor"):
            metrics |= self.actor.update(batch, rows_per_step, keep, generator)
        metrics |= self.entropy.learn(metrics)
        metrics |= corrected
        self.guard(metrics)
        return metrics

    def rows_with_gradient(self, batch: PackedBatch) -> set[int]:
        """Rows whose loss has a gradient: all that have a trained token, unless only a policy term is on that vanishes with the
        advantage; then those with an advantage that is not exactly zero."""
        cfg = self.context.config.actor
        further = cfg.entropy_coeff or self.entropy.adaptive or cfg.use_kl_loss or self.teacher is not None
        if not cfg.skip_zero_advantage or further or not self.actor.formula.spec.vanishes:
            return set(batch.row_ids()[batch.items["loss_mask"].bool()].tolist())
        return rows_with_advantage(batch)

    # ---- guards -----------------------------------------------------------------------------------------------
    def compare(self, batch: PackedBatch, log_probs: torch.Tensor) -> None:
        """Rollout against trainer probabilities of the sampled tokens.

        Raises:
            GuardError: their mean difference is over the threshold.
        """
        self.guard(rollout_gap(batch, log_probs))

    def gap_without_update(
        self, batch: PackedBatch, rows_per_step: int, step: int, timer: StepTimer
    ) -> dict[str, float]:
        """What an update would have measured of its first mini-batch; where no token of that is trained, it is said."""
        if not self.actor.check_rollout:
            return {}
        mini = batch.select(range(min(rows_per_step, batch.num_rows)))
        if not bool(mini.items["loss_mask"].any()):
            self.context.reporter.message(
                f"step {step}: rollout and trainer are not compared, no token of the first mini-batch is trained"
            )
            return {}
        with timer("old_log_prob"):
            return rollout_gap(mini, self.actor.score(mini)["log_probs"])

    def guard(self, metrics: dict[str, float]) -> None:
        """Stop when rollout and trainer have drifted apart. Rows of an older policy differ by right: not after those."""
        if self.staleness:
            return
        gap = metrics.get("training/rollout_probs_diff_mean")
        limit = self.context.config.guards.rollout_probs_diff_mean_max
        if gap is not None and not gap <= limit:
            raise GuardError(
                "rollout and trainer disagree on the probabilities of the sampled tokens",
                found=f"mean |difference| {gap:.4f}",
                wanted=f"at most {limit} (under 0.005 is normal)",
                next="check that both use one dtype and one chat template; "
                "guards.rollout_probs_diff_mean_max sets the limit, guards.rollout_logprob_check=false turns it off; "
                "algorithm.rollout_correction weighs samples that differ",
            )

    # ---- validation -------------------------------------------------------------------------------------------
    def validate(self) -> tuple[dict[str, float], list[ScoredRollout]]:
        config = self.context.config
        start = time.perf_counter()
        metrics, parts = validate(
            self.val_rows,
            self.rollout,
            self.encoder,
            self.scorer,
            batch_size=config.data.val_batch_size,
            seed=step_seed(config.trainer.seed, 0, 2),
            reporter=self.context.reporter,
        )
        if self.teacher is not None:
            batches = [(self.pack(part), self.teachers(part)) for part in parts]
            metrics["val/distillation/kl"] = held_out_kl(self.teacher, self.actor, batches)
        return metrics | {"timing_s/testing": time.perf_counter() - start}, parts

    def state_dict(self) -> dict[str, Any]:
        return {
            "sampler": self.sampler.state_dict(),
            "rollout_version": self.rollout.version,
            "skipped_in_a_row": self.actor.budget.in_a_row,
            **({"critic_skipped_in_a_row": self.critic.role.budget.in_a_row} if self.critic else {}),
            **({"ahead": self.ahead.state_dict()} if self.ahead else {}),
            "rewards": self.rewards.state_dict(),
            "entropy": self.entropy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self.rollout.version = int(state["rollout_version"])
        self.actor.budget.in_a_row = int(state.get("skipped_in_a_row", 0))
        if self.critic is not None:
            self.critic.role.budget.in_a_row = int(state.get("critic_skipped_in_a_row", 0))
        if self.ahead is not None and "ahead" in state:
            self.ahead.load_state_dict(state["ahead"])
        notes = self.rewards.load_state_dict(state.get("rewards", {}))
        notes += self.entropy.load_state_dict(state.get("entropy", {}))
        for note in notes:
            self.context.reporter.message(note)


def _component_means(rollout: ScoredRollout) -> dict[str, float]:
    """Mean of each component over the rows that have it: some are of certain sources only."""
    names = sorted({name for r in rollout.rewards for name in r.components})
    if len(names) < 2:
        return {}
    found = {n: [r.components[n] for r in rollout.rewards if n in r.components] for n in names}
    return {n: sum(values) / len(values) for n, values in found.items()}
