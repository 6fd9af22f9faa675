"""What an engine keeps: exported weights, saved state, modes and places."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rlctl.errors import CheckpointError
from rlctl.microbatch import MicroBatchPlan
from rlctl.testing.backend import BackendConformance, Build, clone_weights, same_weights
from rlctl.testing.train_batches import LENGTHS, apart, cross_entropy, rows

WHOLE = MicroBatchPlan(max_rows=len(LENGTHS))
OPTIM: dict[str, Any] = {
    "lr": 0.01,
    "lr_scheduler_type": "cosine",
    "lr_warmup_steps": 1,
    "total_training_steps": 6,
}


class StateConformance(BackendConformance):
    """See the attributes of :class:`rlctl.testing.train.TrainConformance`."""

    state_tolerance: ClassVar[float] = 0.0
    expected_names: ClassVar[frozenset[str]] = frozenset()
    dropout_model: ClassVar[Mapping[str, Any] | None] = None

    def test_export_is_complete_and_stable(self, build: Build) -> None:
        """Names and shapes stay, values are whole tensors without a graph, nothing of the model is left out."""
        engine = build()
        first = list(engine.export_weights())
        names = [name for name, _ in first]
        assert len(set(names)) == len(names)
        assert not self.expected_names or set(names) == self.expected_names
        assert engine.info is not None
        assert sum(t.numel() for _, t in first) >= engine.info.num_parameters
        for name, tensor in first:
            assert type(tensor) in (torch.Tensor, torch.nn.Parameter), f"{name} is not a whole tensor"
            assert not tensor.requires_grad or tensor.is_leaf, name
            assert bool(torch.isfinite(tensor).all()), name
        shapes = [(name, tuple(t.shape)) for name, t in first]
        engine.train_batch(rows(self.vocab_size), cross_entropy, WHOLE)
        again = list(engine.export_weights())
        assert [(name, tuple(t.shape)) for name, t in again] == shapes

    def test_export_is_lazy(self, build: Build) -> None:
        """An iterator; it may be left half-way, and does not leak its no_grad to the consumer."""
        engine = build()
        stream = engine.export_weights()
        assert iter(stream) is stream, "an iterator, not a list"
        assert torch.is_grad_enabled()
        next(stream)
        assert torch.is_grad_enabled(), "no_grad around a yield leaks to the consumer: decorate the generator instead"
        if hasattr(stream, "close"):
            stream.close()  # type: ignore[attr-defined]
        assert torch.is_grad_enabled()
        before = clone_weights(engine)
        engine.train_batch(rows(self.vocab_size), cross_entropy, WHOLE)
        assert not same_weights(before, clone_weights(engine))

    def test_export_dtype(self, build: Build) -> None:
        """Asked for bfloat16, floating tensors come as the rounded master weights."""
        engine = build()
        master, half = clone_weights(engine), clone_weights(engine, "bfloat16")
        assert master.keys() == half.keys()
        floating = [name for name, t in master.items() if t.is_floating_point()]
        assert floating
        for name in floating:
            assert half[name].dtype == torch.bfloat16, name
            assert torch.equal(half[name], master[name].bfloat16()), name

    def test_save_and_load_continue_exactly(self, build: Build, tmp_path: Path) -> None:
        """After loading into a fresh engine the next steps are those of the one that went on."""
        batches = [rows(self.vocab_size, seed=s) for s in range(4)]
        engine = build(optim=OPTIM)
        for batch in batches[:2]:
            engine.train_batch(batch, cross_entropy, WHOLE)
        saved = clone_weights(engine)
        engine.save_state(_empty(tmp_path / "state"))
        went_on = [engine.train_batch(batch, cross_entropy, WHOLE) for batch in batches[2:]]
        other = build(seed=1, optim=OPTIM)
        other.load_state(tmp_path / "state")
        assert same_weights(clone_weights(other), saved)
        resumed = [other.train_batch(batch, cross_entropy, WHOLE) for batch in batches[2:]]
        assert [o.step.lr for o in resumed] == [o.step.lr for o in went_on]
        norms = [o.step.grad_norm for o in went_on]
        assert [o.step.grad_norm for o in resumed] == pytest.approx(norms, rel=self.state_tolerance, abs=0.0)
        assert apart(clone_weights(other), clone_weights(engine)) <= self.state_tolerance

    def test_load_refuses_an_incomplete_state(self, build: Build, tmp_path: Path) -> None:
        """An empty directory is no checkpoint, and says so as an error that a user can read."""
        engine = build(optim=OPTIM)
        before = clone_weights(engine)
        with pytest.raises(CheckpointError):
            engine.load_state(_empty(tmp_path / "empty"))
        assert same_weights(before, clone_weights(engine))

    def test_random_state_is_saved(self, build: Build, tmp_path: Path) -> None:
        """Numbers drawn after loading are those drawn after saving."""
        engine = build(optim=OPTIM)
        torch.manual_seed(123)
        engine.save_state(_empty(tmp_path / "state"))
        drawn = torch.rand(4)
        torch.manual_seed(7)
        engine.load_state(tmp_path / "state")
        assert torch.equal(torch.rand(4), drawn)

    def test_modes(self, build: Build) -> None:
        """Evaluation repeats itself, and a step after it is the step without it. Dropout acts in training alone."""
        batch = rows(self.vocab_size)
        engine, plain = build(), build()
        first = engine.infer_batch(batch, WHOLE)["log_probs"]
        assert torch.equal(first, engine.infer_batch(batch, WHOLE)["log_probs"])
        for e in (engine, plain):
            e.train_batch(batch, cross_entropy, WHOLE)
        assert same_weights(clone_weights(engine), clone_weights(plain))
        if self.dropout_model is not None:
            dropping = build(**self.dropout_model)
            dropping.set_mode(True)
            one, two = (dropping.forward_backward([batch], cross_entropy, forward_only=False)[0] for _ in range(2))
            assert one.loss != two.loss
            scored = [dropping.infer_batch(batch, WHOLE)["log_probs"] for _ in range(2)]
            assert torch.equal(scored[0], scored[1])

    def test_move_away_and_back(self, build: Build) -> None:
        """Model, optimizer and gradients survive a move to the host and back."""
        batches = [rows(self.vocab_size, seed=s) for s in range(3)]
        engine, plain = build(optim=OPTIM), build(optim=OPTIM)
        for e in (engine, plain):
            e.train_batch(batches[0], cross_entropy, WHOLE)
        engine.move("cpu", "model", "optimizer", "grad")
        engine.move(self.device, "model", "optimizer", "grad")
        for batch in batches[1:]:
            for e in (engine, plain):
                e.train_batch(batch, cross_entropy, WHOLE)
        assert same_weights(clone_weights(engine), clone_weights(plain))


def _empty(path: Path) -> Path:
    path.mkdir()
    return path
