"""The conformance suite of a training backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from rlctl.errors import RlctlError
from rlctl.microbatch import MicroBatchPlan
from rlctl.records import BackendKind
from rlctl.testing.backend import Build, clone_weights, same_weights
from rlctl.testing.train_batches import LENGTHS, PROBE_OPTIM, cross_entropy, rows
from rlctl.testing.train_gradients import GradientConformance
from rlctl.testing.train_optimizer import OptimizerConformance
from rlctl.testing.train_reader import ReaderConformance
from rlctl.testing.train_state import StateConformance

WHOLE = MicroBatchPlan(max_rows=len(LENGTHS))


class TrainConformance(GradientConformance, OptimizerConformance, ReaderConformance, StateConformance):
    """Subclass it in a plugin's tests and set the attributes; pytest runs what it inherits.

    Beside those of :class:`rlctl.testing.backend.BackendConformance`:

    Args:
        gradient_tolerance: relative, for gradients and losses of the same work split in other ways (float32 sums in
            another order: 1e-5).
        log_prob_tolerance: absolute, in nats.
        state_tolerance: how far a resumed run may be from the one that went on; 0 asks for every bit.
        random_init: the tiny model starts from random weights, so the seed decides them.
        expected_names: the exact set of exported names, where it is known.
        refused_model: a model section that the engine refuses to build; None where it takes everything.
        dropout_model: additions to ``model`` that make it drop activations; None where no model of the backend can.
    """

    kind: ClassVar[BackendKind] = BackendKind.TRAIN
    gradient_tolerance: ClassVar[float] = 1e-5
    log_prob_tolerance: ClassVar[float] = 1e-5
    state_tolerance: ClassVar[float] = 0.0
    random_init: ClassVar[bool] = True
    expected_names: ClassVar[frozenset[str]] = frozenset()
    refused_model: ClassVar[Mapping[str, Any] | None] = {"path": "/no/such/model"}

    def test_build_reports_mesh_and_model(self, build: Build) -> None:
        """The mesh places this rank among the others; the model's size is that of its weights."""
        engine = build()
        mesh, info = engine.mesh, engine.info
        assert mesh is not None
        assert info is not None
        assert mesh.world_size == self.topology.world_size
        assert 0 <= mesh.rank < mesh.world_size
        assert mesh.dp_size == self.topology.dp_size
        assert 0 <= mesh.dp_rank < mesh.dp_size
        assert mesh.world_size > 1 or mesh.is_collect
        assert mesh.device.partition(":")[0] == self.device
        assert mesh.token_multiplier == self.topology.usp * self.topology.cp
        assert mesh.count_multiple >= 1
        assert info.vocab_size >= self.vocab_size
        assert 0 < info.num_parameters <= sum(t.numel() for t in clone_weights(engine).values())
        assert info.model_family

    def test_seed_decides_everything(self, build: Build) -> None:
        """Equal seeds: the same weights, loss and update, bit for bit. Another seed: another random start."""
        batch = rows(self.vocab_size)
        a, b, other = build(seed=3), build(seed=3), build(seed=4)
        assert same_weights(clone_weights(a), clone_weights(b))
        assert self.random_init != same_weights(clone_weights(a), clone_weights(other))
        outs = [e.train_batch(batch, cross_entropy, WHOLE) for e in (a, b)]
        assert outs[0] == outs[1]
        assert same_weights(clone_weights(a), clone_weights(b))

    def test_forward_only_engine_scores_and_never_steps(self, build: Build) -> None:
        """Built without an optimizer it scores like any other, and refuses a step."""
        batch = rows(self.vocab_size)
        frozen, plain = build(forward_only=True), build(optim=PROBE_OPTIM)
        a, b = (e.infer_batch(batch, WHOLE)["log_probs"] for e in (frozen, plain))
        assert float((a - b).abs().max()) <= self.log_prob_tolerance
        with pytest.raises((RlctlError, AssertionError)):
            frozen.optimizer_step()

    def test_a_refused_build_leaves_other_engines_alone(self, build: Build) -> None:
        """What an engine took goes back when it refuses its model; not what others still use."""
        if self.refused_model is None:
            pytest.skip("this engine refuses no model")
        batch = rows(self.vocab_size)
        sound = build()
        before = sound.infer_batch(batch, WHOLE)["log_probs"]
        refused = self.make_engine()
        # In whatever words: a run has found its model before it builds an engine.
        with pytest.raises(Exception):  # noqa: B017
            self.build_engine(refused, self.refused_model)
        refused.shutdown()
        assert bool((sound.infer_batch(batch, WHOLE)["log_probs"] == before).all())
        sound.train_batch(batch, cross_entropy, WHOLE)
