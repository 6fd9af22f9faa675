"""The ``rollout.environment`` section: conversations of several turns. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat

from rlctl.algorithms.table import ADVANTAGES, TOKEN_REWARDS
from rlctl.config.base import Count, Strict
from rlctl.config.document import Document, Origin

if TYPE_CHECKING:
    from rlctl.config.schema import RunConfig

REWARD = "environment"
"""The reward component that is the sum of a conversation's turns."""


class EnvironmentConfig(Strict):
    """Whom the policy talks to: each completion becomes a conversation of several turns."""

    name: str = Field(min_length=1, description="A registered environment, path/to/file.py:Class or module:Class.")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of its class.")
    max_turns: Count = Field(default=8, description="Turns of the policy in one conversation.")
    max_turn_tokens: Count | None = Field(
        default=None, description="Tokens of one turn; default: what data.max_response_length leaves."
    )
    timeout_s: PositiveFloat = Field(default=10.0, description="Limit for one reset or step.")
    max_concurrency: Count = Field(default=32, description="Calls of async methods that run at the same time.")
    on_error: Literal["raise", "zero"] = Field(
        default="raise",
        description="Where reset or step fails: stop the run, or end that conversation with a reward of 0 and count it.",
    )
    turn_rewards: bool = Field(
        default=False,
        description="Give each turn's reward to its last token (for estimators that read them) instead of the sum to the row.",
    )
    earlier_thinking: Literal["refuse", "keep"] = Field(
        default="refuse",
        description="Where the chat template leaves the <think> part out of earlier turns: refuse it, or keep all as sampled.",
    )


def add_environment_reward(document: Document) -> None:
    """An environment gives the reward, unless ``reward.components`` says otherwise."""
    if document.get(("rollout", "environment")) is None or document.get(("reward", "components")) is not None:
        return
    reward = document.get(("reward",))
    if reward is None or isinstance(reward, dict):
        origin = Origin("derived", "as rollout.environment is set")
        document.set(("reward", "components"), [{"name": REWARD}], origin)


def environment_faults(config: RunConfig) -> list[str]:
    """What is wrong between ``rollout.environment`` and the other sections, one line each."""
    section = config.rollout.environment
    named = [c.name for c in config.reward.components]
    if config.trainer.type != "rl":
        return []
    if section is None:
        return ["the reward environment needs rollout.environment: set it, or take the component out"] * (
            REWARD in named
        )
    faults: list[str] = []
    if REWARD not in named:
        faults.append(
            f"reward.components leaves out what rollout.environment gives: add {{name: {REWARD}}}, with weight 0 where it is "
            "not to count"
        )
    if section.turn_rewards:
        estimator = config.algorithm.adv_estimator
        if estimator in ADVANTAGES and estimator not in TOKEN_REWARDS:
            faults.append(
                f"rollout.environment.turn_rewards gives each turn its reward, and {estimator} reads the reward of a whole row "
                f"({' and '.join(TOKEN_REWARDS)} read those of tokens): take one of the two out"
            )
        if any(c.sources for c in config.reward.components if c.name == REWARD):
            faults.append(
                "rollout.environment.turn_rewards is for every row: take sources out of the component environment"
            )
        keys = [key for key in ("source_weights", "normalize", "clip_min", "clip_max") if key in config.reward.shapes]
        if keys:
            words = ", ".join(f"reward.{key}" for key in keys)
            faults.append(
                f"rollout.environment.turn_rewards and {words} do not go together, which shape the reward of a whole row: take "
                "one of them out"
            )
    return faults
