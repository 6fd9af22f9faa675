"""The ``reward`` section. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, PositiveFloat

from rlctl.config.base import Count, Strict


class RewardComponent(Strict):
    """One reward: a registered name, or path/to/file.py:function."""

    name: str = Field(min_length=1, description="A registered reward, or path/to/file.py:function.")
    weight: float = Field(default=1.0, description="Weight in the sum.")
    args: dict[str, Any] = Field(default_factory=dict, description="Settings of the reward.")
    sources: tuple[str, ...] = Field(
        default=(), description="Values of data_source whose rows it scores; empty: every row."
    )


class OverlongBufferConfig(Strict):
    """DAPO's soft overlong punishment of training rewards."""

    len: Count = Field(description="Tokens before data.max_response_length over which the penalty grows from 0.")
    penalty_factor: PositiveFloat = Field(default=1.0, description="The penalty at data.max_response_length.")


class RewardConfig(Strict):
    """The reward of a row is the weighted sum of its components. What stands below source_weights shapes training alone: scores,
    also those of validation, stay the task's."""

    components: tuple[RewardComponent, ...] = Field(
        default=(RewardComponent(name="exact_match"),), min_length=1, description="The rewards that are added up."
    )
    timeout_s: PositiveFloat = Field(
        default=10.0, description="Limit for one call of a user's function or of math-verify."
    )
    source_weights: dict[str, float] = Field(
        default_factory=dict, description="data_source to a factor of the rewards of its rows in training; others: 1."
    )
    overlong_buffer: OverlongBufferConfig | None = Field(
        default=None, description="A penalty on responses that come near data.max_response_length."
    )
    normalize: Literal["none", "running", "running_std"] = Field(
        default="none",
        description="running: less the mean of all rewards of the run so far, over their deviation; running_std: over the "
        "deviation only.",
    )
    normalize_by: Literal["all", "data_source"] = Field(
        default="all", description="Whose mean and deviation: one for all rows, or one for each data_source."
    )
    clip_min: float | None = Field(default=None, description="Rewards are at least this, after all of the above.")
    clip_max: float | None = Field(default=None, description="Rewards are at most this, after all of the above.")

    @property
    def component_names(self) -> list[str]:
        """What each component is called in metrics and results."""
        names: list[str] = []
        for component in self.components:
            names.append(component_name(component.name, names))
        return names

    @property
    def shapes(self) -> tuple[str, ...]:
        """The keys that make training rewards differ from scores."""
        plain = type(self)()
        keys = ("source_weights", "overlong_buffer", "normalize", "clip_min", "clip_max")
        return tuple(key for key in keys if getattr(self, key) != getattr(plain, key))


def is_user_function(name: str) -> bool:
    """True for ``path/to/file.py:function``."""
    return ".py:" in name or name.endswith(".py")


def component_name(name: str, taken: Sequence[str]) -> str:
    """A component's name beside those before it: the function of a file, and a number from 2 up where a name comes again."""
    base = name.rpartition(":")[2] if is_user_function(name) else name
    if base not in taken:
        return base
    return next(f"{base}_{number}" for number in range(2, len(taken) + 3) if f"{base}_{number}" not in taken)
