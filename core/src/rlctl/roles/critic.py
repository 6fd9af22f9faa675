"""The critic: says what each state is worth, and learns from what came of it. N tokens of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlctl.algorithms.advantages.gae import explained_variance
from rlctl.algorithms.value_loss import ValueLoss
from rlctl.batch import PackedBatch
from rlctl.config.schema_critic import CriticConfig
from rlctl.microbatch import MicroBatchPlan
from rlctl.normalizer import item_weights
from rlctl.roles.budget import SkipBudget
from rlctl.roles.passes import average, mini_batches
from rlctl.runtime.remote import RemoteEngine

_MEANS = ("critic/vf_clipfrac", "critic/vpred_mean")
"""Means over the trained tokens, whatever the aggregation mode makes the weights add up to."""


@dataclass
class CriticRole:
    """A value model on a training engine.

    Args:
        engine: a built training engine of a value model.
        config: the ``critic`` section.
        plan: bounds of one micro-batch.
        rows_per_step: rows of one optimizer step.
        epochs: passes over each batch.
        norm_length: constant length of ``seq-mean-token-sum-norm``.
        budget: skipped steps in a row that are borne.
    """

    engine: RemoteEngine
    config: CriticConfig
    plan: MicroBatchPlan
    rows_per_step: int
    epochs: int
    norm_length: int
    budget: SkipBudget

    def values(self, batch: PackedBatch) -> torch.Tensor:
        """``[N]`` the value of the state before each trained token (see :meth:`rlctl.logits.ValueReader.values`)."""
        return self.engine.infer_batch(batch, self.plan, ("values",))["values"]

    def update(self, batch: PackedBatch, generator: torch.Generator) -> dict[str, float]:
        """All optimizer steps of one batch.

        Args:
            batch: carries ``values``, which the critic said before the update, and ``returns``, each ``[N]``.
            generator: shuffles the rows of later passes.

        Returns:
            ``critic/*``: of the batch, and of the steps.

        Raises:
            NonFiniteStepsError: too many non-finite steps in a row; the weights are those before them.
        """
        fields = {name: batch.items[name] for name in ("input_ids", "loss_mask", "returns")}
        # What an actor's loss reads need not travel to the critic's ranks.
        known = PackedBatch(batch.cu_seqlens, {**fields, "old_values": batch.items["values"]}, batch.rows, batch.meta)
        rows = mini_batches(batch.num_rows, self.rows_per_step, self.epochs, generator)
        steps = [self._step(known.select(chosen)) for chosen in rows]
        return self.describe(batch) | average(steps, "critic")

    def _step(self, mini: PackedBatch) -> dict[str, float]:
        mode = self.config.loss_agg_mode
        mini = mini.with_items(item_weight=item_weights(mini, mode, norm_length=self.norm_length))
        out = self.engine.train_batch(mini, ValueLoss(self.config.value_clip), self.plan, mode, self.norm_length)
        self.budget.note(out.step, mini, out.loss)
        weight = out.sums["_weight"]
        # What an engine says of itself (padding) is not the critic's alone. Where no token is trained nothing was seen: a zero
        # would read as a measurement.
        metrics = {name: value for name, value in out.sums.items() if name.startswith("critic/") and weight}
        metrics |= {name: metrics[name] / weight for name in _MEANS if name in metrics}
        return metrics | {
            "critic/grad_norm": out.step.grad_norm,
            "critic/lr": out.step.lr,
            "critic/skipped_steps": float(out.step.skipped),
            "critic/num_micro_batches": float(out.num_micro_batches),
            "critic/num_padding_micro_batches": float(out.num_padding),
        }

    def describe(self, batch: PackedBatch) -> dict[str, float]:
        """What the critic said of the batch before the update, beside what came; nothing where no token is trained."""
        mask = batch.items["loss_mask"].bool()
        values, returns = batch.items["values"][mask].double(), batch.items["returns"][mask].double()
        if not len(values):
            return {}
        return {
            "critic/vf_explained_var": explained_variance(batch.items["values"], batch.items["returns"], mask),
            "critic/values/mean": values.mean().item(),
            "critic/values/max": values.max().item(),
            "critic/values/min": values.min().item(),
            "critic/returns/mean": returns.mean().item(),
            "critic/returns/max": returns.max().item(),
            "critic/returns/min": returns.min().item(),
            "critic/advantages/mean": batch.items["advantages"][mask].double().mean().item(),
        }
