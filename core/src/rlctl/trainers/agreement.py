"""How far the rollout's probabilities of the sampled tokens are from the trainer's."""

from __future__ import annotations

import torch

from rlctl.batch import PackedBatch


def rollout_gap(batch: PackedBatch, log_probs: torch.Tensor) -> dict[str, float]:
    """``training/rollout_probs_diff_mean`` and ``_max`` of ``|p_rollout - p_trainer|`` over the trained tokens; empty where no
    token is trained.

    Args:
        batch: with ``rollout_log_probs`` and ``loss_mask`` ``[N]``.
        log_probs: ``[N]`` the trainer's.
    """
    mask = batch.items["loss_mask"].bool()
    gap = (batch.items["rollout_log_probs"].exp() - log_probs.exp()).abs()[mask]
    if not len(gap):
        return {}
    return {
        "training/rollout_probs_diff_mean": gap.mean().item(),
        "training/rollout_probs_diff_max": gap.max().item(),
    }
