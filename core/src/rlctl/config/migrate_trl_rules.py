"""What becomes of TRL's keys, whose configurations are flat; see :mod:`rlctl.config.migrate_rules`. Facts about names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.config.migrate_kinds import Left, Outcome, Rule, as_list, left, needless, on, to, unless, words

_OF_DPO = (
    "rpo_alpha",
    "label_smoothing",
    "reference_free",
    "precompute_ref_log_probs",
    "f_divergence_type",
    "simpo_gamma",
)
_DPO_LOSSES = ("sigmoid", "ipo", "hinge", "simpo")

_GRPO_LOSS = words(
    "actor.loss_agg_mode",
    {
        "grpo": "seq-mean-token-mean",
        "dapo": "token-mean",
        "bnpo": "token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
    },
    "set actor.loss_agg_mode",
)


def _is_dpo(leaves: Mapping[str, Any]) -> bool:
    """True for a DPOConfig: it has keys or a loss that no other trainer has."""
    loss = leaves.get("loss_type")
    kinds = loss if isinstance(loss, list) else [loss]
    return any(key in leaves for key in _OF_DPO) or any(kind in _DPO_LOSSES for kind in kinds)


def _of_dpo(path: str) -> Rule:
    def rule(value: Any, _: Mapping[str, Any]) -> Outcome:
        if value is None:
            return Left("not set there", needless=True)
        return {path: value, "trainer.type": "dpo"}

    return rule


def _loss_type(value: Any, leaves: Mapping[str, Any]) -> Outcome:
    kind = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not _is_dpo(leaves):
        return _GRPO_LOSS(value, leaves)
    if kind not in _DPO_LOSSES:
        return Left(f"set dpo.loss_type: one of {', '.join(_DPO_LOSSES)}")
    out: dict[str, Any] = {"dpo.loss_type": kind, "trainer.type": "dpo"}
    # There, IPO's log-probs are means over tokens.
    return out | ({"dpo.average_log_probs": True} if kind == "ipo" else {})


def _beta(value: Any, leaves: Mapping[str, Any]) -> Outcome:
    if _is_dpo(leaves):
        return {"dpo.beta": value, "trainer.type": "dpo"}
    if not value:
        return {"actor.use_kl_loss": False}
    return {"actor.use_kl_loss": True, "actor.kl_loss_coef": value}


def _prompts_a_step(value: Any, leaves: Mapping[str, Any]) -> Outcome:
    """TRL counts completions on one device; rlctl counts prompts of a step over all devices. Pairs of DPO are two rows."""
    group, steps = leaves.get("num_generations", 8), leaves.get("gradient_accumulation_steps", 1)
    if _is_dpo(leaves):
        whole = isinstance(value, int) and isinstance(steps, int)
        pairs: dict[str, Any] = {"data.train_batch_size": value * steps, "actor.micro_batch_size_per_device": 2 * value}
        return pairs if whole else Left("set data.train_batch_size: pairs of an optimizer step")
    out: dict[str, Any] = {"actor.micro_batch_size_per_device": value}
    whole = isinstance(value, int) and isinstance(steps, int) and isinstance(group, int) and group > 0
    if whole and value * steps % group == 0 and value * steps >= group:
        out["data.train_batch_size"] = value * steps // group
    return out


def _of_ppo(path: str) -> Rule:
    """A setting that only a trainer with a critic has there: it says which estimator the run has."""

    def rule(value: Any, _: Mapping[str, Any]) -> Outcome:
        if value is None:
            return Left("not set there", needless=True)
        return {path: value, "algorithm.adv_estimator": "gae"}

    return rule


RULES: dict[str, Rule] = {
    "temperature": to("rollout.temperature"),
    "top_p": to("rollout.top_p"),
    "top_k": unless(-1, "rollout.top_k", 0),
    "seed": to("trainer.seed"),
    "beta": _beta,
    "epsilon": to("actor.policy_loss.clip_ratio_low", "actor.policy_loss.clip_ratio_high"),
    "loss_type": _loss_type,
    "scale_rewards": words(
        "algorithm.norm_adv_by_std_in_grpo",
        {True: True, False: False, "group": True, "none": False},
        "advantages are scaled by the group's deviation or not at all",
    ),
    "lr_scheduler_type": to("actor.optim.lr_scheduler_type"),
    "weight_decay": to("actor.optim.weight_decay"),
    "gradient_checkpointing": to("actor.engine.activation_checkpointing"),
    "per_device_train_batch_size": _prompts_a_step,
    "gradient_accumulation_steps": needless("worked out from data.train_batch_size and the micro-batch bound"),
    "dataset_name": lambda value, leaves: {
        "data.train_files": [f"hf:{value}:{leaves.get('dataset_train_split', 'train')}"]
    },
    "dataset_train_split": needless("part of data.train_files"),
    "report_to": as_list("trainer.logger"),
    "reward_funcs": left("set reward.components: a registered name or path/to/file.py:function"),
    "output_dir": left("give the directory on the command line: --run-dir"),
    "logging_steps": needless("every step is logged"),
    "bf16": left("set model.dtype (master weights) and actor.engine.param_dtype (computation)"),
    "use_vllm": lambda _, leaves: (
        {"rollout.backend": "vllm"} if on("use_vllm", leaves) else Left("hf is the default", needless=True)
    ),
    # ---- of PPO, which has a critic
    "gamma": _of_ppo("algorithm.gamma"),
    "lam": _of_ppo("algorithm.lam"),
    "cliprange": to("actor.policy_loss.clip_ratio_low", "actor.policy_loss.clip_ratio_high"),
    "cliprange_value": _of_ppo("critic.value_clip"),
    "vf_coef": left("the critic has a loss and an optimizer of its own: set critic.optim.lr"),
    "num_ppo_epochs": to("actor.ppo_epochs"),
    "num_mini_batches": left("set actor.ppo_mini_batch_size: prompts of one optimizer step"),
    # ---- of DPO and reward models
    "label_smoothing": _of_dpo("dpo.label_smoothing"),
    "rpo_alpha": _of_dpo("dpo.nll_coef"),
    "reference_free": _of_dpo("dpo.reference_free"),
    "simpo_gamma": _of_dpo("dpo.simpo_gamma"),
    "precompute_ref_log_probs": needless("the reference is asked once for each batch"),
    "center_rewards_coefficient": lambda value, _: (
        Left("not set there", needless=True)
        if value is None
        else {"rm.center_rewards_coefficient": value, "trainer.type": "rm"}
    ),
}
