"""The optimizer step: clipping, skipped steps, weight decay, moments, the learning rate."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

from rlctl.batch import padding_like
from rlctl.errors import ConfigError
from rlctl.microbatch import MicroBatchPlan
from rlctl.schedule import lr_factor
from rlctl.testing.backend import BackendConformance, Build, clone_weights, same_weights
from rlctl.testing.train_batches import (
    LENGTHS,
    PROBE_OPTIM,
    Broken,
    apart,
    cross_entropy,
    first_gradient,
    largest,
    rows,
)

WHOLE = MicroBatchPlan(max_rows=len(LENGTHS))


class OptimizerConformance(BackendConformance):
    """See the attributes of :class:`rlctl.testing.train.TrainConformance`."""

    gradient_tolerance: ClassVar[float] = 1e-5

    def test_clipping_scales_the_update(self, build: Build) -> None:
        """The norm is reported before clipping; the gradient that is used has the norm asked for, and its direction."""
        batch = rows(self.vocab_size)
        free, clipped = build(optim=PROBE_OPTIM), build(optim={**PROBE_OPTIM, "clip_grad": 1e-9})
        before = clone_weights(free)
        out = free.train_batch(batch, cross_entropy, WHOLE)
        limit = 0.25 * out.step.grad_norm
        clipped = build(optim={**PROBE_OPTIM, "clip_grad": limit})
        clipped_out = clipped.train_batch(batch, cross_entropy, WHOLE)
        assert clipped_out.step.grad_norm == pytest.approx(out.step.grad_norm, rel=self.gradient_tolerance)
        wanted = first_gradient(before, clone_weights(free))
        found = first_gradient(before, clone_weights(clipped))
        scaled = {name: 0.25 * g for name, g in wanted.items()}
        # 1e-3: clipping divides by norm + a small epsilon (1e-6 in torch).
        assert apart(found, scaled) <= 1e-3 * largest(scaled) + 2e-7
        generous = build(optim={**PROBE_OPTIM, "clip_grad": 10 * out.step.grad_norm})
        generous.train_batch(batch, cross_entropy, WHOLE)
        assert apart(first_gradient(before, clone_weights(generous)), wanted) <= 1e-5 * largest(wanted) + 2e-7

    @pytest.mark.parametrize("factor", [math.nan, math.inf], ids=["nan", "inf"])
    def test_non_finite_loss_skips_the_step(self, build: Build, factor: float) -> None:
        """Weights, moments and schedule stay as they were; the next step is as if the bad one had never been."""
        optim = {"lr": 0.01, "weight_decay": 0.01, "lr_warmup_steps": 5}
        batch, other = rows(self.vocab_size), rows(self.vocab_size, seed=5)
        hurt, well = build(optim=optim), build(optim=optim)
        for engine in (hurt, well):
            engine.train_batch(other, cross_entropy, WHOLE)
        before = clone_weights(hurt)
        bad = hurt.train_batch(batch, Broken(factor), WHOLE)
        assert bad.step.skipped
        assert not math.isfinite(bad.step.grad_norm)
        assert same_weights(before, clone_weights(hurt))
        again, plain = (e.train_batch(batch, cross_entropy, WHOLE) for e in (hurt, well))
        assert not again.step.skipped
        assert again.step == plain.step
        assert same_weights(clone_weights(hurt), clone_weights(well))

    def test_every_step_moves_the_weights(self, build: Build) -> None:
        """Six steps on one batch: none is skipped, each moves the weights, and the loss falls."""
        batch = rows(self.vocab_size)
        engine = build(optim={"lr": 0.01, "weight_decay": 0.0})
        losses, last = [], clone_weights(engine)
        for _ in range(6):
            out = engine.train_batch(batch, cross_entropy, WHOLE)
            now = clone_weights(engine)
            assert not out.step.skipped
            assert not same_weights(last, now)
            losses.append(out.loss)
            last = now
        assert losses == sorted(losses, reverse=True)

    def test_second_step_uses_the_moments(self, build: Build) -> None:
        """A step without a gradient after one with a gradient still moves the weights as Adam's moments say."""
        optim = {**PROBE_OPTIM, "lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}
        batch = rows(self.vocab_size)
        engine = build(optim=optim)
        start = clone_weights(engine)
        engine.train_batch(batch, cross_entropy, WHOLE)
        first = clone_weights(engine)
        engine.set_mode(True)
        engine.forward_backward([padding_like(batch)], cross_entropy, forward_only=False)
        engine.optimizer_step()
        second = clone_weights(engine)
        # m = 0.9 * 0.1 g / (1 - 0.81), v = 0.99 * 0.01 g^2 / (1 - 0.9801); the first step moved by lr * sign(g).
        ratio = (0.9 * 0.1 / (1 - 0.9**2)) / math.sqrt(0.99 * 0.01 / (1 - 0.99**2))
        moved = False
        for name in start:
            a, b = start[name].double() - first[name].double(), first[name].double() - second[name].double()
            # Elements whose gradient is far above eps, so that the first step was a whole one.
            sure = a.abs() > 0.00999
            moved = moved or bool(sure.any())
            assert torch.allclose(b[sure], ratio * a[sure], rtol=1e-3, atol=1e-6), name
        assert moved

    def test_weight_decay_is_decoupled(self, build: Build) -> None:
        """Without a gradient, a decayed weight shrinks by ``lr * weight_decay`` and any other stays."""
        optim = {"lr": 0.01, "weight_decay": 0.5, "clip_grad": 0.0}
        engine = build(optim=optim)
        before = clone_weights(engine)
        engine.set_mode(True)
        engine.forward_backward([padding_like(rows(self.vocab_size))], cross_entropy, forward_only=False)
        engine.optimizer_step()
        after = clone_weights(engine)
        decayed = 0
        for name, start in before.items():
            shrunk = torch.allclose(after[name], start * (1 - 0.005), rtol=1e-5, atol=1e-9)
            assert shrunk or torch.equal(after[name], start), name
            decayed += start.numel() if shrunk else 0
        # Norm weights and biases may be left out; they are few.
        assert decayed > 0.5 * sum(t.numel() for t in before.values())

    def test_sgd_is_plain_or_refused(self, build: Build) -> None:
        """``name: sgd`` moves a weight by ``lr`` times its gradient; who has it not refuses, and takes no other in its place."""
        optim = {"name": "sgd", "lr": 0.5, "weight_decay": 0.0, "clip_grad": 0.0}
        try:
            engine = build(optim=optim)
        except ConfigError:
            return
        batch = rows(self.vocab_size)
        probe = build(optim=PROBE_OPTIM)
        before = clone_weights(probe)
        probe.train_batch(batch, cross_entropy, WHOLE)
        wanted = first_gradient(before, clone_weights(probe))
        engine.train_batch(batch, cross_entropy, WHOLE)
        after = clone_weights(engine)
        found = {n: (before[n].double() - after[n].double()) / 0.5 for n in before}
        assert apart(found, wanted) <= self.gradient_tolerance * largest(wanted) + 1e-6
        # Without a gradient nothing moves: plain descent has no memory of the step before.
        engine.set_mode(True)
        engine.forward_backward([padding_like(batch)], cross_entropy, forward_only=False)
        engine.optimizer_step()
        assert same_weights(after, clone_weights(engine))

    @pytest.mark.parametrize(
        "schedule",
        [
            {"lr_scheduler_type": "constant"},
            {"lr_scheduler_type": "constant", "lr_warmup_steps": 3},
            {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2, "total_training_steps": 6, "min_lr_ratio": 0.1},
            {"lr_scheduler_type": "linear", "total_training_steps": 4},
        ],
        ids=["constant", "warm-up", "cosine", "linear"],
    )
    def test_learning_rate_schedule(self, build: Build, schedule: dict[str, Any]) -> None:
        """The reported rate is the one of :func:`rlctl.schedule.lr_factor`, past the schedule's end too."""
        optim = {"lr": 1e-3, **schedule}
        engine = build(optim=optim)
        batch = rows(self.vocab_size)
        rates = [engine.train_batch(batch, cross_entropy, WHOLE).step.lr for _ in range(8)]
        assert rates == pytest.approx([1e-3 * lr_factor(s, optim) for s in range(8)], rel=1e-6, abs=1e-12)

    def test_the_reported_rate_is_the_one_used(self, build: Build) -> None:
        """In the first warm-up step the weights move by the small rate that is reported."""
        optim = {**PROBE_OPTIM, "lr_warmup_steps": 4}
        engine = build(optim=optim)
        before = clone_weights(engine)
        out = engine.train_batch(rows(self.vocab_size), cross_entropy, WHOLE)
        assert out.step.lr == pytest.approx(0.25)
        found = first_gradient(before, clone_weights(engine), lr=out.step.lr)
        full = build(optim=PROBE_OPTIM)
        full.train_batch(rows(self.vocab_size), cross_entropy, WHOLE)
        wanted = first_gradient(before, clone_weights(full))
        assert apart(found, wanted) <= 1e-4 * largest(wanted) + 1e-6
