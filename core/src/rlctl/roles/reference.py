"""The frozen reference policy: scores, never learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlctl.batch import PackedBatch
from rlctl.microbatch import MicroBatchPlan
from rlctl.runtime.remote import RemoteEngine


@dataclass
class ReferenceRole:
    """A training engine built with ``forward_only``."""

    engine: RemoteEngine
    plan: MicroBatchPlan

    def score(self, batch: PackedBatch) -> torch.Tensor:
        """Log-probs ``[N]`` of the batch's tokens under the reference."""
        return self.engine.infer_batch(batch, self.plan, ("log_probs",))["log_probs"]
