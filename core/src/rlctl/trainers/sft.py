"""Supervised fine-tuning: cross-entropy on response tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlctl.algorithms.losses import CrossEntropyLoss
from rlctl.batch import PackedBatch, pack
from rlctl.data.prompts import PromptEncoder
from rlctl.data.rows import Row
from rlctl.data.sampler import BatchSampler
from rlctl.errors import DataError
from rlctl.microbatch import MicroBatchPlan
from rlctl.roles.budget import SkipBudget
from rlctl.runtime.remote import RemoteEngine
from rlctl.trainers.setup import Context
from rlctl.trainers.trainer import Assessment


@dataclass
class SFTTrainer:
    """One SFT run on a built training engine.

    Rows are encoded once. A row longer than ``max_length`` tokens was refused by the data check or is filtered here.
    """

    context: Context
    engine: RemoteEngine
    plan: MicroBatchPlan
    encoder: PromptEncoder
    sampler: BatchSampler
    train_rows: Sequence[Row]
    val_rows: Sequence[Row]
    max_length: int
    budget: SkipBudget

    def pack(self, rows: Sequence[Row]) -> PackedBatch:
        """``input_ids`` and ``loss_mask`` (True on response tokens) of the rows that fit ``max_length``.

        Raises:
            DataError: a row is too long and ``data.overlong_prompts`` is ``error``, or no row is left.
        """
        ids, mask = [], []
        for row in rows:
            row_ids, row_mask = self.encoder.sft(row)
            if len(row_ids) > self.max_length:
                if self.context.config.data.overlong_prompts == "filter":
                    continue
                raise DataError(
                    f"row {row.index} of {row.source} is too long",
                    found=f"{len(row_ids)} tokens",
                    wanted=f"at most {self.max_length} (data.max_prompt_length + data.max_response_length)",
                    next="raise the limits, or set data.overlong_prompts=filter",
                )
            ids.append(row_ids)
            mask.append(row_mask)
        if not ids:
            raise DataError("no row of the batch fits the length limit", wanted=f"at most {self.max_length} tokens")
        return pack({"input_ids": ids, "loss_mask": mask}, dtypes={"input_ids": torch.long, "loss_mask": torch.bool})

    def begin(self) -> dict[str, Any]:
        """See :class:`rlctl.trainers.trainer.Trainer`."""
        return {}

    def advance(self, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """See :class:`rlctl.trainers.trainer.Trainer`."""
        return self.step(step), []

    def assess(self, step: int) -> Assessment:
        """See :class:`rlctl.trainers.trainer.Trainer`."""
        metrics = self.validate()
        return Assessment(metrics, -metrics["val/loss"])

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step; ``step`` counts from 1.

        Raises:
            NonFiniteStepsError: too many non-finite steps in a row.
        """
        start = time.perf_counter()
        batch = self.pack([self.train_rows[i] for i in self.sampler.next()])
        config = self.context.config
        out = self.engine.train_batch(
            batch, CrossEntropyLoss(), self.plan, config.actor.loss_agg_mode, config.data.max_response_length
        )
        elapsed = time.perf_counter() - start
        self.budget.note(out.step, batch, out.loss)
        return {
            "training/global_step": float(step),
            "training/epoch": float(self.sampler.epoch),
            "train/loss": out.loss,
            "train/grad_norm": out.step.grad_norm,
            "train/lr": out.step.lr,
            "train/skipped_steps": float(out.step.skipped),
            "timing_s/step": elapsed,
            "perf/time_per_step": elapsed,
            "perf/total_num_tokens": float(batch.num_items),
            "perf/throughput": batch.num_items / elapsed / self.context.pools.num_ranks,
            **self.engine.seqlen_metrics(batch),
            **self.engine.memory(),
        }

    def validate(self) -> dict[str, float]:
        """Held-out loss: the mean over response tokens of all validation rows, in nats."""
        start = time.perf_counter()
        total, tokens = 0.0, 0
        size = self.context.config.data.val_batch_size
        with self.context.reporter.phase("validation", len(self.val_rows)) as bar:
            for at in range(0, len(self.val_rows), size):
                rows = self.val_rows[at : at + size]
                batch = self.pack(rows)
                count = int(batch.items["loss_mask"].sum())
                loss, _ = self.engine.eval_loss(batch, CrossEntropyLoss(), self.plan)
                total, tokens = total + loss * count, tokens + count
                bar.advance(len(rows))
        return {"val/loss": total / max(tokens, 1), "timing_s/testing": time.perf_counter() - start}

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict(), "skipped_in_a_row": self.budget.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self.budget.in_a_row = int(state.get("skipped_in_a_row", 0))
