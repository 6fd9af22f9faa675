"""Learning from pairs: DPO and its relatives, and the training of a reward model. One optimizer step a batch of pairs.

Of each batch the model's numbers are read first, without gradients: the log-prob of each response (and the reference's), or
the score of each row. The losses and their slopes follow on the controller, and the step with gradients is that of a plain
weighted sum over tokens: :mod:`rlctl.algorithms.preference.slopes` says why that is exact.

P pairs of a batch, 2 P rows in the order chosen, rejected, chosen, ...; N tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlctl.algorithms.preference.base import PairLosses
from rlctl.algorithms.preference.losses import dpo_losses, reward_losses
from rlctl.algorithms.preference.slopes import PairFunction, SlopeLoss, linearised, row_sums, slopes
from rlctl.batch import GROUP, PackedBatch, pack
from rlctl.config.schema_preference import DPOConfig, RMConfig
from rlctl.data.pairs import sides
from rlctl.data.prompts import PromptEncoder
from rlctl.data.rows import Row
from rlctl.data.sampler import BatchSampler
from rlctl.microbatch import MicroBatchPlan
from rlctl.roles.budget import SkipBudget
from rlctl.roles.reference import ReferenceRole
from rlctl.runtime.remote import RemoteEngine
from rlctl.trainers.setup import Context
from rlctl.trainers.trainer import Assessment

MARGIN = "margin"
"""Row field ``[2 P]``: by how much the chosen response is better."""


class Objective(Protocol):
    """What is read of a batch of pairs, and what is made of it."""

    extra: int
    """Tokens that :meth:`rows` adds to a side."""
    read: str
    """What the engine says of each token: ``log_probs`` or ``values``."""

    def row(self, ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
        """(ids, loss mask) of a row of the batch, from those of a side."""
        ...

    def losses(self, batch: PackedBatch) -> PairFunction:
        """The losses of the pairs of ``batch`` as a function of its rows' numbers; scores the reference, where there is one."""
        ...

    def describe(self, batch: PackedBatch, rows: torch.Tensor) -> dict[str, float]:
        """Metrics of a batch from its rows' numbers ``[2 P]``, beside the losses and the rewards."""
        ...


@dataclass
class DPO:
    """DPO and its relatives on a language model; ``reference`` is None where the loss has none."""

    config: DPOConfig
    reference: ReferenceRole | None
    extra: int = 0
    read: str = "log_probs"

    def row(self, ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
        return ids, mask

    def losses(self, batch: PackedBatch) -> PairFunction:
        reference = None
        if self.reference is not None:
            reference = row_sums(batch, self.reference.score(batch)["ref_log_probs"])
        lengths = _lengths(batch)
        return lambda rows: dpo_losses(rows, self.config, lengths, reference)

    def describe(self, batch: PackedBatch, rows: torch.Tensor) -> dict[str, float]:
        means = rows / _lengths(batch)
        return {
            "logps/chosen": rows[0::2].mean().item(),
            "logps/rejected": rows[1::2].mean().item(),
            "nll_loss": -means[0::2].mean().item(),
        }


@dataclass
class RewardModel:
    """Bradley-Terry on a value model. A token is added behind each row: the value before it is that of the whole row."""

    config: RMConfig
    extra: int = 1
    read: str = "values"

    def row(self, ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
        # Which token it is makes no difference: nothing before it sees it.
        return [*ids, ids[-1]], [*([False] * len(ids)), True]

    def losses(self, batch: PackedBatch) -> PairFunction:
        margin = batch.rows[MARGIN][0::2].double() if MARGIN in batch.rows else None
        return lambda rows: reward_losses(rows, self.config, margin)

    def describe(self, batch: PackedBatch, rows: torch.Tensor) -> dict[str, float]:
        return {"rewards/mean": rows.mean().item()}


@dataclass
class PairTrainer:
    """One run over pairs on a built training engine.

    Pairs of which a side is longer than the limit were refused by the data check or were filtered.
    """

    context: Context
    engine: RemoteEngine
    plan: MicroBatchPlan
    encoder: PromptEncoder
    sampler: BatchSampler
    train_rows: Sequence[Row]
    val_rows: Sequence[Row]
    objective: Objective
    budget: SkipBudget

    def pack(self, rows: Sequence[Row]) -> PackedBatch:
        """``input_ids``, ``loss_mask`` (True where a number of the row is read), the pair of each row as its group."""
        encoded = self.encoder.sft_batch([side for row in rows for side in sides(row)])
        made = [self.objective.row(ids, mask) for ids, mask in encoded]
        fields: dict[str, Any] = {GROUP: torch.arange(len(rows)).repeat_interleave(2)}
        margins = [row.pair.margin for row in rows if row.pair is not None]
        if any(margin is not None for margin in margins):
            values = torch.tensor([margin or 0.0 for margin in margins], dtype=torch.float64)
            fields[MARGIN] = values.repeat_interleave(2)
        items = {"input_ids": [ids for ids, _ in made], "loss_mask": [mask for _, mask in made]}
        return pack(items, fields, dtypes={"input_ids": torch.long, "loss_mask": torch.bool})

    def begin(self) -> dict[str, Any]:
        """See :class:`rlctl.trainers.trainer.Trainer`."""
        return {}

    def advance(self, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """See :class:`rlctl.trainers.trainer.Trainer`."""
        return self.step(step), []

    def assess(self, step: int) -> Assessment:
        """See :class:`rlctl.trainers.trainer.Trainer`."""
        metrics = self.validate()
        return Assessment(metrics, metrics["val/rewards/accuracies"])

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step; ``step`` counts from 1.

        Raises:
            NonFiniteStepsError: too many non-finite steps in a row.
        """
        start = time.perf_counter()
        batch = self.pack([self.train_rows[i] for i in self.sampler.next()])
        losses = self.objective.losses(batch)
        scored_at = time.perf_counter()
        scored = self.engine.infer_batch(batch, self.plan, (self.objective.read,))[self.objective.read]
        rows = row_sums(batch, scored)
        found, slope = slopes(losses, rows)
        loss = found.loss.mean().item()
        if not math.isfinite(loss):
            # Its slopes may be finite all the same; these are not, so that every engine leaves the step out.
            slope = torch.full_like(slope, math.nan)
        update_at = time.perf_counter()
        ready = linearised(batch, slope, scored)
        out = self.engine.train_batch(ready, SlopeLoss(self.objective.read == "values"), self.plan)
        end = time.perf_counter()
        self.budget.note(out.step, ready, loss)
        return {
            "training/global_step": float(step),
            "training/epoch": float(self.sampler.epoch),
            "train/loss": loss,
            **reward_metrics(found),
            **self.objective.describe(batch, rows),
            "train/grad_norm": out.step.grad_norm,
            "train/lr": out.step.lr,
            "train/skipped_steps": float(out.step.skipped),
            **out.maxes,
            "timing_s/ref": scored_at - start,
            "timing_s/score": update_at - scored_at,
            "timing_s/update": end - update_at,
            "timing_s/step": end - start,
            "perf/time_per_step": end - start,
            "perf/total_num_tokens": float(batch.num_items),
            "perf/throughput": batch.num_items / (end - start) / self.context.pools.num_ranks,
            **self.engine.seqlen_metrics(batch),
            **self.engine.memory(),
        }

    def validate(self) -> dict[str, float]:
        """Means over all held-out pairs."""
        start = time.perf_counter()
        total: dict[str, float] = {}
        size = self.context.config.data.val_batch_size
        with self.context.reporter.phase("validation", len(self.val_rows)) as bar:
            for at in range(0, len(self.val_rows), size):
                chunk = self.val_rows[at : at + size]
                batch = self.pack(chunk)
                scored = self.engine.infer_batch(batch, self.plan, (self.objective.read,))[self.objective.read]
                rows = row_sums(batch, scored)
                found = self.objective.losses(batch)(rows)
                here = {
                    "loss": found.loss.mean().item(),
                    **reward_metrics(found),
                    **self.objective.describe(batch, rows),
                }
                for name, value in here.items():
                    total[name] = total.get(name, 0.0) + value * len(chunk)
                bar.advance(len(chunk))
        means = {f"val/{name}": value / len(self.val_rows) for name, value in total.items()}
        return {**means, "timing_s/testing": time.perf_counter() - start}

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict(), "skipped_in_a_row": self.budget.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self.budget.in_a_row = int(state.get("skipped_in_a_row", 0))


def reward_metrics(found: PairLosses) -> dict[str, float]:
    """``rewards/*``: means over the pairs; a pair whose rewards are equal counts as half right."""
    margins = found.chosen_rewards - found.rejected_rewards
    right = (margins > 0).double() + 0.5 * (margins == 0).double()
    return {
        "rewards/chosen": found.chosen_rewards.mean().item(),
        "rewards/rejected": found.rejected_rewards.mean().item(),
        "rewards/margins": margins.mean().item(),
        "rewards/accuracies": right.mean().item(),
    }


def _lengths(batch: PackedBatch) -> torch.Tensor:
    """``[2 P]`` trained tokens of each row, float64."""
    return row_sums(batch, torch.ones(batch.num_items))
