"""The frozen reference policy: scores, never learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlctl.batch import PackedBatch
from rlctl.errors import EngineError
from rlctl.microbatch import MicroBatchPlan
from rlctl.runtime.remote import RemoteEngine
from rlctl.scoring import SCORE_IDS

WHOLE_GIB = 2.0
"""Most that the whole distributions of a batch may take, in GiB: they travel with it from the controller to the ranks."""


@dataclass
class ReferenceRole:
    """A training engine built with ``forward_only``, or the actor's own without its adapters.

    Args:
        base: ``engine`` is the actor's.
    """

    engine: RemoteEngine
    plan: MicroBatchPlan
    base: bool = False

    def score(self, batch: PackedBatch, *, whole: bool = False) -> dict[str, torch.Tensor]:
        """What the reference says of the batch's tokens, as item fields.

        Args:
            whole: of every token of the vocabulary too.

        Returns:
            ``ref_log_probs`` ``[N]`` and, of V tokens in the order of their ids, ``ref_log_probs_all`` ``[N, V]``.

        Raises:
            EngineError: the whole distributions would take more than :data:`WHOLE_GIB`.
        """
        if not whole:
            return {"ref_log_probs": self._infer(batch, ("log_probs",))["log_probs"]}
        vocab, num = self.engine.info.vocab_size, batch.num_items
        size = 4 * vocab * num / 2**30
        if size > WHOLE_GIB:
            raise EngineError(
                "the KL over the whole vocabulary does not fit: each token of a batch would carry the reference's distribution",
                found=f"{num} tokens x {vocab} probabilities: {size:.1f} GiB",
                wanted=f"at most {WHOLE_GIB:g} GiB",
                next="set actor.kl_loss_type=k3+, an estimate from the sampled tokens with the gradient of the KL",
            )
        asked = batch.with_items(**{SCORE_IDS: torch.arange(vocab).expand(num, vocab)})
        found = self._infer(asked, ("log_probs", "log_probs_at"))
        return {"ref_log_probs": found["log_probs"], "ref_log_probs_all": found["log_probs_at"]}

    def _infer(self, batch: PackedBatch, want: tuple[str, ...]) -> dict[str, torch.Tensor]:
        infer = self.engine.infer_base if self.base else self.engine.infer_batch
        return infer(batch, self.plan, want)
