"""A run's critic: its model found and compared with the actor's tokens, its engine built, its part of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rlctl.algorithms.lookup import Algorithm
from rlctl.batch import PackedBatch
from rlctl.config.schema import CriticConfig, ModelConfig, RunConfig
from rlctl.config.schema_critic import VALUES
from rlctl.data.same_tokens import require_tokens_of_actor
from rlctl.data.tokenizer import load_tokenizer
from rlctl.errors import ConfigError
from rlctl.models import resolve_model_source
from rlctl.records import ModelType
from rlctl.roles.budget import SkipBudget
from rlctl.roles.critic import CriticRole
from rlctl.trainers import setup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlctl.runtime.records import BuildSpec


@dataclass
class CriticStage:
    """What a critic does in a step of the loop.

    Args:
        warmup_steps: first steps of the run in which the actor is not updated.
    """

    role: CriticRole
    warmup_steps: int = 0

    def judge(self, batch: PackedBatch) -> PackedBatch:
        """``batch`` with item field ``values`` ``[N]``, for the estimator."""
        return batch.with_items(values=self.role.values(batch))

    def learn(self, batch: PackedBatch, generator: torch.Generator) -> tuple[PackedBatch, dict[str, float]]:
        """The critic's optimizer steps on a batch with ``values``, ``returns`` and ``advantages``.

        Returns:
            The batch without what only a critic reads, which need not travel to the actor's ranks; and metrics.
        """
        assert "returns" in batch.items, "find_algorithms has tried the estimator"
        metrics = self.role.update(batch, generator)
        kept = {name: value for name, value in batch.items.items() if name not in ("values", "returns")}
        return replace(batch, items=kept), metrics

    def warms_up(self, step: int) -> bool:
        """True in a step, counted from 1, in which the critic learns alone."""
        return step <= self.warmup_steps


def find_critic(
    context: setup.Context, model: ModelConfig, estimator: Algorithm, tokenizer: PreTrainedTokenizerBase
) -> ModelConfig | None:
    """The critic's own model section with its source made local; None where it starts from the actor's weights.

    Checked before any process is started.

    Raises:
        ConfigError: the estimator reads values and there is no critic, or the other way round.
        RlctlError: the backend does not answer or cannot run the topology, its files are not there, or its tokens are not the
            actor's.
    """
    section = context.config.critic
    if (VALUES in estimator.spec.needs) != (section is not None):
        raise ConfigError(
            f"the {estimator.label} reads a critic's values"
            if section is None
            else f"the {estimator.label} reads no critic's values, and there is a critic",
            found="no section critic" if section is None else "section critic",
            wanted="a critic where its values are read, and only there",
            next="set critic={}" if section is None else "take critic out",
        )
    if section is None:
        return None
    own = None if section.model is None else resolve_model_source(section.model, notice=context.reporter.message)
    _spec(context, section, own or model.without_lora())
    if own is not None:
        require_tokens_of_actor(tokenizer, load_tokenizer(own))
    return own


def build_critic(context: setup.Context, model: ModelConfig, total_steps: int) -> CriticStage | None:
    """The critic with its engine built; None without one.

    Args:
        model: the section that loads its start weights.
        total_steps: global steps of the whole run.
    """
    config, section = context.config, context.config.critic
    if section is None:
        return None
    prompts = mini_batch_prompts(config)
    epochs = section.ppo_epochs or config.actor.ppo_epochs
    optim = setup.with_schedule(section.optim, total_steps * epochs * -(-config.data.train_batch_size // prompts))
    engine = setup.build_train_engine(
        context,
        section,
        model,
        name="critic",
        optim=optim,
        backend=section.backend or config.actor.backend,
        engine_section=section.engine or config.actor.engine,
        head=ModelType.VALUE_MODEL,
    )
    role = CriticRole(
        engine,
        section,
        setup.token_plan(section, config),
        prompts * config.rollout.n,
        epochs,
        config.data.max_response_length,
        SkipBudget(config.guards.nonfinite_step_budget, "critic.optim.lr"),
    )
    return CriticStage(role, section.warmup_steps)


def mini_batch_prompts(config: RunConfig) -> int:
    """Prompts of one of the critic's optimizer steps: its own number, else the actor's."""
    own = config.critic.ppo_mini_batch_size if config.critic else None
    return own or config.actor.ppo_mini_batch_size or config.data.train_batch_size


def _spec(context: setup.Context, section: CriticConfig, model: ModelConfig) -> BuildSpec:
    config = context.config
    return setup.train_spec(
        context,
        section,
        model,
        name="critic",
        optim=section.optim,
        backend=section.backend or config.actor.backend,
        engine_section=section.engine or config.actor.engine,
        head=ModelType.VALUE_MODEL,
    )
