"""What the control of the entropy asks of its own keys and of ``actor.entropy_coeff``. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlctl.config.schema import RunConfig


def entropy_faults(config: RunConfig) -> list[str]:
    """What is wrong, one line each."""
    return list(_faults(config)) if config.trainer.type == "rl" else []


def _faults(config: RunConfig) -> Iterator[str]:
    control, start = config.actor.entropy_ctrl, config.actor.entropy_coeff
    if control.type == "fixed":
        plain = type(control)()
        for key in ("target_entropy", "step", "max_coeff"):
            if getattr(control, key) != getattr(plain, key):
                yield (
                    f"actor.entropy_ctrl.{key} does nothing with actor.entropy_ctrl.type fixed: set additive or sac, or take "
                    f"{key} out"
                )
        return
    if control.target_entropy is None:
        yield f"actor.entropy_ctrl.type is {control.type}, and no actor.entropy_ctrl.target_entropy says towards what"
    if not 0 <= start <= control.max_coeff:
        yield (
            f"actor.entropy_coeff {start:g}, where the control starts, is not between 0 and actor.entropy_ctrl.max_coeff "
            f"{control.max_coeff:g}"
        )
    elif control.type == "sac" and start == 0:
        yield "actor.entropy_coeff is 0, which actor.entropy_ctrl.type sac cannot move: it multiplies; start above 0"
