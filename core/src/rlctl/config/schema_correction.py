"""The ``algorithm.rollout_correction`` section, and what it asks of the rest. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat

from rlctl.config.base import Strict

if TYPE_CHECKING:
    from rlctl.config.schema import RunConfig

Level = Literal["token", "sequence", "geometric"]
_SECTION = "algorithm.rollout_correction"


class RolloutCorrectionConfig(Strict):
    """What to do where the rollout's probability of a token is not the trainer's. Empty: measure it only."""

    rollout_is: Level | None = Field(
        default=None,
        description="Weigh each token's policy loss by trainer's over rollout's probability: of the token, of its row (the "
        "product), or the root of that (geometric).",
    )
    rollout_is_threshold: PositiveFloat = Field(default=2.0, description="A weight is at most this.")
    rollout_is_threshold_lower: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="With it a ratio outside [this, rollout_is_threshold] weighs 0 instead of being truncated (IcePop).",
    )
    rollout_rs: Level | None = Field(
        default=None, description="Do not train tokens, or rows, whose ratio of this level lies outside the interval."
    )
    rollout_rs_threshold: PositiveFloat | None = Field(default=None, description="Upper end of the interval.")
    rollout_rs_threshold_lower: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Lower end of the interval. Default: 1 / rollout_rs_threshold."
    )
    rollout_token_veto_threshold: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="Do not train a row that has a token of a ratio below this, such as 1e-4."
    )
    bypass_mode: bool = Field(
        default=False, description="Take the rollout's log-probs as old log-probs instead of recomputing them."
    )

    @property
    def rejects(self) -> bool:
        return self.rollout_rs is not None or self.rollout_token_veto_threshold is not None


def correction_faults(config: RunConfig) -> Iterator[str]:
    """What is wrong, one line each."""
    section = config.algorithm.rollout_correction
    if section is None:
        return
    if section.bypass_mode:
        given = ("rollout_is", "rollout_rs", "rollout_token_veto_threshold")
        for name in given:
            if getattr(section, name) is not None:
                yield (
                    f"{_SECTION}.{name} needs log-probs that are recomputed, and {_SECTION}.bypass_mode recomputes none: "
                    "take one of the two out"
                )
    if section.rollout_is is None:
        for name in ("rollout_is_threshold", "rollout_is_threshold_lower"):
            if getattr(section, name) != type(section).model_fields[name].default:
                yield f"{_SECTION}.{name} bounds weights, and there are none: set rollout_is, or take it out"
    elif not _has_policy_loss(config):
        yield (
            f"{_SECTION}.rollout_is weighs the policy loss, and distillation without use_task_rewards has none: take it out"
        )
    if section.rollout_rs is None:
        for name in ("rollout_rs_threshold", "rollout_rs_threshold_lower"):
            if getattr(section, name) is not None:
                yield f"{_SECTION}.{name} bounds what is trained, and nothing is rejected: set rollout_rs, or take it out"
    elif section.rollout_rs_threshold is None:
        yield f"{_SECTION}.rollout_rs needs {_SECTION}.rollout_rs_threshold, such as 2.0"
    for kind in ("is", "rs"):
        upper = getattr(section, f"rollout_{kind}_threshold")
        lower = getattr(section, f"rollout_{kind}_threshold_lower")
        if upper is not None and not (1 / upper if lower is None and kind == "rs" else lower or 0) <= upper:
            floor = f"rollout_{kind}_threshold_lower {1 / upper if lower is None else lower:g}"
            yield f"{_SECTION}.rollout_{kind}_threshold {upper:g} is below {floor}: nothing lies between them"


def _has_policy_loss(config: RunConfig) -> bool:
    return config.distillation is None or config.distillation.uses_policy_loss
