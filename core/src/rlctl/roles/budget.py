"""How many optimizer steps in a row may be skipped for a gradient that is not finite before the run stops."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.batch import PackedBatch
from rlctl.engine_records import StepOutput
from rlctl.errors import GuardError


@dataclass
class SkipBudget:
    """Counts skipped steps in a row.

    Args:
        limit: most that are borne (``guards.nonfinite_step_budget``).
        setting: the learning rate that helps, for the message.
    """

    limit: int
    setting: str = "actor.optim.lr"
    in_a_row: int = 0

    def note(self, step: StepOutput, batch: PackedBatch) -> None:
        """Count one optimizer step on ``batch``.

        Raises:
            NonFiniteStepsError: more than ``limit`` were skipped in a row.
        """
        self.in_a_row = self.in_a_row + 1 if step.skipped else 0
        if self.in_a_row > self.limit:
            raise NonFiniteStepsError(self.in_a_row, step.grad_norm, batch, self.setting)


class NonFiniteStepsError(GuardError):
    """Too many optimizer steps in a row had a non-finite gradient; ``batch`` is the last one, for a dump."""

    def __init__(self, count: int, grad_norm: float, batch: PackedBatch, setting: str) -> None:
        super().__init__(
            f"{count} optimizer {'step' if count == 1 else 'steps in a row'} had a gradient that is not finite",
            found=f"grad norm {grad_norm}",
            wanted="finite gradients; the weights are those before these steps",
            next=f"lower {setting}, or look at the dumped batch; guards.nonfinite_step_budget sets the limit",
        )
        self.batch = batch
