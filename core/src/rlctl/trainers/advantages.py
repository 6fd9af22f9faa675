"""From scores to advantages in the controller: what an estimator asks for is made, and what it says is put at the tokens.

R rows, N tokens of the batch (prompts included), C components of the reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlctl.algorithms.calling import call_advantages
from rlctl.algorithms.lookup import Algorithm
from rlctl.batch import GROUP, PackedBatch
from rlctl.config.schema_algorithm import AlgorithmConfig
from rlctl.data.rewards import RewardResult
from rlctl.generation import Completion


@dataclass(frozen=True)
class AdvantageStage:
    """One estimator and its settings.

    Args:
        algorithm: the estimator.
        config: the ``algorithm`` section.
        components: (name, weight) of each component of the reward.
    """

    algorithm: Algorithm
    config: AlgorithmConfig
    components: Sequence[tuple[str, float]]

    def takes(self, name: str) -> bool:
        """True when the estimator names this input, see :mod:`rlctl.algorithms.advantages`."""
        return self.algorithm.takes(name)

    def __call__(
        self, batch: PackedBatch, rewards: Sequence[RewardResult], extra: Mapping[str, torch.Tensor] | None = None
    ) -> PackedBatch:
        """``batch`` with item field ``advantages`` ``[N]`` float32, and ``returns`` where the estimator has them.

        Args:
            batch: rows with their groups; of its item fields the estimator may name any.
            rewards: of each row.
            extra: further inputs by name, such as ``greedy_scores`` ``[R]``; they replace those made here.

        Raises:
            AlgorithmError: an estimator that is not rlctl's own fails or returns something else.
        """
        mask, row_ids = batch.items["loss_mask"].bool(), batch.row_ids()
        scores = torch.tensor([r.score for r in rewards], dtype=torch.float64)
        offered: dict[str, Any] = {
            **{name: value.double() if value.is_floating_point() else value for name, value in batch.items.items()},
            "scores": scores,
            # From 0 up, so that the numbers of groups can be used as places.
            "groups": batch.rows[GROUP].unique(return_inverse=True)[1],
            "mask": mask,
            "row_ids": row_ids,
            "positions": batch.position_ids(),
            "token_rewards": last_token_rewards(scores, mask, batch.cu_seqlens),
            "components": component_values(rewards, [name for name, _ in self.components]),
            "component_weights": torch.tensor([weight for _, weight in self.components], dtype=torch.float64),
            **{name: value.double() for name, value in (extra or {}).items()},
        }
        return batch.with_items(**call_advantages(self.algorithm, self.config, offered, row_ids, mask))


def component_values(rewards: Sequence[RewardResult], names: Sequence[str]) -> torch.Tensor:
    """``[C, R]`` unweighted value of each component of each row."""
    return torch.tensor([[r.components.get(name, 0.0) for r in rewards] for name in names], dtype=torch.float64)


def last_token_rewards(scores: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """``[N]`` the score of each row at its last trained token, zero elsewhere. A row without one has no place for it."""
    out = torch.zeros(len(mask), dtype=scores.dtype)
    trained = mask.nonzero()[:, 0]
    rows = torch.searchsorted(cu_seqlens, trained, right=True) - 1
    last = torch.full((len(scores),), -1)
    # Ascending places: of several writes to one row the largest must stay, which amax says without an order of writes.
    last.scatter_reduce_(0, rows, trained, "amax")
    there = last >= 0
    out[last[there]] = scores[there]
    return out


def by_group(batch: PackedBatch, completions: Sequence[Completion], scores: Sequence[float]) -> torch.Tensor:
    """``[R]`` float64 the score of the one completion of each row's prompt."""
    of_prompt = {c.prompt_index: score for c, score in zip(completions, scores, strict=True)}
    return torch.tensor([of_prompt[group] for group in batch.rows[GROUP].tolist()], dtype=torch.float64)


def rows_with_advantage(batch: PackedBatch) -> set[int]:
    """Rows with a trained token whose advantage is not exactly zero."""
    at = (batch.items["advantages"] != 0) & batch.items["loss_mask"].bool()
    return set(batch.row_ids()[at].tolist())


def advantage_metrics(batch: PackedBatch) -> dict[str, float]:
    """``critic/advantages/*`` over the trained tokens; nothing where no token is trained."""
    values = batch.items["advantages"][batch.items["loss_mask"].bool()]
    if not len(values):
        return {}
    return {"critic/advantages/max": values.max().item(), "critic/advantages/min": values.min().item()}
