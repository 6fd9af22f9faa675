"""The seeds of confusion, worked out: what people get wrong when ranks, replicas, samples and steps meet.

P = 2 prompts, n = 3 samples each, 4 ranks with tp = 2. So there are 2 data parallel replicas and not 4; each gets 3 of the 6
trajectories and not 6, not 1.5; ranks 0 and 1 see the same three. Two epochs over one mini-batch of 2 prompts are two
optimizer steps and not six, not twelve. Every row counts once, whatever the number of ranks that compute it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from rlctl.batch import GROUP, PackedBatch, pack
from rlctl.config.schema import ActorConfig, OptimConfig
from rlctl.engine import Engine, MeshInfo
from rlctl.microbatch import MicroBatchPlan
from rlctl.records import BackendKind
from rlctl.roles.actor import ActorRole
from rlctl.roles.budget import SkipBudget
from rlctl.runtime.records import Boot, BuildSpec
from rlctl.runtime.remote import RemoteEngine
from rlctl.testing.fake_engine import FakeTrain, Place, by_topology
from rlctl.testing.fake_transport import Fabric, FakeTransport, fake_group
from rlctl.topology import Topology

PROMPTS, SAMPLES = 2, 3
MODEL = {"config": {"vocab": 30, "hidden": 10}, "seed": 5}
OPTIM = OptimConfig(lr=0.05, clip_grad=1.0).model_dump()


def rollout() -> PackedBatch:
    """Six trajectories of unequal lengths: three answers to each of two prompts. Row r holds tokens 5 r + 0 .. 4 alone."""
    answers = [(4, 2), (4, 3), (4, 1), (2, 5), (2, 2), (2, 3)]  # (prompt tokens, answer tokens)
    generator = torch.Generator().manual_seed(1)
    ids = [5 * r + torch.randint(0, 5, (p + a,), generator=generator) for r, (p, a) in enumerate(answers)]
    masks = [[False] * p + [True] * a for p, a in answers]
    advantages = [[adv] * (p + a) for adv, (p, a) in zip([1.0, -0.5, -0.5, 0.2, -1.2, 1.0], answers, strict=True)]
    log_probs = [(-3.5 + 0.3 * torch.randn(p + a, generator=generator)) for p, a in answers]
    return pack(
        {"input_ids": ids, "loss_mask": masks, "advantages": advantages, "rollout_log_probs": log_probs},
        rows={GROUP: [r // SAMPLES for r in range(PROMPTS * SAMPLES)]},
        meta={"temperature": 1.0},
        dtypes={"loss_mask": torch.bool},
    )


def rows_in(batch: PackedBatch) -> list[int]:
    """Which trajectories a part holds, told by their tokens."""
    return [int(ids[0]) // 5 for ids in batch.split_items(batch.items["input_ids"])]


class Run:
    """An actor on simulated ranks, and what went on in them."""

    def __init__(self, engine: RemoteEngine, engines: Mapping[int, FakeTrain], ppo_epochs: int) -> None:
        self.engine, self.engines = engine, engines
        config = ActorConfig(ppo_epochs=ppo_epochs)
        self.actor = ActorRole(engine, config, MicroBatchPlan(max_tokens=16), 8, SkipBudget(0), check_rollout=True)
        transport = engine.group._transport
        assert isinstance(transport, FakeTransport)
        self.transport = transport

    def update(
        self, batch: PackedBatch, prompts_per_step: int = PROMPTS, keep: set[int] | None = None
    ) -> dict[str, float]:
        ready = batch.with_items(old_log_probs=self.actor.score(batch)["log_probs"])
        kept = set(range(batch.num_rows)) if keep is None else keep
        return self.actor.update(ready, prompts_per_step * SAMPLES, kept, torch.Generator().manual_seed(0))

    def sent(self, method: str) -> list[list[PackedBatch]]:
        """What each call of ``method`` gave to the ranks, by rank."""
        calls: dict[int, dict[int, PackedBatch]] = {}
        for rank, call in self.transport.sent:
            if call.method == method:
                calls.setdefault(call.id, {})[rank] = call.args[1]
        return [[by_rank[rank] for rank in sorted(by_rank)] for by_rank in calls.values()]

    def weights(self) -> list[dict[str, torch.Tensor]]:
        """By rank."""
        return [{k: v.clone() for k, v in self.engines[r].model.state_dict().items()} for r in sorted(self.engines)]


@contextmanager
def run_on(world_size: int, axes: Mapping[str, int], place: Place = by_topology, ppo_epochs: int = 2) -> Iterator[Run]:
    engines: dict[int, FakeTrain] = {}

    def make(spec: BuildSpec, boot: Boot, fabric: Fabric) -> Engine:
        engines[boot.rank] = FakeTrain(fabric, boot.rank, place)
        return Engine(engines[boot.rank], BackendKind.TRAIN, spec.backend)

    group = fake_group(world_size, make, timeout_s=10.0)
    try:
        engine = RemoteEngine.build(group, BuildSpec("actor", "train", "fake", MODEL, {}, axes, OPTIM))
        yield Run(engine, engines, ppo_epochs)
    finally:
        group.close()


def test_four_ranks_with_tp_2_are_two_replicas_of_three_trajectories() -> None:
    batch = rollout()
    assert batch.num_rows == PROMPTS * SAMPLES == 6
    with run_on(4, {"tp": 2}) as run:
        assert run.engine.dp_size == 2
        assert [p.dp_rank for p in run.engine.places] == [0, 0, 1, 1]
        assert [p.rank for p in run.engine.places if p.is_collect] == [0, 2]
        run.update(batch)
        for by_rank in [*run.sent("train_batch"), *run.sent("infer_batch")]:
            assert [part.num_rows for part in by_rank] == [3, 3, 3, 3], "tp computes every row twice: 12 for 6"
            assert by_rank[0] is by_rank[1], "the ranks of one replica are given the same rows"
            assert by_rank[2] is by_rank[3]
            assert sorted(rows_in(by_rank[0]) + rows_in(by_rank[2])) == list(range(6)), "each row on one replica"


def test_two_epochs_are_two_optimizer_steps_and_not_six() -> None:
    with run_on(4, {"tp": 2}) as run:
        metrics = run.update(rollout())
        assert metrics["actor/num_steps"] == 2
        assert len(run.sent("train_batch")) == 2
        assert [run.engines[rank].steps for rank in range(4)] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("prompts_per_step", "ppo_epochs", "steps", "rows"),
    [(2, 1, 1, [3, 3]), (2, 2, 2, [3, 3]), (1, 1, 2, [2, 1]), (1, 2, 4, [2, 1]), (2, 3, 3, [3, 3])],
)
def test_a_mini_batch_is_counted_in_prompts(
    prompts_per_step: int, ppo_epochs: int, steps: int, rows: list[int]
) -> None:
    """A step is ``ppo_mini_batch_size`` prompts times n rows, over all replicas together; epochs repeat them all."""
    with run_on(4, {"tp": 2}, ppo_epochs=ppo_epochs) as run:
        metrics = run.update(rollout(), prompts_per_step)
        assert metrics["actor/num_steps"] == steps
        assert [run.engines[rank].steps for rank in range(4)] == [steps] * 4
        for by_rank in run.sent("train_batch"):
            assert sorted(part.num_rows for part in (by_rank[0], by_rank[2])) == sorted(rows)
        # An epoch holds each row once.
        parts = [part for by_rank in run.sent("train_batch") for part in (by_rank[0], by_rank[2])]
        assert sorted(row for part in parts for row in rows_in(part)) == sorted(list(range(6)) * ppo_epochs)


@pytest.mark.parametrize("prompts_per_step", [2, 1])
@pytest.mark.parametrize(
    ("world_size", "axes"),
    [(4, {"tp": 2}), (4, {}), (8, {"tp": 2}), (6, {"tp": 3}), (4, {"pp": 2}), (8, {"tp": 2, "pp": 2})],
)
def test_ranks_change_no_number(world_size: int, axes: dict[str, int], prompts_per_step: int) -> None:
    """Metrics and weights are those of one rank: nothing is counted twice for tp, nor divided for dp."""
    batch = rollout()
    with run_on(1, {}) as one, run_on(world_size, axes) as many:
        wanted, found = one.update(batch, prompts_per_step), many.update(batch, prompts_per_step)
        counts = {"actor/num_micro_batches", "actor/num_padding_micro_batches"}
        assert {k: v for k, v in found.items() if k not in counts} == pytest.approx(
            {k: v for k, v in wanted.items() if k not in counts}, rel=1e-4, abs=1e-6
        )
        assert {"actor/pg_loss", "actor/entropy", "actor/grad_norm", "training/rollout_probs_diff_mean"} <= set(wanted)
        reference = one.weights()[0]
        for weights in many.weights():
            for name, value in weights.items():
                assert torch.allclose(value, reference[name], atol=1e-5), name


def test_scores_are_taken_once_a_replica_and_come_back_in_order() -> None:
    batch = rollout()
    with run_on(1, {}) as one, run_on(4, {"tp": 2}) as many:
        wanted = one.actor.score(batch, ("log_probs", "entropy"))
        found = many.actor.score(batch, ("log_probs", "entropy"))
        assert {k: v.shape for k, v in found.items()} == dict.fromkeys(("log_probs", "entropy"), (batch.num_items,))
        for name in wanted:
            assert torch.allclose(found[name], wanted[name], atol=1e-6)
        assert not torch.allclose(found["log_probs"], wanted["log_probs"].flip(0)), "order can be seen in these numbers"


def last_collects(topology: Topology, rank: int) -> MeshInfo:
    """Ranks backwards; the highest tp rank of each replica has the output."""
    at = topology.world_size - 1 - rank
    mesh = by_topology(topology, at)
    return replace(mesh, is_collect=topology.coordinates(at)["tp"] == topology.tp - 1)


def interleaved(topology: Topology, rank: int) -> MeshInfo:
    """dp is the fastest axis: ranks 0 and 2 are one replica, 1 and 3 the other."""
    tp_rank, dp_rank = divmod(rank, topology.dp_size)
    return MeshInfo(rank, topology.world_size, dp_rank, topology.dp_size, is_collect=tp_rank == 1)


@pytest.mark.parametrize(
    ("place", "dp_ranks", "collectors"), [(last_collects, [1, 1, 0, 0], [0, 2]), (interleaved, [0, 1, 0, 1], [2, 3])]
)
def test_the_order_of_ranks_is_the_engine_s_own(place: Place, dp_ranks: list[int], collectors: list[int]) -> None:
    batch = rollout()
    with run_on(1, {}) as one, run_on(4, {"tp": 2}, place) as many:
        assert [p.dp_rank for p in many.engine.places] == dp_ranks
        assert [p.rank for p in many.engine.places if p.is_collect] == collectors
        wanted, found = one.update(batch), many.update(batch)
        assert found["actor/pg_loss"] == pytest.approx(wanted["actor/pg_loss"], rel=1e-4)
        assert torch.allclose(many.actor.score(batch)["log_probs"], one.actor.score(batch)["log_probs"], atol=1e-5)
        for by_rank in many.sent("train_batch"):
            first, second = ([part for part, dp in zip(by_rank, dp_ranks, strict=True) if dp == d] for d in (0, 1))
            assert first[0] is first[1]
            assert second[0] is second[1]
            assert sorted(rows_in(first[0]) + rows_in(second[0])) == list(range(6))


def test_rows_without_a_gradient_leave_one_replica_idle_and_no_number_wrong() -> None:
    """One trajectory has a gradient: one replica trains it, the other runs with weight zero, and both step."""
    batch = rollout()
    with run_on(1, {}) as one, run_on(4, {"tp": 2}) as many:
        wanted, found = one.update(batch, keep={4}), many.update(batch, keep={4})
        assert found["actor/grad_norm"] == pytest.approx(wanted["actor/grad_norm"], rel=1e-4)
        assert found["actor/num_padding_micro_batches"] == 1
        for by_rank in many.sent("train_batch"):
            assert [part.is_padding for part in by_rank] == [False, False, True, True]
        assert [many.engines[rank].steps for rank in range(4)] == [2] * 4
        # No trajectory at all: both replicas still take the step, as one rank does.
        many.update(batch, keep=set())
        assert [many.engines[rank].steps for rank in range(4)] == [4] * 4
