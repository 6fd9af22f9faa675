"""The actor: scores its own samples and learns from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlctl.algorithms.calling import choose_tokens
from rlctl.algorithms.distillation_loss import DIAGNOSTICS, DistillationLoss
from rlctl.algorithms.lookup import Algorithm, builtin
from rlctl.algorithms.losses import PolicyLoss
from rlctl.batch import PackedBatch, padding_like
from rlctl.config.schema import ActorConfig
from rlctl.config.schema_distillation import DistillationConfig
from rlctl.logits import LossFn
from rlctl.microbatch import MicroBatchPlan
from rlctl.normalizer import item_weights
from rlctl.records import AlgorithmKind
from rlctl.roles.budget import SkipBudget
from rlctl.roles.passes import average, mini_batches
from rlctl.runtime.remote import RemoteEngine

_MEANS = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/entropy", *DIAGNOSTICS)


@dataclass
class ActorRole:
    """The policy on a training engine.

    Args:
        engine: a built training engine.
        config: the ``actor`` section.
        plan: bounds of one micro-batch.
        norm_length: constant length of ``seq-mean-token-sum-norm``.
        budget: skipped steps in a row that are borne.
        check_rollout: compare rollout and trainer probabilities on the first mini-batch after each sync.
        distillation: learn from the teacher's fields of the batch too.
        policy_loss: a policy loss that is not rlctl's own; None: the one that ``config`` names.
    """

    engine: RemoteEngine
    config: ActorConfig
    plan: MicroBatchPlan
    norm_length: int
    budget: SkipBudget
    check_rollout: bool = True
    distillation: DistillationConfig | None = None
    policy_loss: Algorithm | None = None

    @property
    def formula(self) -> Algorithm:
        """The policy loss."""
        return self.policy_loss or builtin(AlgorithmKind.POLICY_LOSS, self.config.policy_loss.loss_mode)

    def score(self, batch: PackedBatch, want: tuple[str, ...] = ("log_probs",)) -> dict[str, torch.Tensor]:
        """Log-probs of the batch's own tokens (or what else ``infer_batch`` knows), ``[N]`` each."""
        return self.engine.infer_batch(batch, self.plan, want)

    def update(
        self, batch: PackedBatch, rows_per_step: int, keep: set[int], generator: torch.Generator
    ) -> dict[str, float]:
        """All optimizer steps of one batch: ``ppo_epochs`` passes over mini-batches of ``rows_per_step`` rows.

        Args:
            batch: carries ``advantages`` and, unless there is exactly one step of a loss that does without, ``old_log_probs``.
            rows_per_step: rows of one optimizer step.
            keep: rows that have a gradient; the others are left out of the passes but counted by the normaliser, so
                the step is the same one.
            generator: shuffles the rows of later epochs, and makes the choices of a loss that chooses tokens.

        Returns:
            Metrics by the field's names, averaged over the steps (maxima for ``*_max``).

        Raises:
            NonFiniteStepsError: too many non-finite steps in a row; the weights are those before them.
        """
        steps: list[dict[str, float]] = []
        for rows in mini_batches(batch.num_rows, rows_per_step, self.config.ppo_epochs, generator):
            steps.append(self._step(self._weighted(batch, rows, keep, generator), first=not steps))
        return average(steps, "actor")

    def _weighted(self, batch: PackedBatch, rows: list[int], keep: set[int], generator: torch.Generator) -> PackedBatch:
        """The mini-batch ``rows``, weighted and its tokens chosen as a whole, less the rows without a gradient."""
        mini = batch.select(rows)
        weights = item_weights(mini, self.config.loss_agg_mode, norm_length=self.norm_length)
        mini = mini.with_items(item_weight=weights)
        if (chooser := self.formula.chooser) is not None:
            mini = choose_tokens(chooser, self.config.policy_loss, mini, generator)
        kept = [i for i, row in enumerate(rows) if row in keep]
        if not kept:
            # A zero gradient still takes its step: moments decay and the schedule moves, as without leaving rows out.
            return padding_like(mini)
        return mini if len(kept) == len(rows) else mini.select(kept)

    def _step(self, mini: PackedBatch, *, first: bool) -> dict[str, float]:
        check = self.check_rollout and first
        if self.distillation is None:
            loss_fn: LossFn = PolicyLoss(self.config, check, self.policy_loss)
        else:
            loss_fn = DistillationLoss(self.config, self.distillation, check, self.policy_loss)
        out = self.engine.train_batch(mini, loss_fn, self.plan, self.config.loss_agg_mode, self.norm_length)
        sums = dict(out.sums)
        weight = sums.pop("_weight", 1.0) or 1.0
        gap, tokens = sums.pop("_rollout_gap", None), sums.pop("_rollout_tokens", 0.0)
        metrics = dict(sums)
        # Diagnostics are means over the trained tokens, whatever the aggregation mode makes the weights add up to.
        for name in _MEANS:
            if name not in sums:
                continue
            if mini.is_padding:
                del metrics[name]  # no token was trained: a zero would read as a measurement
            else:
                metrics[name] = sums[name] / weight
        if gap is not None and tokens:
            metrics["training/rollout_probs_diff_mean"] = gap / tokens
        metrics |= {
            **({} if mini.is_padding else out.maxes),  # nothing was seen, and the largest of nothing is minus infinity
            "actor/loss": out.loss,
            "actor/grad_norm": out.step.grad_norm,
            "actor/lr": out.step.lr,
            "actor/skipped_steps": float(out.step.skipped),
            "actor/num_micro_batches": float(out.num_micro_batches),
            "actor/num_padding_micro_batches": float(out.num_padding),
        }
        self.budget.note(out.step, mini, out.loss)
        return metrics
