"""What has nothing to do in a trainer that samples nothing. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlctl.config.schema import RunConfig

TRAINER_WORDS = {"sft": "SFT", "dpo": "DPO", "rm": "the training of a reward model"}
_KEYS = {
    "algorithm": (
        "filter_groups",
        "use_kl_in_reward",
        "kl_penalty",
        "kl_ctrl",
        "rollout_correction",
        "mask_truncated_completions",
    ),
    "actor": ("entropy_coeff", "entropy_ctrl", "use_kl_loss"),
    "data": ("gen_batch_size",),
}
"""Switched on by hand, in a section that SFT has in common with RL or does not read. What merely says how (the estimator, the
components of the reward) stays: one file serves both trainers."""


def supervised_faults(config: RunConfig) -> list[str]:
    """What is wrong, one line each."""
    kind = config.trainer.type
    if kind == "rl":
        return []
    given = [
        f"{name}.{key}"
        for name, keys in _KEYS.items()
        for key in keys
        if getattr(getattr(config, name), key)
        != type(getattr(config, name)).model_fields[key].get_default(call_default_factory=True)
    ]
    given += [f"reward.{key}" for key in config.reward.shapes]
    given += ["rollout.environment"] * (config.rollout.environment is not None)
    return [
        f"{path} has nothing to do in {TRAINER_WORDS[kind]}: take it out, or set trainer.type to rl" for path in given
    ]
