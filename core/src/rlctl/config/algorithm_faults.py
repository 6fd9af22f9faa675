"""What the ``algorithm`` and ``actor.policy_loss`` sections ask of each other and of the rest. Imports no torch.

Only rlctl's own names are judged here; what a plugin's or a user's function takes is seen where it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rlctl.algorithms.table import ADVANTAGES, POLICY_LOSSES
from rlctl.records import AlgorithmSpec

if TYPE_CHECKING:
    from rlctl.config.base import Strict
    from rlctl.config.schema import RunConfig


def algorithm_faults(config: RunConfig) -> list[str]:
    """What is wrong, one line each."""
    if config.trainer.type != "rl":
        return []
    faults: list[str] = []
    advantage = ADVANTAGES.get(config.algorithm.adv_estimator)
    loss = POLICY_LOSSES.get(config.actor.policy_loss.loss_mode)
    if advantage is not None:
        task = config.distillation is None or config.distillation.use_task_rewards
        if task and advantage.groups and config.rollout.n < 2:
            faults.append(
                f"rollout.n is {config.rollout.n}: {advantage.name} compares the samples of one prompt and needs at least 2"
            )
        faults += _unread("algorithm", config.algorithm, advantage, ADVANTAGES)
    if loss is not None:
        faults += _unread("actor.policy_loss", config.actor.policy_loss, loss, POLICY_LOSSES)
    if advantage is not None and advantage.per_token and loss is not None and loss.name == "geo_mean":
        faults.append(
            f"geo_mean has one advantage a row, and those of {advantage.name} differ from token to token: take gspo or vanilla"
        )
    return [*faults, *_with_teacher(config, advantage, loss)]


def _with_teacher(config: RunConfig, advantage: AlgorithmSpec | None, loss: AlgorithmSpec | None) -> Iterator[str]:
    distillation = config.distillation
    if distillation is None:
        return
    mode = f"distillation.loss_mode {distillation.loss_mode}"
    if not distillation.use_task_rewards and config.algorithm.adv_estimator != "grpo":
        yield (
            f"algorithm.adv_estimator is {config.algorithm.adv_estimator}, and without distillation.use_task_rewards nothing "
            "learns from its advantages: set use_task_rewards, or take it out"
        )
    if not distillation.uses_policy_loss and config.actor.policy_loss.loss_mode != "vanilla":
        yield (
            f"actor.policy_loss.loss_mode is {config.actor.policy_loss.loss_mode}, and {mode} has no policy loss without "
            "distillation.use_task_rewards: set it, or take the loss out"
        )
    elif distillation.loss_mode == "k1" and loss is not None and (loss.prepare or loss.name == "geo_mean"):
        yield f"{mode} is a reward at each token, which {loss.name} cannot take: set actor.policy_loss.loss_mode=vanilla"


def _unread(section: str, values: Strict, chosen: AlgorithmSpec, table: Mapping[str, AlgorithmSpec]) -> Iterator[str]:
    """Settings of other formulas that were changed: they would do nothing."""
    fields = type(values).model_fields
    for name in dict.fromkeys(key for spec in table.values() for key in spec.settings):
        if name in chosen.settings or getattr(values, name) == fields[name].default:
            continue
        readers = [spec.name for spec in table.values() if name in spec.settings]
        yield (
            f"{section}.{name} is {getattr(values, name)}, and {chosen.name} does not read it ({', '.join(readers)} "
            f"{'does' if len(readers) == 1 else 'do'}): take it out"
        )
    for name in ("adv_args", "args"):
        if getattr(values, name, None):
            yield f"{section}.{name} is for a function of your own, and {chosen.name} takes none: take it out"


def algorithm_words(config: RunConfig) -> str:
    """``grpo``, ``rloo + gspo``: what a run is called after. Of functions of one's own the name alone."""
    names = [config.algorithm.adv_estimator, config.actor.policy_loss.loss_mode]
    shown = [name.rpartition(":")[2] for name in names]
    return shown[0] if names[1] == "vanilla" else " + ".join(shown)
