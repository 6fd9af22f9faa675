"""How many optimizer steps in a row may have a loss or a gradient that is not finite before the run stops."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlctl.batch import PackedBatch
from rlctl.engine_records import StepOutput
from rlctl.errors import GuardError


@dataclass
class SkipBudget:
    """Counts non-finite steps in a row.

    Args:
        limit: most that are borne (``guards.nonfinite_step_budget``).
        setting: the learning rate that helps, for the message.
        finite: steps of this process that were finite.
    """

    limit: int
    setting: str = "actor.optim.lr"
    in_a_row: int = 0
    finite: int = 0
    _bad: int = 0
    _last: tuple[float, float, PackedBatch] | None = None

    def note(self, step: StepOutput, batch: PackedBatch, loss: float) -> None:
        """Count one optimizer step on ``batch``, whose mean loss was ``loss``.

        Raises:
            NonFiniteStepsError: more than ``limit`` in a row were not finite.
        """
        if not step.skipped and math.isfinite(loss):
            self.in_a_row = 0
            self.finite += 1
            self._last = None
            return
        self.in_a_row += 1
        self._bad += 1
        if self.in_a_row > self.limit:
            raise NonFiniteStepsError(self.in_a_row, loss, step.grad_norm, batch, self.setting)
        if not self.finite:
            self._last = (loss, step.grad_norm, batch)

    def require_finite(self) -> None:
        """A run must not end as a success that has learned nothing.

        Raises:
            NonFiniteStepsError: there were steps, and not one of them was finite.
        """
        if self._last is not None:
            raise NonFiniteStepsError(self._bad, *self._last, self.setting, every=True)


class NonFiniteStepsError(GuardError):
    """Too many optimizer steps had a loss or a gradient that is not finite; ``batch`` is the last one, for a dump."""

    def __init__(
        self, count: int, loss: float, grad_norm: float, batch: PackedBatch, setting: str, *, every: bool = False
    ) -> None:
        steps = "step" if count == 1 else "steps" if every else "steps in a row"
        super().__init__(
            f"{'every one of ' if every else ''}{count} optimizer {steps} had a loss or a gradient that is not finite",
            found=f"loss {loss:g}, grad norm {grad_norm:g}",
            wanted="finite ones; a step whose gradient is not finite leaves the weights as they were",
            next=f"lower {setting}, or look at the dumped batch"
            + ("" if every else "; guards.nonfinite_step_budget sets the limit"),
        )
        self.batch = batch
