"""Simulated ranks wait for one another, agree with one rank to rounding, and say who fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rlctl.algorithms.losses import CrossEntropyLoss
from rlctl.batch import PackedBatch, pack
from rlctl.config.schema import OptimConfig
from rlctl.engine import MicroOutput
from rlctl.errors import EngineError
from rlctl.hookspecs import hookimpl
from rlctl.microbatch import MicroBatchPlan
from rlctl.runtime.failures import WorkerError
from rlctl.runtime.group import WorkerGroup
from rlctl.runtime.records import BuildSpec
from rlctl.runtime.remote import RemoteEngine
from rlctl.testing.fake_engine import FakeTrain, fake_train
from rlctl.testing.fake_transport import Fabric, FabricError, FakeTransport, fake_group

MODEL = {"config": {"vocab": 16, "hidden": 12}, "seed": 3}
SGD = OptimConfig(name="sgd", lr=0.5, clip_grad=0.0).model_dump()


def spec(axes: Mapping[str, int], **changes: Any) -> BuildSpec:
    return BuildSpec(
        **{
            "role": "actor",
            "kind": "train",
            "backend": "fake",
            "model": MODEL,
            "engine": {},
            "axes": axes,
            "optimizer": SGD,
            **changes,
        }
    )


@contextmanager
def engine_on(world_size: int, axes: Mapping[str, int] | None = None, **maker: Any) -> Iterator[RemoteEngine]:
    group = fake_group(world_size, fake_train(**maker), timeout_s=5.0)
    try:
        yield RemoteEngine.build(group, spec(axes or {}))
    finally:
        group.close()


def batch_of(lengths: Sequence[int], seed: int = 0) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 16, (n,), generator=generator) for n in lengths]
    masks = [[t > n // 3 or t == n - 1 > 0 for t in range(n)] for n in lengths]
    return pack({"input_ids": ids, "loss_mask": masks}, dtypes={"loss_mask": torch.bool})


# ---- the fabric ------------------------------------------------------------------------------------------------------
def meet(fabric: Fabric, calls: Mapping[int, tuple[Sequence[int], Any, str]]) -> dict[int, Any]:
    """What each rank gets from its ``gather``, or the error that it raises."""

    def one(rank: int) -> Any:
        group, value, what = calls[rank]
        try:
            return fabric.gather(group, rank, value, what)
        except FabricError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return dict(zip(calls, pool.map(one, calls), strict=True))


def test_gather_orders_by_the_group() -> None:
    fabric = Fabric()
    for turn in range(50):
        found = meet(fabric, {r: ((2, 0, 1), (r, turn), "sum") for r in range(3)})
        assert found == {r: [(2, turn), (0, turn), (1, turn)] for r in range(3)}
    pairs = meet(fabric, {r: ((r % 2, r % 2 + 2), r, "pair") for r in range(4)})
    assert pairs == {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}


def test_ranks_in_different_collectives_are_told() -> None:
    found = meet(Fabric(), {0: ((0, 1), 1, "gradients"), 1: ((0, 1), 1, "reduce sum")})
    for error in found.values():
        assert "different collectives (rank 0: gradients, rank 1: reduce sum)" in str(error)


def test_nobody_waits_for_ever() -> None:
    with pytest.raises(FabricError, match="rank 0 waits for a peer that is gone or elsewhere, in gradients"):
        Fabric(timeout_s=0.05).gather((0, 1), 0, None, "gradients")
    fabric = Fabric(timeout_s=60)
    threading.Timer(0.05, fabric.abort).start()
    with pytest.raises(FabricError, match="gone"):
        fabric.gather((0, 1), 0, None, "gradients")
    with pytest.raises(FabricError, match="gone"):
        fabric.gather((0, 2), 0, None, "a meeting that begins after the end")


# ---- the engine ------------------------------------------------------------------------------------------------------
BATCH = batch_of([7, 3, 12, 2, 5, 9, 1, 4])


def three_steps(engine: RemoteEngine, plan: MicroBatchPlan) -> list[tuple[float, float, torch.Tensor]]:
    """Loss, gradient norm and the log-probs after each step."""
    out = []
    for _ in range(3):
        done = engine.train_batch(BATCH, CrossEntropyLoss(), plan)
        out.append((done.loss, done.step.grad_norm, engine.infer_batch(BATCH, plan)["log_probs"]))
    return out


@pytest.mark.parametrize(
    ("world_size", "axes"),
    [(2, {}), (4, {"tp": 2}), (4, {"dp_replicate": 2}), (6, {"pp": 3}), (8, {"tp": 2, "cp": 2}), (3, {"tp": 3})],
)
@pytest.mark.parametrize("plan", [MicroBatchPlan(max_tokens=14), MicroBatchPlan(max_rows=1)], ids=["tokens", "rows"])
def test_simulated_ranks_learn_what_one_rank_learns(
    world_size: int, axes: dict[str, int], plan: MicroBatchPlan
) -> None:
    with engine_on(1) as one, engine_on(world_size, axes) as many:
        for alone, together in zip(three_steps(one, plan), three_steps(many, plan), strict=True):
            assert together[:2] == pytest.approx(alone[:2], rel=1e-5)
            assert torch.allclose(together[2], alone[2], atol=1e-5)


def test_more_replicas_than_rows() -> None:
    """A replica without rows takes part in every collective and changes nothing."""
    batch = batch_of([5, 3, 6])
    plan = MicroBatchPlan(max_tokens=8)
    with engine_on(1) as one, engine_on(5) as many:
        for _ in range(2):
            a = one.train_batch(batch, CrossEntropyLoss(), plan)
            b = many.train_batch(batch, CrossEntropyLoss(), plan)
            assert (b.loss, b.step.grad_norm) == pytest.approx((a.loss, a.step.grad_norm), rel=1e-5)
            assert (a.num_micro_batches, a.num_padding) == (2, 0)
            assert (b.num_micro_batches, b.num_padding) == (1, 2)
        wanted, found = (e.infer_batch(batch, plan)["log_probs"] for e in (one, many))
        assert torch.allclose(found, wanted, atol=1e-5)
        assert many.eval_loss(batch, CrossEntropyLoss(), plan)[0] == pytest.approx(
            one.eval_loss(batch, CrossEntropyLoss(), plan)[0], rel=1e-5
        )


def test_ranks_that_get_different_rows_refuse() -> None:
    """A replica whose ranks hold other rows computes nonsense without a word; this one has the word."""
    with engine_on(2, {"tp": 2}) as engine:
        wrong = [
            (engine.role, batch_of([4], seed), CrossEntropyLoss(), MicroBatchPlan(max_rows=1), "token-mean", None)
            for seed in (0, 1)
        ]
        with pytest.raises(EngineError, match="the ranks of dp rank 0 were given different rows"):
            engine.group._run("train_batch", wrong, doing="a broken dispatch")


class OneBreaks(FakeTrain):
    """Rank 1 fails in its second micro-batch, while rank 0 waits for it."""

    @hookimpl
    def rlctl_forward_backward(self, micro_batches: Any, loss_fn: Any, forward_only: bool) -> list[MicroOutput]:
        seen: list[PackedBatch] = []

        def loss(reader: Any, batch: PackedBatch) -> Any:
            seen.append(batch)
            if self._rank == 1 and len(seen) == 2:
                raise ZeroDivisionError("a fault of its own")
            return loss_fn(reader, batch)

        return FakeTrain.rlctl_forward_backward(self, micro_batches, loss, forward_only)


def test_the_rank_that_fails_is_named_and_not_those_that_wait() -> None:
    with engine_on(3, kind=OneBreaks) as engine:
        with pytest.raises(WorkerError, match=r"rank 1 .*ZeroDivisionError: a fault of its own"):
            engine.train_batch(BATCH, CrossEntropyLoss(), MicroBatchPlan(max_rows=1))
        assert engine.group.closed


def test_no_thread_is_left() -> None:
    with engine_on(4) as engine:
        transport = engine.group._transport
        assert isinstance(transport, FakeTransport)
        assert transport.name == engine.group.transport == "fake"
        assert [t.is_alive() for t in transport._threads] == [True] * 4
    assert [t.is_alive() for t in transport._threads] == [False] * 4


def test_each_call_is_packed_once_a_replica() -> None:
    with engine_on(6, {"tp": 3}) as engine:
        transport = engine.group._transport
        assert isinstance(transport, FakeTransport)
        packed, sent = len(transport.packed), len(transport.sent)
        engine.infer_batch(BATCH, MicroBatchPlan(max_rows=2))
        assert (len(transport.packed) - packed, len(transport.sent) - sent) == (2, 6)
        assert [rank for rank, _ in transport.sent[-6:]] == list(range(6))
        engine.memory()
        assert (len(transport.packed) - packed, len(transport.sent) - sent) == (3, 12)


def test_state_goes_to_every_rank(tmp_path: Any) -> None:
    plan = MicroBatchPlan(max_tokens=14)
    with engine_on(4, {"tp": 2}) as engine:
        engine.train_batch(BATCH, CrossEntropyLoss(), plan)
        engine.save_state(tmp_path)
        before = three_steps(engine, plan)
        engine.load_state(tmp_path)
        again = three_steps(engine, plan)
    assert [x[:2] for x in before] == [x[:2] for x in again]


def test_groups_are_of_the_worker_group_kind() -> None:
    group = fake_group(2, fake_train())
    assert isinstance(group, WorkerGroup)
    assert [h.rank for h in group.hellos] == [0, 1]
    assert not group.inline
    group.close()
    group.close()
    assert group.closed
