"""What becomes of verl's and TRL's keys about rewards, the KL in them, dynamic sampling and the entropy. Facts about names.

See :mod:`rlctl.config.migrate_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.config.migrate_kinds import Left, Outcome, Rule, left, needless, off_is_needless, on

_OVERLONG = ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")
_KL = "algorithm.use_kl_in_reward"
_FILTER = "algorithm.filter_groups.enable"


def _of_kl(path: str, *, adaptive: bool = False) -> Rule:
    """A setting of the KL in the reward, which counts only where that is on (and its control is adaptive)."""

    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        if not on(_KL, leaves):
            return Left("counts only with the KL in the reward", needless=True)
        if adaptive and leaves.get("algorithm.kl_ctrl.type") != "adaptive":
            return Left("counts only with an adaptive coefficient", needless=True)
        return {path: value} if value is not None else Left("not set there", needless=True)

    return rule


def _overlong(section: str, key: str) -> Rule:
    """A setting of the overlong buffer, which counts only where that is on."""

    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        if not on(f"{section}.enable", leaves):
            return Left("the overlong buffer is off there", needless=True)
        return {f"reward.overlong_buffer.{key}": value}

    return rule


def _switch(section: str) -> Rule:
    def rule(_: Any, leaves: Mapping[str, Any]) -> Outcome:
        if on(f"{section}.enable", leaves) and leaves.get(f"{section}.len") is None:
            return Left("set reward.overlong_buffer.len: tokens before data.max_response_length")
        return Left("reward.overlong_buffer is what switches it on", needless=True)

    return rule


def _ppo_kl(value: Any, _: Mapping[str, Any]) -> Outcome:
    """TRL's PPO takes the KL from the reward."""
    if not value:
        return Left("no KL in the reward is the default", needless=True)
    return {_KL: True, "algorithm.kl_ctrl.kl_coef": value}


_METRICS = {"acc": "score", "score": "score", "seq_reward": "reward", "seq_final_reward": "reward"}


def _filter_on(_: Any, leaves: Mapping[str, Any]) -> Outcome:
    if not on(_FILTER, leaves):
        return Left("off by default", needless=True)
    metric = leaves.get("algorithm.filter_groups.metric")
    return {"algorithm.filter_groups.metric": _METRICS.get(metric if isinstance(metric, str) else "", "reward")}


def _filter(key: str) -> Rule:
    """A setting of dynamic sampling, which counts only where that is on."""

    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        if not on(_FILTER, leaves):
            return Left("dynamic sampling is off there", needless=True)
        if key == "metric":
            if isinstance(value, str) and value in _METRICS:
                return {"algorithm.filter_groups.metric": _METRICS[value]}
            return Left("set algorithm.filter_groups.metric: reward, score or the name of one of reward.components")
        if value == 0:
            return Left("no bound there; set algorithm.filter_groups.max_num_gen_batches, or take the default of 10")
        return {"algorithm.filter_groups.max_num_gen_batches": value}

    return rule


def _gen_batch(value: Any, leaves: Mapping[str, Any]) -> Outcome:
    if not on(_FILTER, leaves) or value in (None, leaves.get("data.train_batch_size")):
        return Left("a generation batch is data.train_batch_size", needless=True)
    return {"data.gen_batch_size": value}


def _of_entropy(key: str) -> Rule:
    """A setting of the adaptive entropy control of Skywork-OR1's verl, which counts only where that is on."""

    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        if not on("actor.adaptive_entropy.enabled", leaves):
            return Left("the entropy's control is off there", needless=True)
        return {f"actor.entropy_ctrl.{key}": value if key != "type" else "additive"}

    return rule


RULES: dict[str, Rule] = {
    # ---- verl
    "actor.adaptive_entropy.enabled": _of_entropy("type"),
    "actor.adaptive_entropy.target_entropy": _of_entropy("target_entropy"),
    "actor.adaptive_entropy.max_ent_coef": _of_entropy("max_coeff"),
    "actor.adaptive_entropy.delta_ent_coef": _of_entropy("step"),
    "actor.adaptive_entropy.min_ent_coef": off_is_needless("the weight is at least 0", "the weight is at least 0"),
    _FILTER: _filter_on,
    "algorithm.filter_groups.metric": _filter("metric"),
    "algorithm.filter_groups.max_num_gen_batches": _filter("max_num_gen_batches"),
    "data.gen_batch_size": _gen_batch,
    _KL: lambda _, leaves: {_KL: True} if on(_KL, leaves) else Left("off by default", needless=True),
    "algorithm.kl_penalty": _of_kl("algorithm.kl_penalty"),
    "algorithm.kl_ctrl.type": _of_kl("algorithm.kl_ctrl.type"),
    "algorithm.kl_ctrl.kl_coef": _of_kl("algorithm.kl_ctrl.kl_coef"),
    "algorithm.kl_ctrl.target_kl": _of_kl("algorithm.kl_ctrl.target_kl", adaptive=True),
    "algorithm.kl_ctrl.horizon": _of_kl("algorithm.kl_ctrl.horizon", adaptive=True),
    **{f"{section}.enable": _switch(section) for section in _OVERLONG},
    **{f"{section}.{key}": _overlong(section, key) for section in _OVERLONG for key in ("len", "penalty_factor")},
    **{f"{section}.log": needless("reward/overlong_penalty is always reported") for section in _OVERLONG},
    "reward_model.enable": off_is_needless(
        "no reward model", "reward models are not built yet; functions are: reward.components"
    ),
    "reward_model.reward_manager": needless("rewards are the sum of reward.components"),
    "reward_model.reward_kwargs.max_resp_len": needless("data.max_response_length is what counts"),
    # ---- TRL
    "kl_coef": _ppo_kl,
    "kl_estimator": lambda value, leaves: (
        {"algorithm.kl_penalty": value}
        if leaves.get("kl_coef")
        else Left("there is no KL in the reward", needless=True)
    ),
    "reward_weights": left("set the weight of each of reward.components"),
}
