"""The learning rate of each optimizer step: one formula for every backend. Pure Python.

With peak rate ``lr``, W warm-up steps and T steps in all, step s (counted from 0) runs at ``lr * lr_factor(s)``:

* warm-up, s < W: ``(s + 1) / W``; the first step already learns, the last of them runs at the peak;
* after it, with ``p = (s - W) / (T - W)`` capped at 1 and m = ``min_lr_ratio``: constant 1, linear ``1 - (1 - m) p``,
  cosine ``m + (1 - m) (1 + cos(pi p)) / 2`` (SGDR, arXiv 1608.03983, eq. 5, without restarts).

The peak is held for step W and m is reached after step T - 1, so that no step of the schedule is wasted on a rate of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlctl.errors import ConfigError


def lr_factor(step: int, optimizer: Mapping[str, Any]) -> float:
    """Share of the peak learning rate at optimizer step ``step``, counted from 0.

    Args:
        optimizer: the ``optim`` section as a dict, as ``rlctl_engine_init`` gets it; a key that is absent takes the
            default of :class:`rlctl.config.schema.OptimConfig`.

    Raises:
        ConfigError: a schedule that ends (linear, cosine) without ``total_training_steps``, or an unknown one.
    """
    assert step >= 0, step
    kind = optimizer.get("lr_scheduler_type", "constant")
    warmup = int(optimizer.get("lr_warmup_steps") or 0)
    floor = float(optimizer.get("min_lr_ratio") or 0.0)
    total = optimizer.get("total_training_steps")
    if kind not in ("constant", "linear", "cosine"):
        raise ConfigError(
            "unknown learning rate schedule", found=kind, wanted="constant, linear or cosine",
            next="set optim.lr_scheduler_type",
        )  # fmt: skip
    if kind != "constant" and total is None:
        raise ConfigError(
            f"the {kind} schedule needs its length",
            found="optim.total_training_steps is not set",
            wanted="the number of optimizer steps of the whole run",
            next="set optim.total_training_steps, or lr_scheduler_type: constant",
        )
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    assert total is not None
    progress = min(1.0, (step - warmup) / max(1, int(total) - warmup))
    if kind == "linear":
        return 1.0 - (1.0 - floor) * progress
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
