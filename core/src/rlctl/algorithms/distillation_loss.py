"""The loss of on-policy distillation in the form that engines call; it names no backend.

N tokens of the micro-batch, K alternatives. Item fields, beside those of :class:`rlctl.algorithms.losses.PolicyLoss`:

``teacher_log_probs`` ``[N]``: the teacher's log-prob of the sampled token;
``teacher_topk_ids`` ``[N, K]``: the tokens that a ``*_topk`` loss is about (the teacher's most probable ones, for
``reverse_kl_topk`` the student's when the batch was scored);
``teacher_topk_log_probs`` ``[N, K]``: the teacher's log-probs of those tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlctl.algorithms.distillation import k1_reward, overlap_ratio, sampled_divergence, topk_divergence
from rlctl.algorithms.lookup import Algorithm
from rlctl.algorithms.losses import PolicyLoss
from rlctl.batch import PackedBatch
from rlctl.config.schema import ActorConfig
from rlctl.config.schema_distillation import DistillationConfig
from rlctl.errors import BatchError
from rlctl.logits import LogitsReader, LossOutput

TEACHER_TEMPERATURE = "teacher_temperature"
"""Key of a batch's ``meta``: the temperature that the teacher's log-probs are of."""

DIAGNOSTICS = (
    "distillation/kl",
    "distillation/student_mass",
    "distillation/teacher_mass",
    "distillation/overlap_ratio",
)
"""Metrics that are means over the trained tokens, whatever the aggregation mode makes the weights add up to."""


@dataclass(frozen=True)
class DistillationLoss:
    """``loss_coef`` times the distillation loss, plus the policy loss where advantages are trained on.

    With ``k1`` the advantage of a token is ``loss_coef (log q - log p)``, p the policy before this update, plus the task's
    where ``use_task_rewards``. The entropy bonus and the KL to a reference act as in :class:`PolicyLoss`, in every mode.

    Fields read: see the module; ``advantages`` only where ``use_task_rewards``.
    """

    actor: ActorConfig
    config: DistillationConfig
    check_rollout: bool = False
    algorithm: Algorithm | None = None

    def __call__(self, reader: LogitsReader, batch: PackedBatch) -> LossOutput:
        """See :data:`rlctl.logits.LossFn`.

        Raises:
            BatchError: the teacher scored at another temperature than the student is trained at.
        """
        _require_temperature(batch)
        cfg = self.config
        log_probs, entropy = reader.log_prob_and_entropy()
        field = {k: v.to(log_probs.device) for k, v in batch.items.items()}
        weight, mask = field["item_weight"], field["loss_mask"].bool()
        # What stands at other positions is nobody's: an infinity there would make the gradient NaN, which no mask mends later.
        teacher = torch.where(mask, field["teacher_log_probs"], 0.0)

        def total(value: torch.Tensor) -> torch.Tensor:
            return torch.where(mask, value * weight, 0.0).sum()

        advantages = field["advantages"] if cfg.use_task_rewards else torch.zeros_like(log_probs)
        sums: dict[str, torch.Tensor | float] = {"distillation/kl": total(log_probs.detach() - teacher)}
        if cfg.loss_mode == "k1":
            old = torch.where(mask, field.get("old_log_probs", log_probs.detach()), 0.0)
            reward = k1_reward(old, teacher, clip=cfg.loss_max)
            advantages = advantages + cfg.loss_coef * reward
            per_token = -reward
        elif cfg.is_topk:
            per_token, more = self._topk(reader, field, mask)
            sums |= {name: total(value) for name, value in more.items()}
        else:
            per_token = sampled_divergence(log_probs, teacher, cfg.loss_mode, loss_max=cfg.loss_max)
        policy = PolicyLoss(self.actor, self.check_rollout, self.algorithm).of(
            reader, log_probs, entropy, field, advantages, batch
        )
        distilled = total(per_token)
        sums["distillation/loss"] = distilled.detach()
        loss = policy.loss if cfg.loss_mode == "k1" else policy.loss + cfg.loss_coef * distilled
        return LossOutput(loss, {**policy.sums, **sums}, policy.maxes)

    def _topk(
        self, reader: LogitsReader, field: Mapping[str, torch.Tensor], mask: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The divergence ``[N]`` and its diagnostics."""
        cfg = self.config
        ids = field["teacher_topk_ids"]
        here = mask[:, None]
        found = topk_divergence(
            # A reader's numbers are zero where nothing is scored: K certain tokens, whose loss is cut off below.
            reader.log_prob_at(ids),
            torch.where(here, field["teacher_topk_log_probs"], 0.0),
            cfg.loss_mode,
            beta=cfg.jsd_beta,
            log_prob_min=cfg.log_prob_min,
            loss_max=cfg.loss_max,
        )
        more = {"distillation/student_mass": found.student_mass, "distillation/teacher_mass": found.teacher_mass}
        if cfg.loss_mode != "reverse_kl_topk":
            more["distillation/overlap_ratio"] = overlap_ratio(reader.topk(ids.shape[1])[1], ids)
        return found.loss, more


def _require_temperature(batch: PackedBatch) -> None:
    wanted = float(batch.meta.get("temperature", 1.0))
    found = batch.meta.get(TEACHER_TEMPERATURE)
    if found is None or float(found) != wanted:
        raise BatchError(
            "the teacher's log-probs are of another temperature than the student's",
            found="no teacher has scored this batch" if found is None else f"teacher {found}, student {wanted}",
            wanted="one temperature",
            next="score the batch with the teacher at its own meta['temperature']",
        )
