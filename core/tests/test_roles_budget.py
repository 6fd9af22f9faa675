"""Steps that are not finite: in a row, and all of a run."""

from __future__ import annotations

import math

import pytest

from rlctl.batch import PackedBatch, pack
from rlctl.engine_records import StepOutput
from rlctl.roles.budget import NonFiniteStepsError, SkipBudget

GOOD = (StepOutput(1.0, 1e-3, False), 0.5)
SKIPPED = (StepOutput(math.inf, 1e-3, True), 0.5)
NO_LOSS = (StepOutput(1.0, 1e-3, False), math.nan)


def batch() -> PackedBatch:
    return pack({"input_ids": [[1, 2]]})


@pytest.mark.parametrize("bad", [SKIPPED, NO_LOSS])
def test_a_loss_counts_as_a_gradient_does(bad: tuple[StepOutput, float]) -> None:
    budget = SkipBudget(2, "critic.optim.lr")
    for step, loss in (bad, bad, GOOD, bad, bad):
        budget.note(step, batch(), loss)
    budget.require_finite()
    with pytest.raises(NonFiniteStepsError, match="3 optimizer steps in a row had a loss or a gradient") as caught:
        budget.note(bad[0], batch(), bad[1])
    assert caught.value.found == f"loss {bad[1]:g}, grad norm {bad[0].grad_norm:g}"
    assert str(caught.value.next).startswith("lower critic.optim.lr")


def test_a_run_in_which_no_step_was_finite_is_told_from_one_without_steps() -> None:
    budget = SkipBudget(3)
    budget.require_finite()
    last = batch()
    budget.note(SKIPPED[0], batch(), SKIPPED[1])
    budget.note(NO_LOSS[0], last, NO_LOSS[1])
    with pytest.raises(NonFiniteStepsError, match="every one of 2 optimizer steps had") as caught:
        budget.require_finite()
    assert caught.value.batch is last
    # A resumed run counts its own steps alone.
    resumed = SkipBudget(3, in_a_row=2)
    resumed.note(SKIPPED[0], batch(), SKIPPED[1])
    with pytest.raises(NonFiniteStepsError, match="every one of 1 optimizer step had"):
        resumed.require_finite()
