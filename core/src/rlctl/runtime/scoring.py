"""A rollout engine that is asked for scores of whole batches, as a training engine is: a teacher that never trains."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from rlctl.batch import PackedBatch
from rlctl.errors import EngineError
from rlctl.first_items import check_first_items
from rlctl.generation import ScoreRequest, TokenScores
from rlctl.microbatch import MicroBatchPlan
from rlctl.runtime.remote import RemoteEngine
from rlctl.scoring import TOPK

ANSWERS = ("log_probs", "topk_ids", "topk_log_probs")
"""What ``rlctl_score`` can answer of what :meth:`rlctl.engine.Engine.infer_batch` may be asked."""


class ScoringEngine(RemoteEngine):
    """:meth:`infer_batch` by ``rlctl_score``, at the batch's own temperature."""

    def infer_batch(
        self, batch: PackedBatch, plan: MicroBatchPlan, want: Sequence[str] = ("log_probs",)
    ) -> dict[str, torch.Tensor]:
        """As :meth:`RemoteEngine.infer_batch`, of :data:`ANSWERS`; the engine bounds its batches itself, not by ``plan``.

        Raises:
            BatchError: a row scores its first token.
            EngineError: something else is asked for, or the answer has another shape than the batch.
        """
        if other := sorted(set(want) - set(ANSWERS)):
            raise EngineError(
                f"the rollout engine {self.name!r} of {self.role} does not answer {other[0]}",
                found=", ".join(want),
                wanted=", ".join(ANSWERS),
                next="take a training backend for this role",
            )
        check_first_items(batch)
        topk = int(batch.meta[TOPK]) if set(want) & set(ANSWERS[1:]) else 0
        starts = batch.cu_seqlens.tolist()
        ids = batch.items["input_ids"].tolist()
        sequences = [ids[start:end] for start, end in pairwise(starts)]
        found = self.score(ScoreRequest(sequences, topk, float(batch.meta.get("temperature", 1.0))))
        for row, (sequence, scores) in enumerate(zip(sequences, found, strict=True)):
            self._check_row(row, len(sequence), topk, scores)
        scored = batch.items["loss_mask"].bool()
        out = {"log_probs": torch.tensor([x for scores in found for x in scores.log_probs], dtype=torch.float32)}
        if topk:
            none = [0] * topk
            out["topk_ids"] = torch.tensor([at or none for scores in found for at in scores.topk_ids])
            out["topk_log_probs"] = torch.tensor(
                [at or none for scores in found for at in scores.topk_log_probs], dtype=torch.float32
            )
        for values in out.values():
            values[~scored] = 0
        return {name: out[name] for name in want}

    def _check_row(self, row: int, length: int, topk: int, scores: TokenScores) -> None:
        """One number a token, and ``topk`` alternatives at every token but the first, which nothing predicts."""
        shapes = [len(scores.log_probs)]
        if topk:
            shapes += [len(scores.topk_ids), len(scores.topk_log_probs)]
            widths = {len(at) for at in (*scores.topk_ids[1:], *scores.topk_log_probs[1:])}
        else:
            widths = {0}
        if set(shapes) != {length} or not widths <= {topk}:
            raise EngineError(
                f"the rollout engine {self.name!r} of {self.role} scored another number of tokens than it was given",
                found=f"row {row}: {' and '.join(map(str, shapes))} tokens, {' and '.join(map(str, sorted(widths)))} alternatives",
                wanted=f"{length} tokens, {topk} alternatives at each after the first",
            )
