"""The ``reward`` section. Imports no torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveFloat

from rlctl.config.base import Strict


class RewardComponent(Strict):
    """One reward: a registered name, or path/to/file.py:function."""

    name: str = Field(min_length=1, description="A registered reward, or path/to/file.py:function.")
    weight: float = Field(default=1.0, description="Weight in the sum.")
    args: dict[str, Any] = Field(default_factory=dict, description="Settings of the reward.")


class RewardConfig(Strict):
    """The reward of a row is the weighted sum of its components."""

    components: tuple[RewardComponent, ...] = Field(
        default=(RewardComponent(name="exact_match"),), min_length=1, description="The rewards that are added up."
    )
    timeout_s: PositiveFloat = Field(
        default=10.0, description="Limit for one call of a user's function or of math-verify."
    )
