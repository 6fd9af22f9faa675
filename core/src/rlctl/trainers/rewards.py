"""From the task's scores to the rewards that advantages are made of: shaping, and the KL to the reference.

R rows, N tokens of the batch (prompts included). What the stage remembers (moments of the rewards seen, the coefficient of the KL)
is in the checkpoint, so a resumed run goes on with the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from rlctl.algorithms.kl import kl_estimate
from rlctl.algorithms.rewards.kl_control import next_kl_coef
from rlctl.algorithms.rewards.kl_penalty import mean_kl, penalised_token_rewards, row_sums
from rlctl.algorithms.rewards.overlong import overlong_mask, overlong_penalty
from rlctl.algorithms.rewards.running import Moments, scaled
from rlctl.batch import PackedBatch
from rlctl.config.schema_algorithm import AlgorithmConfig
from rlctl.config.schema_reward import RewardConfig
from rlctl.data.finite import LARGEST
from rlctl.errors import GuardError
from rlctl.generation import FinishReason
from rlctl.trainers.advantages import last_token_rewards
from rlctl.trainers.environments import turn_token_rewards
from rlctl.trainers.evaluation import ScoredRollout

_ALL = ""
"""Key of the moments of all rows together; no data_source is empty."""


@dataclass
class RewardStage:
    """Shaping and the KL in the reward of one run.

    Args:
        config: the ``reward`` section.
        algorithm: the ``algorithm`` section.
        max_length: longest response, in tokens.
        kl_coef: of the next batch; None: as the configuration says.
        turn_weight: weight of the turns' rewards, where each is given to the end of its turn; None: a row's reward at its end.
    """

    config: RewardConfig
    algorithm: AlgorithmConfig
    max_length: int
    kl_coef: float | None = None
    moments: dict[str, Moments] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    turn_weight: float | None = None

    @property
    def uses_kl(self) -> bool:
        return self.algorithm.use_kl_in_reward

    @property
    def coef(self) -> float:
        """The coefficient of the KL of the next batch."""
        return self.algorithm.kl_ctrl.kl_coef if self.kl_coef is None else self.kl_coef

    # ---- rewards of rows ----------------------------------------------------------------------------------------
    def unscaled(self, rollout: ScoredRollout) -> torch.Tensor:
        """``[R]`` float64 ``w (score + overlong penalty)`` with w the factor of the row's data_source."""
        rewards = torch.tensor(rollout.scores, dtype=torch.float64)
        if (penalty := self._penalty(rollout)) is not None:
            rewards = rewards + penalty
        if self.config.source_weights:
            weights = [self.config.source_weights.get(source, 1.0) for source in _sources(rollout)]
            rewards = rewards * torch.tensor(weights, dtype=torch.float64)
        given = [key for key in ("source_weights", "overlong_buffer") if getattr(self.config, key)]
        return _held(rewards, rollout, " and ".join(f"reward.{key}" for key in given))

    def shape(self, rollout: ScoredRollout, *, learn: bool = True) -> torch.Tensor:
        """``[R]`` float64 :meth:`unscaled`, then scaled by the moments and clipped.

        Args:
            learn: count these rewards in the moments before they are scaled by them; False for rewards that nothing is learnt
                from, such as a baseline's.
        """
        rewards = self.unscaled(rollout)
        if self.config.normalize != "none":
            rewards = _held(self._normalise(rewards, _sources(rollout), learn), rollout, "reward.normalize")
        return rewards.clamp(self.config.clip_min, self.config.clip_max) if self._clips else rewards

    @property
    def _clips(self) -> bool:
        return self.config.clip_min is not None or self.config.clip_max is not None

    def _penalty(self, rollout: ScoredRollout) -> torch.Tensor | None:
        buffer = self.config.overlong_buffer
        if buffer is None:
            return None
        lengths = torch.tensor([len(c.token_ids) for c in rollout.completions])
        return overlong_penalty(
            lengths, max_length=self.max_length, buffer_length=buffer.len, factor=buffer.penalty_factor
        )

    def _normalise(self, rewards: torch.Tensor, sources: Sequence[str], learn: bool) -> torch.Tensor:
        keys = list(sources) if self.config.normalize_by == "data_source" else [_ALL] * len(sources)
        out = rewards.clone()
        for key in sorted(set(keys)):
            own = torch.tensor([k == key for k in keys])
            moments = self.moments.get(key, Moments())
            if learn:
                moments = self.moments[key] = moments.merged(rewards[own])
            out[own] = scaled(rewards[own], moments, centre=self.config.normalize == "running")
        return out

    # ---- rewards of tokens --------------------------------------------------------------------------------------
    def mask(self, batch: PackedBatch, rollout: ScoredRollout) -> PackedBatch:
        """``batch`` without the tokens of truncated responses in its ``loss_mask``, where the configuration says so."""
        if not self.algorithm.mask_truncated_completions:
            return batch
        kept = overlong_mask(batch.items["loss_mask"].bool(), truncated(rollout), batch.row_ids())
        return batch.with_items(loss_mask=kept)

    def inputs(self, batch: PackedBatch, rollout: ScoredRollout, rewards: torch.Tensor) -> dict[str, torch.Tensor]:
        """``scores`` ``[R]`` and ``token_rewards`` ``[N]`` float64 for the estimator. The controller takes its step, and
        :attr:`metrics` are those of this batch.

        Args:
            batch: has ``old_log_probs`` and ``ref_log_probs`` ``[N]`` where the KL is in the reward.
            rollout: its rows in the same order.
            rewards: ``[R]`` theirs, of :meth:`shape`.
        """
        self.metrics = {}
        if (penalty := self._penalty(rollout)) is not None:
            self.metrics["reward/overlong_penalty"] = float(penalty.mean())
        mask, row_ids = batch.items["loss_mask"].bool(), batch.row_ids()
        if self.turn_weight is None:
            tokens = last_token_rewards(rewards, mask, batch.cu_seqlens)
        else:
            tokens = turn_token_rewards(rewards, rollout.completions, mask, batch.cu_seqlens, self.turn_weight)
        if self.uses_kl:
            old, ref = (batch.items[name].double() for name in ("old_log_probs", "ref_log_probs"))
            kl = kl_estimate(old, ref, self.algorithm.kl_penalty)
            coef = self.coef
            tokens = penalised_token_rewards(tokens, kl, mask, coef)
            # A row without a trained token keeps its reward, which counts in its group.
            rewards = rewards - coef * row_sums(kl, mask, row_ids, batch.num_rows)
            rewards = _held(rewards, rollout, f"algorithm.kl_penalty {self.algorithm.kl_penalty}")
            self.metrics["actor/reward_kl_penalty_coeff"] = coef
            if (current := mean_kl(kl, mask, row_ids, batch.num_rows)) is not None:
                self.metrics["actor/reward_kl_penalty"] = current
                self._control(coef, current, batch.num_rows)
        self.metrics |= {
            "critic/rewards/mean": float(rewards.mean()),
            "critic/rewards/max": float(rewards.max()),
            "critic/rewards/min": float(rewards.min()),
        }
        return {"scores": rewards, "token_rewards": tokens}

    def _control(self, coef: float, current_kl: float, num_rows: int) -> None:
        control = self.algorithm.kl_ctrl
        if control.type == "adaptive":
            self.kl_coef = next_kl_coef(coef, current_kl, num_rows, target=control.target_kl, horizon=control.horizon)

    # ---- checkpoint ---------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """As JSON data; floats come back bit by bit."""
        return {
            "kl_coef": self.kl_coef,
            "kl_start": self.algorithm.kl_ctrl.kl_coef,
            "moments": {key: asdict(value) for key, value in self.moments.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Take :meth:`state_dict`'s answer back; what the configuration has switched off since then is left out.

        Returns:
            What the user should know, a line each: where settings were changed since then.
        """
        self.kl_coef = state.get("kl_coef") if self.algorithm.kl_ctrl.type == "adaptive" else None
        kept = state.get("moments", {}) if self.config.normalize != "none" else {}
        self.moments = {key: Moments(**value) for key, value in kept.items()}
        given = self.algorithm.kl_ctrl.kl_coef
        before = state.get("kl_start", given)
        if self.kl_coef is None or not self.uses_kl or before == given:
            return []
        return [
            f"algorithm.kl_ctrl.kl_coef was {before:g} and is {given:g}, where the control starts: the run goes on with the "
            f"checkpoint's {self.kl_coef:g}"
        ]


def truncated(rollout: ScoredRollout) -> torch.Tensor:
    """``[R]`` bool: the length limit cut the response."""
    return torch.tensor([c.finish_reason is FinishReason.LENGTH for c in rollout.completions])


def _held(rewards: torch.Tensor, rollout: ScoredRollout, setting: str) -> torch.Tensor:
    """``rewards`` ``[R]``, which float32 holds.

    Raises:
        GuardError: it does not; ``setting`` has made them so large.
    """
    wrong = (~(rewards.abs() <= LARGEST)).nonzero()[:, 0].tolist()
    if not wrong:
        return rewards
    row = rollout.rows[rollout.completions[wrong[0]].prompt_index]
    raise GuardError(
        f"the reward of {row.source} (row {row.index}) is too large after {setting}",
        found=f"{float(rewards[wrong[0]]):g} of the score {rollout.scores[wrong[0]]:g}; {len(wrong)} of {len(rewards)} rows",
        wanted=f"at most {LARGEST:.1e}, the largest float32",
        next=f"correct {setting}, or the rewards that it shapes",
    )


def _sources(rollout: ScoredRollout) -> list[str]:
    return [rollout.rows[c.prompt_index].data_source for c in rollout.completions]
