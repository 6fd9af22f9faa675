"""The environment of a run: its process, its chat template, and the rewards of turns at tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from rlctl.algorithms.lookup import Algorithm
from rlctl.algorithms.table import TOKEN_REWARDS
from rlctl.config.schema_environment import REWARD
from rlctl.data.lengths import model_positions
from rlctl.data.prompts import PromptEncoder
from rlctl.environments.episodes import Episodes
from rlctl.environments.glue import ChatGlue
from rlctl.environments.registry import open_environment
from rlctl.errors import ConfigError
from rlctl.generation import Completion, Conversation, Ending

if TYPE_CHECKING:
    from rlctl.config.schema import ModelConfig, RunConfig
    from rlctl.trainers.setup import Context


def build_episodes(
    context: Context, model: ModelConfig, encoder: PromptEncoder, estimator: Algorithm, closing: ExitStack
) -> Episodes | None:
    """Start ``rollout.environment``; None where the run has none.

    Args:
        model: the policy's, as it is on disk.
        closing: its process ends with it.

    Raises:
        ConfigError, DataError: it does not load; or its turns have rewards that the estimator does not read.
    """
    section = context.config.rollout.environment
    if section is None:
        return None
    if section.turn_rewards and not estimator.takes("token_rewards"):
        raise ConfigError(
            f"the {estimator.label} reads the reward of a whole row, not of its tokens",
            found="rollout.environment.turn_rewards=true",
            wanted=f"algorithm.adv_estimator {' or '.join(TOKEN_REWARDS)}",
            next="rollout.environment.turn_rewards=false, or another estimator",
        )
    client = open_environment(section, context.plugins, context.resolved.base_dir)
    closing.callback(client.close)
    glue = ChatGlue(
        encoder,
        client.tools,
        keep_thinking=section.earlier_thinking == "keep",
        stop=context.config.rollout.stop,
    )
    return Episodes(
        client,
        section,
        glue,
        context.config.data.max_prompt_length,
        context.reporter.message,
        model_positions(model),
    )


def turn_weight(config: RunConfig) -> float | None:
    """The weight of the turns' rewards in a row's, where each turn gets its own; else None."""
    section = config.rollout.environment
    if section is None or not section.turn_rewards:
        return None
    return sum(component.weight for component in config.reward.components if component.name == REWARD)


def turn_token_rewards(
    rewards: torch.Tensor,
    completions: Sequence[Completion],
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    weight: float,
) -> torch.Tensor:
    """``[N]`` float64: ``weight`` times the reward of each turn but the last at the turn's last token, and what is left of the row's
    reward at the last trained token of the row; so the sum over a row is its reward.

    Args:
        rewards: ``[R]`` of the rows.
        completions: of the rows, in their order.
        mask: ``[N]`` bool, the trained tokens; a turn without one gives its reward to the end of the row.
        cu_seqlens: ``[R + 1]``.
    """
    out = torch.zeros(len(mask), dtype=torch.float64)
    for row, c in enumerate(completions):
        end = int(cu_seqlens[row + 1])
        trained = mask[int(cu_seqlens[row]) : end].nonzero()[:, 0]
        if not len(trained):
            continue
        start = end - len(c.token_ids)
        rest = float(rewards[row])
        if isinstance(c, Conversation) and c.ending is not Ending.ERROR:
            for turn in c.turns[:-1]:
                at = start + turn.end - 1
                if turn.end > turn.start and bool(mask[at]):
                    out[at] += weight * turn.reward
                    rest -= weight * turn.reward
        out[int(cu_seqlens[row]) + int(trained[-1])] += rest
    return out
