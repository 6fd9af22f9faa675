"""Roles that run a training engine: actor, reference, teacher, and the starts that train them. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rlctl.config.base import Count, Strict
from rlctl.config.schema_algorithm import EntropyControlConfig, PolicyLossConfig
from rlctl.config.schema_model import ModelConfig, OptimConfig, ParallelConfig
from rlctl.config.schema_runtime import MAIN_POOL
from rlctl.normalizer_modes import LossAggMode

# fmt: off
KlType = Literal[
    "k1", "k2", "k3", "abs", "full", "kl", "mse", "low_var_kl", "k1+", "k2+", "k3+", "abs+", "kl+", "mse+", "low_var_kl+"
]
# fmt: on


class TrainRole(Strict):
    """What the roles that run a training engine share."""

    backend: str = Field(default="fsdp2", description="Training backend; rlctl plugins lists them.")
    engine: dict[str, Any] = Field(default_factory=dict, description="The backend's own section.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Sizes of the parallel axes.")
    pool: str = Field(default=MAIN_POOL, description="Pool of processes where it lives (runtime.pools).")
    python: str | None = Field(
        default=None,
        description="Directory of the virtual environment, or interpreter, in which its processes run. Without a pool it gets one "
        "of its own, named after it.",
    )
    micro_batch_size_per_device: Count | None = Field(default=None, description="Rows of a micro-batch.")
    max_tokens_per_device: Count | None = Field(
        default=None,
        description="Token budget of a micro-batch, a hard bound. Set at most one of the two; default 16384 tokens.",
    )

    @model_validator(mode="after")
    def _one_bound(self) -> TrainRole:
        if self.micro_batch_size_per_device and self.max_tokens_per_device:
            raise ValueError("set one of micro_batch_size_per_device and max_tokens_per_device, not both")
        return self


class ActorConfig(TrainRole):
    """The policy that is trained (for SFT: the model that is trained)."""

    optim: OptimConfig = Field(default_factory=OptimConfig, description="AdamW and its schedule.")
    policy_loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig, description="The policy loss.")
    loss_agg_mode: LossAggMode = Field(
        default=LossAggMode.TOKEN_MEAN, description="How per-token losses become one number."
    )
    ppo_mini_batch_size: Count | None = Field(default=None, description="Prompts of one optimizer step; default: all.")
    ppo_epochs: Count = Field(default=1, description="Passes over each batch of rollouts.")
    entropy_coeff: float = Field(
        default=0.0, description="Weight of the entropy bonus; with entropy_ctrl the first one."
    )
    entropy_ctrl: EntropyControlConfig = Field(
        default_factory=EntropyControlConfig, description="How that weight follows the entropy."
    )
    use_kl_loss: bool = Field(default=False, description="Add the KL to the reference to the loss.")
    kl_loss_coef: float = Field(default=0.001, ge=0, description="Weight of the KL in the loss.")
    kl_loss_type: KlType = Field(
        default="k3",
        description="KL estimator; kl, mse and low_var_kl are other names of k1, k2 and k3, and a + behind one takes the gradient "
        "of k2. The gradient of k1 is zero in expectation: it measures and regularises nothing. full: the sum over the "
        "vocabulary, for small ones.",
    )
    skip_zero_advantage: bool = Field(
        default=True,
        description="Leave rows out of the update whose gradient is exactly zero (no advantage, no KL, no entropy).",
    )


class RefConfig(TrainRole):
    """The frozen reference, used with actor.use_kl_loss or algorithm.use_kl_in_reward. What it does not state it takes from the actor."""

    backend: str = Field(
        default="", description="Training backend; empty: the actor's, with the actor's engine section."
    )
    pool: str = Field(
        default="", description="Pool of processes where it lives; empty: the actor's, with the actor's dp sizes."
    )


class WarmStartConfig(Strict):
    """SFT on the training rows' own answers before RL, so that a reward signal exists."""

    steps: Count = Field(description="Optimizer steps at most.")
    batch_size: Count = Field(default=32, description="Rows of an optimizer step.")
    optim: OptimConfig = Field(
        default_factory=lambda: OptimConfig(lr=1e-5), description="AdamW and its schedule, apart from the actor's."
    )
    eval_freq: Count = Field(default=20, description="Steps between two looks at stop_at_score.")
    stop_at_score: float | None = Field(default=None, description="Stop once the sampled validation score reaches it.")
    lora: bool = Field(
        default=True,
        description="With model.lora: train adapters here too, merged into the model that RL starts from. false: every weight.",
    )


class TeacherConfig(RefConfig):
    """The teacher of a distillation: scores, never learns. What it does not state it takes from the actor."""

    model: ModelConfig | None = Field(default=None, description="The one teacher.")
    models: dict[str, ModelConfig] = Field(
        default_factory=dict,
        description="Several teachers: value of route_by in a row to the model section of its teacher.",
    )
    route_by: str = Field(
        default="data_source", min_length=1, description="data_source, or a key of a row's extra_info."
    )
    train: WarmStartConfig | None = Field(
        default=None, description="Train the teacher first, by SFT on the training rows' answers."
    )
