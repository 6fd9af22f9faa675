"""The ``algorithm`` and ``actor.policy_loss`` sections: which formulas. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlctl.config.base import Strict


class PolicyLossConfig(Strict):
    """The policy loss. Vanilla is PPO's clip (arXiv 1707.06347) with dual clip (arXiv 1912.09729)."""

    loss_mode: Literal["vanilla"] = Field(default="vanilla", description="Which policy loss.")
    clip_ratio_low: float = Field(default=0.2, ge=0, le=1, description="The ratio is clipped below 1 - this.")
    clip_ratio_high: float = Field(default=0.2, ge=0, description="The ratio is clipped above 1 + this.")
    clip_ratio_c: float = Field(default=3.0, gt=1, description="Dual clip: bound on the loss of negative advantages.")


class AlgorithmConfig(Strict):
    """How rewards become advantages, and where old log-probs come from."""

    name: Literal["grpo"] = Field(default="grpo", description="Which algorithm.")
    adv_estimator: Literal["grpo"] = Field(default="grpo", description="How rewards become advantages.")
    norm_adv_by_std_in_grpo: bool = Field(default=True, description="False is Dr. GRPO's advantage (arXiv 2503.20783).")
    bypass_mode: bool = Field(
        default=False, description="Take the rollout's log-probs as old log-probs instead of recomputing them."
    )
