"""What sampling one step ahead (``trainer.max_staleness``) asks of the rest, and brings with it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlctl.algorithms.table import ADVANTAGES
from rlctl.config.document import Document, Origin

if TYPE_CHECKING:
    from rlctl.config.schema import RunConfig

GREEDY = "greedy_scores"
"""The input of an advantage estimator for which the rollout must sample within the step."""
_CORRECTION = ("algorithm", "rollout_correction")


def add_correction(document: Document) -> None:
    """The ratio of rows of an older policy is to that policy, and clipped so, unless it is said what else to do with them."""
    stale = document.get(("trainer", "max_staleness"))
    distillation = document.get(("distillation",))
    learns = not isinstance(distillation, dict)
    if isinstance(distillation, dict):  # what else has a policy loss, whose terms can be weighed
        learns = distillation.get("use_task_rewards") is True or distillation.get("loss_mode") == "k1"
    if stale and document.get(("trainer", "type"), "rl") == "rl" and document.get(_CORRECTION) is None and learns:
        document.set(_CORRECTION, {"bypass_mode": True}, Origin("derived", f"as trainer.max_staleness is {stale}"))


def staleness_faults(config: RunConfig) -> Iterator[str]:
    """What is wrong, one line each."""
    stale = f"trainer.max_staleness {config.trainer.max_staleness}"
    if not config.trainer.max_staleness:
        return
    if config.trainer.type != "rl":
        yield f"{stale} is of rollouts, and trainer.type {config.trainer.type} has none: take it out"
        return
    shared = [role for role, pool in config.roles_used().items() if role != "rollout" and pool == config.rollout.pool]
    if shared:
        yield (
            f"{stale} samples while the update goes on, and the rollout shares the processes of pool {config.rollout.pool} with "
            f"{', '.join(shared)}: set rollout.pool=gen runtime.pools={{gen: {{nproc: 1}}}}"
        )
    if config.rollout.free_cache_engine:
        yield f"{stale} leaves the rollout no time to rest: take rollout.free_cache_engine out"
    estimator = ADVANTAGES.get(config.algorithm.adv_estimator)
    if estimator is not None and GREEDY in estimator.needs:
        yield (
            f"{stale} keeps the rollout at work on the next batch, and {estimator.name} needs a greedy completion of this one: "
            "take another algorithm.adv_estimator, or max_staleness out"
        )
