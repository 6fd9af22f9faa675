"""The ``algorithm`` and ``actor.policy_loss`` sections: which formulas (docs/algorithms.md). Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from rlctl.config.base import Count, Strict
from rlctl.config.schema_correction import RolloutCorrectionConfig

Share = Annotated[float, Field(gt=0, le=1)]

OWN_FUNCTION = "a name of docs/algorithms.md, of a plugin, or path/to/file.py:function"


class PolicyLossConfig(Strict):
    """The policy loss (docs/algorithms.md). What is not set is the loss's own default; what it does not read is refused."""

    loss_mode: str = Field(default="vanilla", min_length=1, description=f"Which policy loss: {OWN_FUNCTION}.")
    clip_ratio_low: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="The ratio is clipped below 1 - this. geo_mean: log-ratios below -this; dppo_*: bound on the divergence "
        "where the advantage is negative.",
    )
    clip_ratio_high: float | None = Field(
        default=None,
        ge=0,
        description="The ratio is clipped above 1 + this. geo_mean: log-ratios above this; dppo_*: bound on the divergence "
        "where the advantage is positive.",
    )
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = Field(
        default=None,
        description="vanilla: dual clip, bound on the loss of negative advantages (3). dppo_*: bound on the ratio (20).",
    )
    tau_pos: PositiveFloat | None = Field(
        default=None, description="sapo: how fast the gate closes where the advantage is positive (1)."
    )
    tau_neg: PositiveFloat | None = Field(default=None, description="sapo: how fast the gate closes elsewhere (1.05).")
    clip_cov_ratio: Share | None = Field(
        default=None, description="clip_cov: share of the tokens of an optimizer step that are left out (0.0002)."
    )
    clip_cov_lb: float | None = Field(
        default=None, description="clip_cov: only tokens of a covariance above this are left out (1)."
    )
    clip_cov_ub: float | None = Field(
        default=None, description="clip_cov: only tokens of a covariance below this are left out (5)."
    )
    kl_cov_ratio: Share | None = Field(
        default=None, description="kl_cov: share of the tokens of an optimizer step that get the KL (0.0002)."
    )
    ppo_kl_coef: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="kl_cov: weight of that KL (1)."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Further arguments of a function of your own.")


class EntropyControlConfig(Strict):
    """The weight of the entropy bonus, moved towards a target entropy after each step."""

    type: Literal["fixed", "additive", "sac"] = Field(
        default="fixed",
        description="additive: up by step below the target, down above it, and no bonus above it; sac: times "
        "exp(step (target - entropy)).",
    )
    target_entropy: PositiveFloat | None = Field(default=None, description="Nats a token, as actor/entropy is.")
    step: PositiveFloat = Field(default=0.005, description="How far the weight moves in one step.")
    max_coeff: PositiveFloat = Field(default=0.1, description="The weight is at most this.")


class KlControlConfig(Strict):
    """The coefficient of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = Field(
        default="fixed", description="adaptive: moved towards target_kl after each batch."
    )
    kl_coef: float = Field(default=0.001, ge=0, description="The coefficient; with adaptive the first one.")
    target_kl: PositiveFloat = Field(default=0.1, description="adaptive: nats a token, as actor/reward_kl_penalty is.")
    horizon: Count = Field(
        default=10_000,
        description="adaptive: rows in one batch of which a KL far off moves the coefficient by a fifth.",
    )


class FilterGroupsConfig(Strict):
    """DAPO's dynamic sampling: prompts whose samples are all alike are left out, and new ones sampled in their place."""

    metric: str = Field(
        default="reward",
        min_length=1,
        description="What must differ: reward (before it is normalised and clipped, without the KL), score, or a reward component.",
    )
    max_num_gen_batches: Count = Field(
        default=10, description="Generation batches of one step at most; then it trains on what there is."
    )


class AlgorithmConfig(Strict):
    """How rewards become advantages, and where old log-probs come from."""

    adv_estimator: str = Field(
        default="grpo", min_length=1, description=f"How rewards become advantages: {OWN_FUNCTION}."
    )
    norm_adv_by_std_in_grpo: bool = Field(
        default=True, description="grpo, grpo_passk: divide by the standard deviation of the prompt's samples."
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="gae, reinforce_plus_plus: discount of one token.")
    lam: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="gae: 0 trusts the critic one token ahead, 1 the rewards of the whole response.",
    )
    adv_args: dict[str, Any] = Field(default_factory=dict, description="Further arguments of a function of your own.")
    rollout_correction: RolloutCorrectionConfig | None = Field(
        default=None, description="Weights and rejections where the rollout's log-probs are not the trainer's."
    )
    use_kl_in_reward: bool = Field(
        default=False, description="Subtract the KL to the reference from the reward of each token."
    )
    kl_penalty: Literal["k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl"] = Field(
        default="k1", description="Estimator of the KL in the reward; it has no gradient there."
    )
    kl_ctrl: KlControlConfig = Field(
        default_factory=KlControlConfig, description="The coefficient of the KL in the reward."
    )
    filter_groups: FilterGroupsConfig | None = Field(
        default=None, description="Train only on prompts whose samples differ, and sample until they fill the batch."
    )
    mask_truncated_completions: bool = Field(
        default=False, description="Do not train on responses that the length limit cut; they count in their group."
    )

    @property
    def bypass_mode(self) -> bool:
        """True where the rollout's log-probs stand for the old ones."""
        return self.rollout_correction is not None and self.rollout_correction.bypass_mode
