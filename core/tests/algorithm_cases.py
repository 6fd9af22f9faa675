"""Between the references' ragged lists and the packed tensors of rlctl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from oracle.cases import Case

from rlctl.algorithms.calling import call_advantages
from rlctl.algorithms.lookup import builtin
from rlctl.batch import GROUP, PackedBatch, pack
from rlctl.config.schema_algorithm import AlgorithmConfig
from rlctl.records import AlgorithmKind
from rlctl.trainers.advantages import last_token_rewards


def flat(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """One number a token, rows end to end."""
    return torch.tensor([number for row in rows for number in row], dtype=dtype)


def packed(case: Case, dtype: torch.dtype = torch.float64) -> PackedBatch:
    """A case as a batch; its rows have no prompts."""
    fields = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "token_rewards")
    return pack(
        {"loss_mask": case.masks, **{name: getattr(case, name) for name in fields}},
        rows={GROUP: case.groups},
        dtypes={"loss_mask": torch.bool, **dict.fromkeys(fields, dtype)},
    )


def offered(case: Case) -> dict[str, Any]:
    """Everything that an estimator may name."""
    batch = packed(case)
    mask = batch.items["loss_mask"]
    scores = torch.tensor(case.rewards, dtype=torch.float64)
    return {
        "scores": scores,
        "groups": torch.tensor(case.groups).unique(return_inverse=True)[1],
        "mask": mask,
        "row_ids": batch.row_ids(),
        "positions": batch.position_ids(),
        "token_rewards": last_token_rewards(scores, mask, batch.cu_seqlens),
        "components": torch.tensor(case.components, dtype=torch.float64),
        "component_weights": torch.tensor(case.component_weights, dtype=torch.float64),
        "greedy_scores": torch.tensor(case.greedy_rewards, dtype=torch.float64),
        "old_log_probs": flat(case.old_log_probs),
        "sum_p2": flat(case.sum_pi_squared),
    }


def advantages(name: str, inputs: dict[str, Any], **settings: Any) -> dict[str, torch.Tensor]:
    """``advantages`` and ``returns`` ``[N]``, through the door that the trainer uses."""
    section = AlgorithmConfig(adv_estimator=name, **settings)
    return call_advantages(builtin(AlgorithmKind.ADVANTAGE, name), section, inputs, inputs["row_ids"], inputs["mask"])


def unguarded_loss(log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """A user's loss without any thought of what stands under the mask."""
    return -advantages * (log_probs - old_log_probs).square() * log_probs
