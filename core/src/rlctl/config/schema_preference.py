"""The ``dpo`` and ``rm`` sections: what is learned from pairs of a chosen and a rejected response. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rlctl.config.base import Strict

if TYPE_CHECKING:
    from rlctl.config.schema import RunConfig


class DPOConfig(Strict):
    """Learning from pairs without a reward model (trainer.type dpo). The reference is ref, the model before the run."""

    loss_type: Literal["sigmoid", "ipo", "hinge", "simpo"] = Field(
        default="sigmoid", description="sigmoid is DPO; simpo has no reference and takes means over tokens."
    )
    beta: float = Field(
        default=0.1,
        ge=1e-6,
        description="Reward of a nat of log-ratio; the papers have 0.1 for sigmoid and 2 to 10 for simpo.",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Share of pairs taken to be the wrong way round (sigmoid, simpo)."
    )
    simpo_gamma: float = Field(default=0.5, ge=0, description="By how much a chosen response should win (simpo).")
    reference_free: bool = Field(default=False, description="Take the reference's log-probs as 0.")
    average_log_probs: bool = Field(
        default=False, description="Mean over a response's tokens instead of their sum; simpo always has it."
    )
    nll_coef: float = Field(
        default=0.0, ge=0, description="Weight of the chosen response's mean negative log-prob a token (RPO)."
    )

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free and self.loss_type != "simpo"


class RMConfig(Strict):
    """Training a reward model (trainer.type rm): actor is a value model, and the score of a row is that of its last token."""

    center_rewards_coefficient: float = Field(
        default=0.0, ge=0, description="Weight of (r(chosen) + r(rejected))^2, which keeps scores around 0."
    )


def extra_tokens(config: RunConfig) -> int:
    """Tokens that the trainer adds to a row: a reward model is read at one behind the last."""
    return int(config.trainer.type == "rm")


def dpo_has_reference(section: object) -> bool:
    """:attr:`DPOConfig.needs_reference` of a section that may not be well-formed."""
    values = section if isinstance(section, dict) else {}
    return values.get("reference_free") is not True and values.get("loss_type") != "simpo"


def preference_faults(config: RunConfig) -> list[str]:
    """What is wrong with the two sections, one line each."""
    kind, dpo = config.trainer.type, config.dpo
    faults = []
    for name, section in (("dpo", dpo), ("rm", config.rm)):
        if name != kind and section != type(section)():
            faults.append(
                f"{name} has nothing to do with trainer.type {kind}: take it out, or set trainer.type to {name}"
            )
    if kind == "dpo":
        if dpo.label_smoothing and dpo.loss_type not in ("sigmoid", "simpo"):
            faults.append(
                f"dpo.label_smoothing is for sigmoid and simpo, and dpo.loss_type is {dpo.loss_type}: take it out"
            )
        for key, why in (("average_log_probs", "always takes means"), ("reference_free", "has no reference")):
            if getattr(dpo, key) and dpo.loss_type == "simpo":
                faults.append(f"dpo.{key} does nothing with dpo.loss_type simpo, which {why}: take it out")
        if dpo.simpo_gamma != DPOConfig().simpo_gamma and dpo.loss_type != "simpo":
            faults.append(f"dpo.simpo_gamma is for simpo, and dpo.loss_type is {dpo.loss_type}: take it out")
    return faults
