"""The ``critic`` section, and what it asks of the other sections. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveFloat

from rlctl.algorithms.table import ADVANTAGES
from rlctl.config.base import Count, CountOrZero
from rlctl.config.schema_model import ModelConfig, OptimConfig
from rlctl.config.schema_roles import RefConfig
from rlctl.normalizer_modes import LossAggMode

if TYPE_CHECKING:
    from rlctl.config.schema import RunConfig

VALUES = "values"
"""The input of an advantage estimator that a critic makes."""


class CriticConfig(RefConfig):
    """The value model of an estimator that needs one (gae). What it does not state it takes from the actor."""

    model: ModelConfig | None = Field(
        default=None,
        description="Its start weights: a language model, which gets a fresh value head, or a value model. Default: the actor's.",
    )
    optim: OptimConfig = Field(
        default_factory=lambda: OptimConfig(lr=1e-5), description="AdamW and its schedule, apart from the actor's."
    )
    loss_agg_mode: LossAggMode = Field(
        default=LossAggMode.TOKEN_MEAN, description="How per-token losses become one number."
    )
    value_clip: PositiveFloat | None = Field(
        default=0.5, description="A value further than this from the one before the update is clipped; null: no clip."
    )
    ppo_mini_batch_size: Count | None = Field(
        default=None, description="Prompts of one optimizer step; default: the actor's."
    )
    ppo_epochs: Count | None = Field(default=None, description="Passes over each batch; default: the actor's.")
    warmup_steps: CountOrZero = Field(
        default=0, description="First steps of the run in which the critic learns and the actor does not."
    )


def needs_critic(estimator: object) -> bool:
    """True for an estimator of rlctl's own that reads a critic's values."""
    spec = ADVANTAGES.get(estimator) if isinstance(estimator, str) else None
    return spec is not None and VALUES in spec.needs


def critic_faults(config: RunConfig) -> list[str]:
    """What is wrong between ``critic``, the estimator and the trainer, one line each."""
    critic, estimator = config.critic, config.algorithm.adv_estimator
    rl = config.trainer.type == "rl"
    if critic is None:
        if rl and needs_critic(estimator):
            return [f"algorithm.adv_estimator {estimator} needs a critic: add critic: {{}}"]
        return []
    with_values = [name for name in ADVANTAGES if needs_critic(name)]
    if not rl:
        where = "SFT" if config.trainer.type == "sft" else f"trainer.type {config.trainer.type}"
        return [f"critic has nothing to do in {where}: take critic out"]
    if estimator in ADVANTAGES and estimator not in with_values:
        return [
            f"critic has nothing to do with algorithm.adv_estimator {estimator}: set it to {' or '.join(with_values)}, or take "
            "critic out"
        ]
    faults: list[str] = []
    mini = critic.ppo_mini_batch_size
    if mini is not None and config.data.train_batch_size % mini:
        faults.append(
            f"data.train_batch_size {config.data.train_batch_size} is not a multiple of critic.ppo_mini_batch_size {mini}"
        )
    total = config.trainer.total_training_steps
    if total is not None and (fault := warmup_fault(config, total)) is not None:
        faults.append(fault)
    return faults


def warmup_fault(config: RunConfig, total_steps: int) -> str | None:
    """What is wrong where the critic would learn alone in every step of the run; None where it does not."""
    alone = config.critic.warmup_steps if config.critic else 0
    if alone < total_steps:
        return None
    trainer = config.trainer
    epochs = trainer.total_training_steps is None
    given = f"trainer.total_epochs {trainer.total_epochs}" if epochs else "trainer.total_training_steps"
    return f"critic.warmup_steps is {alone}, and the run has {total_steps} steps ({given}): the actor would never be trained"
