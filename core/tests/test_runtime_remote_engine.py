"""Real losses on simulated ranks: the numbers of one rank, in any order of ranks, and words for meshes that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest
import torch
from remote_toys import PLAN, numbered

from rlctl.algorithms.losses import CrossEntropyLoss
from rlctl.batch import PackedBatch, pack
from rlctl.config.schema import OptimConfig
from rlctl.engine import MeshInfo
from rlctl.errors import EngineError, GuardError
from rlctl.hookspecs import hookimpl
from rlctl.logits import LogitsReader, LossOutput
from rlctl.microbatch import MicroBatchPlan
from rlctl.normalizer_modes import LossAggMode
from rlctl.runtime.records import BuildSpec
from rlctl.runtime.remote import RemoteEngine
from rlctl.testing.fake_engine import FakeTrain, Place, by_topology, fake_train
from rlctl.testing.fake_transport import fake_group
from rlctl.topology import Topology

MODEL = {"config": {"vocab": 40, "hidden": 8}, "seed": 1}
SPEC = BuildSpec("actor", "train", "fake", MODEL, {}, {}, OptimConfig(name="sgd", lr=0.1, clip_grad=0.0).model_dump())


@contextmanager
def fake(
    world_size: int, axes: Mapping[str, int], place: Place = by_topology, kind: type[FakeTrain] = FakeTrain
) -> Iterator[RemoteEngine]:
    group = fake_group(world_size, fake_train(place, kind), timeout_s=5.0)
    try:
        yield RemoteEngine.build(group, replace(SPEC, axes=axes))
    finally:
        group.close()


def test_any_batch_weighs_and_scores_as_on_one_rank() -> None:
    """Random rows, masks, row weights, groups, bounds and aggregation modes over 3 replicas of 2 ranks and over 5."""
    with fake(1, {}) as one, fake(6, {"tp": 2}) as six, fake(5, {}) as five:
        random = Random(11)
        for _ in range(40):
            lengths = [random.randrange(1, 20) for _ in range(random.randrange(1, 14))]
            masks = [[t > 0 and random.random() < 0.7 for t in range(n)] for n in lengths]
            batch = pack(
                {"input_ids": [[random.randrange(40) for _ in range(n)] for n in lengths], "loss_mask": masks},
                rows={"row_weight": [random.choice([0.0, 0.5, 1.0]) for _ in lengths]},
                dtypes={"loss_mask": torch.bool},
            )
            if random.random() < 0.5:
                batch = batch.with_rows(group=torch.tensor([random.randrange(3) for _ in lengths]))
            bounds = {"max_rows": random.randrange(1, 5)}, {"max_tokens": random.randrange(20, 50)}
            plan = MicroBatchPlan(**random.choice(bounds))
            mode = random.choice(list(LossAggMode))
            loss, sums = one.eval_loss(batch, CrossEntropyLoss(), plan, mode, 7)
            scores = one.infer_batch(batch, plan)["log_probs"]
            for many in (six, five):
                found, found_sums = many.eval_loss(batch, CrossEntropyLoss(), plan, mode, 7)
                assert found == pytest.approx(loss, rel=1e-5, abs=1e-7)
                assert found_sums == pytest.approx(sums, rel=1e-5, abs=1e-7)
                assert torch.allclose(many.infer_batch(batch, plan)["log_probs"], scores, atol=1e-5)


def reversed_ranks(topology: Topology, rank: int) -> MeshInfo:
    """An engine that lays its ranks out backwards, and counts them so."""
    return by_topology(topology, topology.world_size - 1 - rank)


def scattered_ranks(topology: Topology, rank: int) -> MeshInfo:
    """Ranks of one replica are not neighbours, and its second rank collects."""
    order = Random(7).sample(range(topology.world_size), topology.world_size)
    mesh = by_topology(topology, order[rank])
    return replace(mesh, is_collect=topology.coordinates(order[rank])["tp"] == 1)


@pytest.mark.parametrize(
    ("world_size", "axes", "place"),
    [
        (6, {"pp": 2}, by_topology),
        (8, {"pp": 2, "tp": 2}, by_topology),
        (6, {"tp": 2}, reversed_ranks),
        (8, {"tp": 2}, scattered_ranks),
    ],
    ids=["last stage", "last stage, tp", "backwards", "scattered"],
)
def test_any_order_of_ranks(world_size: int, axes: dict[str, int], place: Place) -> None:
    lengths = [5, 9, 2, 7, 3, 1, 8]
    batch = numbered(lengths).with_items(input_ids=torch.arange(35) % 40)
    with fake(1, {}) as one, fake(world_size, axes, place) as many:
        for _ in range(2):
            a = one.train_batch(batch, CrossEntropyLoss(), PLAN)
            b = many.train_batch(batch, CrossEntropyLoss(), PLAN)
            assert (b.loss, b.step.grad_norm) == pytest.approx((a.loss, a.step.grad_norm), rel=1e-5)
        want = ("log_probs", "entropy")
        wanted, found = one.infer_batch(batch, PLAN, want), many.infer_batch(batch, PLAN, want)
        assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in want)
        collectors = [p.rank for p in many.places if p.is_collect]
        assert len(collectors) == many.dp_size
        if place is by_topology:
            assert collectors == [r for r in range(world_size) if r >= world_size // 2][:: axes.get("tp", 1)]


def broken(change: Callable[[MeshInfo], MeshInfo], rank: int | None = None) -> Place:
    """A mesh in which one rank (or every one) misreports its place."""

    def place(topology: Topology, own: int) -> MeshInfo:
        mesh = by_topology(topology, own)
        return change(mesh) if rank in (None, own) else mesh

    return place


@pytest.mark.parametrize(
    ("place", "found"),
    [
        (broken(lambda m: replace(m, is_collect=False), rank=2), "dp rank 1 has no collectors"),
        (broken(lambda m: replace(m, is_collect=True)), "dp rank 0 has 2 collectors, ranks [0, 1]"),
        (broken(lambda m: replace(m, dp_rank=0)), "dp rank 1 is missing"),
        (broken(lambda m: replace(m, dp_rank=0), rank=3), "3 ranks in dp rank 0 and 1 in dp rank 1"),
        (broken(lambda m: replace(m, dp_size=1), rank=3), "dp_size 1 and 2"),
    ],
    ids=["no collector", "two collectors", "missing dp rank", "unequal replicas", "two dp sizes"],
)
def test_a_mesh_that_cannot_be_dispatched_over_is_refused(place: Place, found: str) -> None:
    with pytest.raises(EngineError, match="the engine's mesh cannot be dispatched over") as caught:
        with fake(4, {"tp": 2}, place):
            pass
    assert caught.value.found == found


def own_mean(reader: LogitsReader, batch: PackedBatch) -> LossOutput:
    """A loss that forgets its weights: each replica divides by its own tokens."""
    log_probs = reader.log_prob()
    return LossOutput(
        -log_probs.sum() / batch.items["loss_mask"].sum().clamp(min=1), {"loss": -log_probs.detach().sum()}
    )


def test_weights_come_from_the_whole_mini_batch() -> None:
    """The controller weighs before it splits, so one long and one short replica add up to the mean over all tokens."""
    batch = numbered([2, 20]).with_items(input_ids=torch.arange(22) % 40)
    with fake(1, {}) as one, fake(2, {}) as two:
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
            losses = [e.eval_loss(batch, CrossEntropyLoss(), PLAN, mode, 10)[0] for e in (one, two)]
            assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        plan = MicroBatchPlan(max_rows=1)
        wrong = [e.train_batch(batch, own_mean, plan).step.grad_norm for e in (one, two)]
        assert wrong[1] == pytest.approx(wrong[0], rel=1e-5), (
            "and a loss without weights is as wrong on two ranks as on one"
        )


class OwnLoss(FakeTrain):
    """Reduces nothing: each replica keeps the loss of its own rows."""

    @hookimpl
    def rlctl_reduce(self, values: Sequence[float], op: str) -> list[float]:
        reduced = FakeTrain.rlctl_reduce(self, values, op)
        return list(values) if op == "sum" else reduced


def test_replicas_with_losses_of_their_own_are_caught() -> None:
    batch = numbered([4, 9, 6, 2]).with_items(input_ids=torch.arange(21) % 40)
    with fake(4, {"tp": 2}, kind=OwnLoss) as engine:
        with pytest.raises(GuardError, match="the replicas of actor report different values of the loss") as caught:
            engine.train_batch(batch, CrossEntropyLoss(), PLAN)
        assert "rlctl verify --backend fake" in str(caught.value.next)
        with pytest.raises(GuardError, match="loss"):
            engine.eval_loss(batch, CrossEntropyLoss(), PLAN)
