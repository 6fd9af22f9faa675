"""Gradients: the same under any split into micro-batches and calls, and the ones that the loss has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from rlctl.batch import PackedBatch, padding_like
from rlctl.engine import StepOutput
from rlctl.logits import LossFn, LossOutput
from rlctl.microbatch import MicroBatchPlan
from rlctl.testing.backend import BackendConformance, Build, Weights, clone_weights, same_weights
from rlctl.testing.train_batches import (
    LENGTHS,
    LONGEST,
    LOSSES,
    PROBE_OPTIM,
    apart,
    cross_entropy,
    first_gradient,
    largest,
    rows,
    total_loss,
    untied,
)

PLANS = {
    "one batch": MicroBatchPlan(max_rows=len(LENGTHS)),
    "one row": MicroBatchPlan(max_rows=1),
    "four rows": MicroBatchPlan(max_rows=4),
    "tightest token budget": MicroBatchPlan(max_tokens=LONGEST),
    "wider token budget": MicroBatchPlan(max_tokens=2 * LONGEST),
}


class _FailsHereError(Exception):
    """Raised by a loss of these tests."""


class GradientConformance(BackendConformance):
    """See the attributes of :class:`rlctl.testing.train.TrainConformance`."""

    gradient_tolerance: ClassVar[float] = 1e-5

    def _one_step(
        self, build: Build, calls: Sequence[Sequence[PackedBatch]], loss: LossFn = cross_entropy
    ) -> tuple[Weights, StepOutput]:
        """(gradient, step) of a fresh engine after these calls of forward_backward and one step."""
        engine = build(optim=PROBE_OPTIM)
        before = clone_weights(engine)
        for micro_batches in calls:
            engine.set_mode(True)
            engine.forward_backward(micro_batches, loss, forward_only=False)
        step = engine.optimizer_step()
        return first_gradient(before, clone_weights(engine)), step

    def _assert_same(self, found: tuple[Weights, StepOutput], wanted: tuple[Weights, StepOutput]) -> None:
        scale = largest(wanted[0])
        assert scale > 1e-4, "the reference gradient is (nearly) zero: this model cannot show anything"
        # 2e-7: what a float32 weight of size 1 can resolve of a step.
        assert apart(found[0], wanted[0]) <= self.gradient_tolerance * scale + 2e-7
        assert found[1].grad_norm == pytest.approx(wanted[1].grad_norm, rel=self.gradient_tolerance)

    @pytest.mark.parametrize("plan", [p for p in PLANS if p != "one batch"])
    def test_update_does_not_depend_on_micro_batches(self, build: Build, plan: str) -> None:
        """Fixed rows, a token budget or one batch: the same loss, gradient and norm."""
        results = []
        for name in ("one batch", plan):
            engine = build(optim=PROBE_OPTIM)
            before = clone_weights(engine)
            out = engine.train_batch(rows(self.vocab_size), cross_entropy, PLANS[name])
            results.append((first_gradient(before, clone_weights(engine)), out.step, out.loss, out.num_micro_batches))
        assert results[0][3] == 1
        assert results[1][3] > 1
        assert results[1][2] == pytest.approx(results[0][2], rel=self.gradient_tolerance)
        self._assert_same(results[1][:2], results[0][:2])

    def test_padding_changes_nothing(self, build: Build) -> None:
        """Zero-weight micro-batches run and count for nothing, wherever they stand."""
        batch = rows(self.vocab_size)
        engine = build(optim=PROBE_OPTIM)
        engine.set_mode(True)
        pad = padding_like(batch)
        outputs = engine.forward_backward([pad, batch, pad], cross_entropy, forward_only=False)
        assert len(outputs) == 3
        assert [out.loss for out in outputs][::2] == [0.0, 0.0]
        self._assert_same(self._one_step(build, [[pad, batch, pad]]), self._one_step(build, [[batch]]))

    def test_padding_alone_has_a_zero_gradient(self, build: Build) -> None:
        """A rank without rows runs backward too: its gradient is there, and zero."""
        engine = build(optim=PROBE_OPTIM)
        before = clone_weights(engine)
        engine.set_mode(True)
        outputs = engine.forward_backward([padding_like(rows(self.vocab_size))], cross_entropy, forward_only=False)
        step = engine.optimizer_step()
        assert len(outputs) == 1
        assert (step.grad_norm, step.skipped) == (0.0, False)
        assert same_weights(before, clone_weights(engine))

    def test_calls_add_up_before_a_step(self, build: Build) -> None:
        """Several calls of forward_backward before one step are one larger call."""
        parts = list(rows(self.vocab_size).chunks(2))
        together = self._one_step(build, [parts])
        self._assert_same(self._one_step(build, [[part] for part in parts]), together)

    def test_a_failed_call_leaves_nothing_behind(self, build: Build) -> None:
        """A loss that raises when it is called the second time: the next call's gradients are its own."""
        batch = rows(self.vocab_size)
        half = batch.num_rows // 2
        parts = [batch.select(range(half)), batch.select(range(half, batch.num_rows))]
        seen: list[int] = []

        def fails(reader: Any, micro_batch: PackedBatch) -> LossOutput:
            seen.append(micro_batch.num_rows)
            if len(seen) == 2:
                raise _FailsHereError
            return cross_entropy(reader, micro_batch)

        engine = build(optim=PROBE_OPTIM)
        before = clone_weights(engine)
        engine.set_mode(True)
        with pytest.raises(_FailsHereError):
            engine.forward_backward(parts, fails, forward_only=False)
        # An engine that runs rows of one length together asks for more than one loss a micro-batch.
        assert len(seen) == 2
        engine.forward_backward([batch], cross_entropy, forward_only=False)
        step = engine.optimizer_step()
        self._assert_same((first_gradient(before, clone_weights(engine)), step), self._one_step(build, [[batch]]))

    def test_item_weights_are_taken_as_they_are(self, build: Build) -> None:
        """Weights that a caller gives, in no way normalised, scale the gradient."""
        batch = rows(self.vocab_size)
        tripled = batch.with_items(item_weight=batch.items["item_weight"] * 3)
        gradient, step = self._one_step(build, [[batch]])
        wanted = {name: 3 * g for name, g in gradient.items()}
        self._assert_same(
            self._one_step(build, [[tripled]]), (wanted, StepOutput(3 * step.grad_norm, step.lr, step.skipped))
        )

    def test_step_clears_gradients(self, build: Build) -> None:
        """After a step nothing of its gradients is left for the next."""
        batch = rows(self.vocab_size)
        engine = build(optim=PROBE_OPTIM)
        engine.set_mode(True)
        engine.forward_backward([batch], cross_entropy, forward_only=False)
        assert engine.optimizer_step().grad_norm > 0
        engine.forward_backward([padding_like(batch)], cross_entropy, forward_only=False)
        assert engine.optimizer_step().grad_norm == 0.0

    def test_forward_only_leaves_weights_and_gradients_alone(self, build: Build) -> None:
        """Scoring between forward_backward and the step changes neither weights nor pending gradients."""
        batch, other = rows(self.vocab_size), rows(self.vocab_size, seed=7)
        engine = build(optim=PROBE_OPTIM)
        before = clone_weights(engine)
        engine.set_mode(True)
        trained = engine.forward_backward([batch], cross_entropy, forward_only=False)
        engine.forward_backward([other], cross_entropy, forward_only=True)
        scored = engine.forward_backward([batch], cross_entropy, forward_only=True)
        assert total_loss(scored) == pytest.approx(total_loss(trained), rel=self.gradient_tolerance)
        assert same_weights(before, clone_weights(engine))
        step = engine.optimizer_step()
        found = (first_gradient(before, clone_weights(engine)), step)
        self._assert_same(found, self._one_step(build, [[batch]]))

    @pytest.mark.parametrize("loss", list(LOSSES))
    def test_update_follows_the_gradient(self, build: Build, loss: str) -> None:
        """A small step lowers the loss by what its gradient promises: to first order, step times gradient."""
        # A low temperature sharpens a random model's flat distribution, whose entropy has next to no gradient.
        batch = rows(self.vocab_size).with_meta(temperature=0.2)
        gradient, step = self._one_step(build, [[batch]], LOSSES[loss])
        assert step.grad_norm > 1e-4, "the gradient is (nearly) zero: this model cannot show anything"
        evaluate = build(optim=PROBE_OPTIM)
        start = total_loss(evaluate.forward_backward([batch], LOSSES[loss], forward_only=True))
        size = 1e-3 * max(abs(start), 0.1) / step.grad_norm**2
        engine = build(optim={**PROBE_OPTIM, "lr": size})
        before = clone_weights(engine)
        engine.forward_backward([batch], LOSSES[loss], forward_only=False)
        engine.optimizer_step()
        after = clone_weights(engine)
        end = total_loss(engine.forward_backward([batch], LOSSES[loss], forward_only=True))
        moved = {name: before[name].double() - after[name].double() for name in before}
        promised = sum(float((moved[name] * gradient[name]).sum()) for name in untied(before, gradient))
        assert start - end == pytest.approx(promised, rel=0.1)

    def test_grad_norm_is_that_of_the_whole_model(self, build: Build) -> None:
        """The reported norm is the norm of the gradient that the step used, tied weights once."""
        engine = build(optim=PROBE_OPTIM)
        before = clone_weights(engine)
        out = engine.train_batch(rows(self.vocab_size), cross_entropy, PLANS["one batch"])
        gradient = first_gradient(before, clone_weights(engine))
        norm = math.sqrt(sum(float(gradient[name].square().sum()) for name in untied(before, gradient)))
        assert out.step.grad_norm == pytest.approx(norm, rel=max(1e-3, self.gradient_tolerance))
        assert not out.step.skipped
