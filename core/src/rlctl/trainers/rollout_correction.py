"""Rollout correction in the controller: once a batch, before it is cut into mini-batches, so that no split changes a weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlctl.algorithms.losses import IS_WEIGHTS
from rlctl.algorithms.rollout_correction import (
    LogRatios,
    catastrophic_tokens,
    divergences,
    effective_sample_size,
    importance_weights,
    kept_tokens,
    log_ratios,
    rows_of,
)
from rlctl.batch import PackedBatch
from rlctl.config.schema import RunConfig
from rlctl.config.schema_correction import RolloutCorrectionConfig
from rlctl.trainers.agreement import rollout_gap

PREFIX = "rollout_corr/"


@dataclass(frozen=True)
class CorrectionStage:
    """Weights and rejections of one batch, by ``algorithm.rollout_correction``.

    Args:
        check_rollout: report ``training/rollout_probs_diff_*``, of every trained token before rejection: the update, which would
            else measure it, does not see the tokens that are furthest off.
    """

    config: RolloutCorrectionConfig
    check_rollout: bool

    def __call__(self, batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
        """``batch`` with the weights of its tokens and without the rejected ones in its ``loss_mask``, and what was found.

        Args:
            batch: with ``old_log_probs``, ``rollout_log_probs`` and ``loss_mask`` ``[N]``.
        """
        cfg, rows = self.config, batch.row_ids()
        old, mask = batch.items["old_log_probs"], batch.items["loss_mask"].bool()
        ratios = log_ratios(old, batch.items["rollout_log_probs"], mask, rows, batch.num_rows)
        found = divergences(ratios)
        kept, said = self._reject(ratios, batch.num_rows)
        found |= said
        fields = {"loss_mask": kept.to(batch.items["loss_mask"].dtype)}
        if cfg.rollout_is is not None:
            weights = importance_weights(
                ratios, cfg.rollout_is, cfg.rollout_is_threshold, cfg.rollout_is_threshold_lower
            )
            fields[IS_WEIGHTS] = torch.where(kept, weights, 0.0)
            found |= self._weight_metrics(ratios, weights, kept)
        metrics = {PREFIX + name: value for name, value in found.items()}
        if self.check_rollout:
            metrics |= rollout_gap(batch, old)
        return batch.with_items(**fields), metrics

    def _reject(self, ratios: LogRatios, num_rows: int) -> tuple[torch.Tensor, dict[str, float]]:
        """``[N]`` bool: the tokens that stay; and the shares of those that do not."""
        cfg, mask, rows = self.config, ratios.mask, ratios.row_ids
        kept, found = mask, dict[str, float]()
        tokens, trained_rows = max(int(mask.sum()), 1), max(int((ratios.counts > 0).sum()), 1)
        if cfg.rollout_rs is not None:
            assert cfg.rollout_rs_threshold is not None, "the configuration sees to it"
            kept = kept_tokens(ratios, cfg.rollout_rs, cfg.rollout_rs_threshold, cfg.rollout_rs_threshold_lower)
        if cfg.rollout_token_veto_threshold is not None:
            broken = catastrophic_tokens(ratios, cfg.rollout_token_veto_threshold)
            vetoed = rows_of(broken, rows, num_rows)
            kept = kept & ~vetoed[rows]
            found["rollout_is_catastrophic_token_fraction"] = int(broken.sum()) / tokens
            found["rollout_is_veto_fraction"] = int(vetoed.sum()) / trained_rows
        if cfg.rejects:
            lost = mask & ~kept
            found["rollout_rs_masked_fraction"] = int(lost.sum()) / tokens
            found["rollout_rs_seq_masked_fraction"] = int(rows_of(lost, rows, num_rows).sum()) / trained_rows
        return kept, found

    def _weight_metrics(self, ratios: LogRatios, weights: torch.Tensor, kept: torch.Tensor) -> dict[str, float]:
        """Of the weights that tokens are trained with, and the share of tokens that a bound changed before any was rejected."""
        cfg, used = self.config, weights[kept].double()
        assert cfg.rollout_is is not None, "asked only where there are weights"
        rho = ratios.at(cfg.rollout_is).exp()[ratios.mask]
        found: dict[str, float] = {}
        if len(rho):
            found["rollout_is_ratio_fraction_high"] = (rho > cfg.rollout_is_threshold).double().mean().item()
            if cfg.rollout_is_threshold_lower is not None:
                found["rollout_is_ratio_fraction_low"] = (rho < cfg.rollout_is_threshold_lower).double().mean().item()
        if len(used):
            found |= {
                "rollout_is_mean": used.mean().item(),
                "rollout_is_std": used.std(correction=0).item(),
                "rollout_is_min": used.min().item(),
                "rollout_is_max": used.max().item(),
                "rollout_is_eff_sample_size": effective_sample_size(used),
            }
        return found


def correction_stage(config: RunConfig, *, check_rollout: bool) -> CorrectionStage | None:
    """The stage that the configuration asks for; None without the section, and in bypass mode, which has nothing to compare."""
    section = config.algorithm.rollout_correction
    return None if section is None or section.bypass_mode else CorrectionStage(section, check_rollout)
