"""The teacher: gives its opinion of the student's samples, never learns. One or several, each row routed to one of them.

N tokens of a batch, K alternatives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlctl.algorithms.distillation_loss import TEACHER_TEMPERATURE
from rlctl.batch import PackedBatch
from rlctl.config.schema_distillation import DistillationConfig
from rlctl.data.rows import Row
from rlctl.errors import BatchError, DataError, EngineError
from rlctl.microbatch import MicroBatchPlan
from rlctl.runtime.remote import RemoteEngine
from rlctl.scoring import SCORE_IDS, TOPK

ONE = ""
"""Name of a teacher that has no others beside it."""

_ROUNDING = 1e-2
"""How far over zero the log of a probability may come out (bfloat16 logits have 8 bits)."""


def teacher_of(row: Row, route_by: str, names: Sequence[str]) -> str:
    """The name of the teacher of a row.

    Raises:
        DataError: the row has no such key, or no teacher has its value.
    """
    if list(names) == [ONE]:
        return ONE
    value = row.data_source if route_by == "data_source" else row.extra.get(route_by)
    if value is None or str(value) not in names:
        raise DataError(
            f"row {row.index} of {row.source} has no teacher",
            found=f"no {route_by}" if value is None else f"{route_by} {value!r}",
            wanted=f"one of {', '.join(names)} (teacher.models)",
            next=f"add teacher.models.{value}, or set teacher.route_by to another key",
        )
    return str(value)


@dataclass
class TeacherRole:
    """Training engines built with ``forward_only``, or rollout engines that score; one a teacher.

    Args:
        engines: teacher's name to its engine.
        plan: bounds of one micro-batch.
        config: which log-probs are wanted.
        student_vocab: ids that the student's output layer has.
    """

    engines: Mapping[str, RemoteEngine]
    plan: MicroBatchPlan
    config: DistillationConfig
    student_vocab: int

    def __post_init__(self) -> None:
        for name, engine in self.engines.items():
            most = min(self.student_vocab, engine.info.vocab_size)
            if self.config.is_topk and self.config.topk > most:
                raise DataError(
                    f"distillation.topk is more than the vocabulary{_of(name)}",
                    found=self.config.topk,
                    wanted=f"at most {most}",
                    next=f"set distillation.topk={most} for all of it",
                )

    def annotate(
        self, batch: PackedBatch, names: Sequence[str], student: RemoteEngine, student_plan: MicroBatchPlan
    ) -> PackedBatch:
        """``batch`` with the fields of :class:`~rlctl.algorithms.distillation_loss.DistillationLoss`.

        Every teacher reads the batch's own ids at the batch's own temperature.

        Args:
            names: the teacher of each row.
            student: the student's engine; it is asked only for ``reverse_kl_topk``, whose tokens are its own.
            student_plan: bounds of its micro-batches.

        Raises:
            BatchError: the batch has ids that a teacher does not know.
            EngineError: a teacher's answer is no distribution over the student's tokens.
        """
        cfg = self.config
        asked = batch.with_meta(**{TOPK: cfg.topk}) if cfg.is_topk else batch
        if not cfg.is_topk:
            found = self._score(asked, names, ("log_probs",))
            fields = {"teacher_log_probs": found["log_probs"]}
        else:
            if cfg.loss_mode == "reverse_kl_topk":
                ids = student.infer_batch(asked, student_plan, ("topk_ids",))["topk_ids"]
                found = self._score(asked.with_items(**{SCORE_IDS: ids}), names, ("log_probs", "log_probs_at"))
                log_probs = found["log_probs_at"]
            else:
                found = self._score(asked, names, ("log_probs", "topk_ids", "topk_log_probs"))
                ids, log_probs = found["topk_ids"], found["topk_log_probs"]
            fields = {
                "teacher_log_probs": found["log_probs"],
                "teacher_topk_ids": ids,
                "teacher_topk_log_probs": log_probs,
            }
        self._check_answer(batch.items["loss_mask"].bool(), fields)
        return batch.with_items(**fields).with_meta(**{TEACHER_TEMPERATURE: batch.meta.get("temperature", 1.0)})

    def _score(self, batch: PackedBatch, names: Sequence[str], want: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """What each row's own teacher says, in the order of ``batch``."""
        assert len(names) == batch.num_rows, (len(names), batch.num_rows)
        rows_by_teacher = {name: [i for i, own in enumerate(names) if own == name] for name in self.engines}
        assert sum(map(len, rows_by_teacher.values())) == batch.num_rows, "every row has a known teacher"
        found: list[tuple[list[int], dict[str, torch.Tensor]]] = []
        for name, rows in rows_by_teacher.items():
            if rows:
                part = batch if len(rows) == batch.num_rows else batch.select(rows)
                self._check_ids(name, part)
                found.append((rows, self.engines[name].infer_batch(part, self.plan, want)))
        return {key: batch.merge([rows for rows, _ in found], [out[key] for _, out in found]) for key in want}

    def _check_ids(self, name: str, batch: PackedBatch) -> None:
        """Refuse ids that the teacher's embedding has not, before a rank looks them up."""
        size = self.engines[name].info.vocab_size
        for field in ("input_ids", SCORE_IDS):
            if field in batch.items and int(batch.items[field].max()) >= size:
                raise BatchError(
                    f"the teacher{_of(name)} does not know a token of the student",
                    found=f"id {int(batch.items[field].max())} in {'its text' if field == 'input_ids' else 'its top-k'}",
                    wanted=f"0 to {size - 1}",
                    next="take a teacher with the student's vocabulary"
                    + ("" if field == "input_ids" else ", or a lower distillation.topk"),
                )

    def _check_answer(self, mask: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> None:
        scored = {name: values[mask] for name, values in fields.items()}
        if not mask.any():
            return
        ids = scored.pop("teacher_topk_ids", None)
        if ids is not None and int(ids.max()) >= self.student_vocab:
            # A teacher's output layer may have rows that no token has, for a round number of them. Rarely one is that probable.
            raise EngineError(
                "a teacher's most probable tokens include one that the student does not have",
                found=f"id {int(ids.max())}",
                wanted=f"0 to {self.student_vocab - 1}, the student's output layer",
                next="set a lower distillation.topk: such rows of a padded vocabulary have next to no probability",
            )
        for name, values in scored.items():
            most = values.max() if values.ndim == 1 else values.exp().sum(-1).max().log()
            if not float(most) < _ROUNDING:
                raise EngineError(
                    "a teacher's answer is no distribution",
                    found=f"{name} with a probability of {float(most.exp()):.4g}",
                    wanted="log-probs of tokens that come to at most 1",
                    next="check that teacher.model loads and scores: rlctl verify with its backend",
                )


def _of(name: str) -> str:
    return f" of {name!r}" if name else ""
