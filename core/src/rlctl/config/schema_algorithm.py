"""The ``algorithm`` and ``actor.policy_loss`` sections: which formulas (docs/algorithms.md). Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rlctl.config.base import Strict

OWN_FUNCTION = "a name of docs/algorithms.md, of a plugin, or path/to/file.py:function"


class PolicyLossConfig(Strict):
    """The policy loss. A bound that is not set is the one of the loss's paper; one that the loss does not read is refused."""

    loss_mode: str = Field(default="vanilla", min_length=1, description=f"Which policy loss: {OWN_FUNCTION}.")
    clip_ratio_low: float | None = Field(
        default=None, ge=0, le=1, description="Lower bound of the loss, for most: the ratio is clipped below 1 - this."
    )
    clip_ratio_high: float | None = Field(
        default=None, ge=0, description="Upper bound of the loss, for most: the ratio is clipped above 1 + this."
    )
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = Field(
        default=None, description="Dual clip: bound on the loss of negative advantages."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Further arguments of a function of your own.")


class AlgorithmConfig(Strict):
    """How rewards become advantages, and where old log-probs come from."""

    adv_estimator: str = Field(
        default="grpo", min_length=1, description=f"How rewards become advantages: {OWN_FUNCTION}."
    )
    norm_adv_by_std_in_grpo: bool = Field(
        default=True, description="grpo, grpo_passk: divide by the standard deviation of the prompt's samples."
    )
    adv_args: dict[str, Any] = Field(default_factory=dict, description="Further arguments of a function of your own.")
    bypass_mode: bool = Field(
        default=False, description="Take the rollout's log-probs as old log-probs instead of recomputing them."
    )
