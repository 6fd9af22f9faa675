"""What the shaping of rewards and the KL in the reward ask of each other and of the rest. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlctl.algorithms.rewards.kl_control import ROWS_MAX

if TYPE_CHECKING:
    from rlctl.config.schema import RunConfig


def reward_faults(config: RunConfig) -> list[str]:
    """What is wrong, one line each."""
    return (
        []
        if config.trainer.type != "rl"
        else [
            *_shaping(config),
            *_kl(config),
            *_dynamic_sampling(config),
            *_unread(config),
        ]
    )


def _shaping(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    if reward.clip_min is not None and reward.clip_max is not None and reward.clip_min >= reward.clip_max:
        yield f"reward.clip_min {reward.clip_min:g} is not below reward.clip_max {reward.clip_max:g}"
    if reward.normalize == "none" and reward.normalize_by != "all":
        yield "reward.normalize_by says whose deviation, and reward.normalize is none: set it to running, or take it out"
    longest = config.data.max_response_length
    if reward.overlong_buffer is not None and reward.overlong_buffer.len > longest:
        yield (
            f"reward.overlong_buffer.len {reward.overlong_buffer.len} is more than data.max_response_length {longest}: "
            "every response would be punished; shorten it, or raise data.max_response_length"
        )


def _kl(config: RunConfig) -> Iterator[str]:
    algorithm, control = config.algorithm, config.algorithm.kl_ctrl
    plain = type(algorithm)()
    if not algorithm.use_kl_in_reward:
        for key in ("kl_penalty", "kl_ctrl"):
            if getattr(algorithm, key) != getattr(plain, key):
                yield (
                    f"algorithm.{key} is of the KL in the reward, and algorithm.use_kl_in_reward is false: set it, or take "
                    f"{key} out (the KL in the loss has actor.kl_loss_type and actor.kl_loss_coef)"
                )
        return
    if control.type == "fixed":
        for key in ("target_kl", "horizon"):
            if getattr(control, key) != getattr(plain.kl_ctrl, key):
                yield f"algorithm.kl_ctrl.{key} does nothing with algorithm.kl_ctrl.type fixed: set adaptive, or take it out"
    elif control.kl_coef == 0:
        yield "algorithm.kl_ctrl.kl_coef is 0, which no adaptive control can move: it multiplies; start above 0"
    elif (rows := config.data.train_batch_size * config.rollout.n) >= ROWS_MAX * control.horizon:
        yield (
            f"algorithm.kl_ctrl.horizon is {control.horizon}, and a batch has {rows} rows (data.train_batch_size x rollout.n), "
            f"{ROWS_MAX} times as many or more: one batch would take the whole coefficient away; raise the horizon (at "
            "10 times the rows a batch moves it by 2% at most)"
        )


def _dynamic_sampling(config: RunConfig) -> Iterator[str]:
    section = config.algorithm.filter_groups
    if section is None:
        if config.data.gen_batch_size is not None:
            yield "data.gen_batch_size is of algorithm.filter_groups, which is not set: set it, or take gen_batch_size out"
        return
    if config.rollout.n < 2:
        yield f"algorithm.filter_groups compares the samples of a prompt, and rollout.n is {config.rollout.n}: 2 or more"
    named = config.reward.component_names
    # What a function of one's own says beside its score is name/key; which keys, only a run shows.
    if section.metric not in ("reward", "score") and section.metric.partition("/")[0] not in named:
        yield (
            f"algorithm.filter_groups.metric is {section.metric}, and there are reward, score and the components "
            f"{', '.join(named)}"
        )


def _unread(config: RunConfig) -> Iterator[str]:
    """Shaped rewards that nothing learns from would do nothing."""
    keys = [f"reward.{key}" for key in config.reward.shapes]
    keys += ["algorithm.use_kl_in_reward"] if config.algorithm.use_kl_in_reward else []
    without_task = config.distillation is not None and not config.distillation.use_task_rewards
    keys += ["algorithm.filter_groups"] if without_task and config.algorithm.filter_groups is not None else []
    if not keys:
        return
    given, does = ", ".join(keys), "does" if len(keys) == 1 else "do"
    if without_task:
        yield f"{given} {does} nothing without distillation.use_task_rewards: set it, or take them out"
    elif config.algorithm.adv_estimator == "gdpo":
        yield (
            f"{given} {does} nothing with algorithm.adv_estimator gdpo, which scales each of reward.components by itself: take "
            "another estimator, or take them out"
        )
