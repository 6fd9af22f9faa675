"""Loss functions in the form that engines call: ``loss_fn(reader, micro_batch) -> LossOutput``.

They bind an algorithm's pure functions to a batch's fields. N tokens of the micro-batch; every field is ``[N]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlctl.algorithms.calling import call_policy_loss
from rlctl.algorithms.kl import FULL, full_kl, kl_estimate
from rlctl.algorithms.lookup import Algorithm, builtin
from rlctl.batch import PackedBatch
from rlctl.config.schema import ActorConfig
from rlctl.logits import LogitsReader, LossOutput
from rlctl.records import AlgorithmKind

IS_WEIGHTS = "rollout_is_weights"
"""Item field ``[N]``: the weight of each token's policy loss, see :mod:`rlctl.algorithms.rollout_correction`."""


@dataclass(frozen=True)
class PolicyLoss:
    """Policy gradient with optional KL to a reference and entropy bonus.

    Fields read: ``item_weight``, ``loss_mask``, ``advantages``, and where present ``old_log_probs`` (absent: the batch is
    exactly on policy, so the old log-probs are the current ones), ``ref_log_probs`` (with ``kl_loss_type`` full also
    ``ref_log_probs_all`` ``[N, V]``), ``rollout_log_probs``, :data:`IS_WEIGHTS`,
    and what the policy loss names beside them.

    Args:
        algorithm: the policy loss; None: rlctl's own of the name in ``config``.
    """

    config: ActorConfig
    check_rollout: bool = False
    algorithm: Algorithm | None = None

    def __call__(self, reader: LogitsReader, batch: PackedBatch) -> LossOutput:
        log_probs, entropy = reader.log_prob_and_entropy()
        field = {k: v.to(log_probs.device) for k, v in batch.items.items()}
        return self.of(reader, log_probs, entropy, field, field["advantages"], batch)

    def of(
        self,
        reader: LogitsReader,
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
        field: Mapping[str, torch.Tensor],
        advantages: torch.Tensor,
        batch: PackedBatch,
    ) -> LossOutput:
        """The loss from what was read already: log-probs, entropy and advantages ``[N]``, and the batch's item fields."""
        cfg = self.config
        weight, mask = field["item_weight"], field["loss_mask"].bool()
        # What stands at other positions is nobody's: an infinity there would make the gradient NaN, which no mask mends later.
        old = torch.where(mask, field["old_log_probs"], 0.0) if "old_log_probs" in field else log_probs.detach()
        advantages = torch.where(mask, advantages, 0.0)
        algorithm = self.algorithm or builtin(AlgorithmKind.POLICY_LOSS, cfg.policy_loss.loss_mode)
        offered = {
            **field,
            "log_probs": log_probs,
            "old_log_probs": old,
            "advantages": advantages,
            "mask": mask,
            "num_rows": batch.num_rows,
            "entropy": entropy,
        }
        if algorithm.takes("row_ids"):
            offered["row_ids"] = batch.row_ids().to(log_probs.device, non_blocking=True)
        policy = call_policy_loss(algorithm, cfg.policy_loss, offered, len(log_probs))

        def total(value: torch.Tensor) -> torch.Tensor:
            # where, not a product: an infinity at a masked position must not become NaN.
            return torch.where(mask, value * weight, 0.0).sum()

        def share(active: torch.Tensor | None) -> torch.Tensor:
            return weight.new_zeros(()) if active is None else total(active.float())

        # The policy's part alone, as the papers have it: KL and entropy bonus keep their coefficients.
        pg_loss = total(policy.loss * field[IS_WEIGHTS] if IS_WEIGHTS in field else policy.loss)
        loss = pg_loss
        sums: dict[str, torch.Tensor | float] = {
            "actor/pg_loss": pg_loss.detach(),
            "actor/ppo_kl": total(old - log_probs.detach()),
            "actor/pg_clipfrac": share(policy.clipped),
            "actor/pg_clipfrac_lower": share(policy.dual_clipped),
            "actor/entropy": total(entropy.detach()),
            "_weight": total(torch.ones_like(weight)),
        }
        maxes: dict[str, torch.Tensor | float] = {}
        if cfg.entropy_coeff:
            loss = loss - cfg.entropy_coeff * total(entropy)
        if cfg.use_kl_loss and "ref_log_probs" in field:
            if cfg.kl_loss_type == FULL:
                theirs = field["ref_log_probs_all"]
                every = torch.arange(theirs.shape[1], device=theirs.device).expand_as(theirs)
                kl = total(full_kl(reader.log_prob_at(every), theirs))
            else:
                kl = total(kl_estimate(log_probs, field["ref_log_probs"], cfg.kl_loss_type))
            sums["actor/kl_loss"] = kl.detach()
            loss = loss + cfg.kl_loss_coef * kl
        # Padding too reports these names: the ranks reduce them together.
        if self.check_rollout and "rollout_log_probs" in field:
            gap = (log_probs.detach().exp() - field["rollout_log_probs"].exp()).abs()
            gap = torch.where(mask, gap, 0.0)
            sums["_rollout_gap"] = gap.sum()
            sums["_rollout_tokens"] = mask.sum()
            maxes["training/rollout_probs_diff_max"] = gap.max()
        return LossOutput(loss, sums, maxes)


@dataclass(frozen=True)
class CrossEntropyLoss:
    """Next-token cross-entropy over ``loss_mask``, weighted by ``item_weight`` (SFT)."""

    def __call__(self, reader: LogitsReader, batch: PackedBatch) -> LossOutput:
        log_probs = reader.log_prob()
        weight = batch.items["item_weight"].to(log_probs.device)
        mask = batch.items["loss_mask"].bool().to(log_probs.device)
        loss = torch.where(mask, -log_probs * weight, 0.0).sum()
        return LossOutput(loss, {"_loss": loss.detach()})
