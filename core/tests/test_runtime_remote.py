"""An engine over many ranks gives what it would on one: rows, order, weights, samples, and words for what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from remote_toys import PLAN, canned, numbered
from torch.utils._python_dispatch import TorchDispatchMode

from rlctl import balance
from rlctl.algorithms.losses import CrossEntropyLoss
from rlctl.batch import PackedBatch, padding_like
from rlctl.config.schema import ActorConfig
from rlctl.engine import TrainOutput
from rlctl.errors import BatchError, EngineError, GuardError
from rlctl.microbatch import MicroBatchPlan
from rlctl.roles.actor import ActorRole
from rlctl.roles.budget import SkipBudget
from rlctl.runtime import remote
from rlctl.runtime.remote import RemoteEngine
from rlctl.testing.fake_transport import CannedTransport


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), min_size=1, max_size=30),
    st.integers(1, 9),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_scores_come_back_in_order(
    rows: list[tuple[int, int]], dp_size: int, tp: int, balanced: bool, grouped: bool
) -> None:
    batch = numbered([n for n, _ in rows], [g for _, g in rows] if grouped else None)
    engine = canned(dp_size, tp, balance=balanced)
    found = engine.infer_batch(batch, PLAN, ("log_probs", "entropy"))
    assert list(found) == ["log_probs", "entropy"]
    for values in found.values():
        assert values.tolist() == list(range(1, batch.num_items + 1))
        assert values.dtype == torch.float32


def test_a_batch_without_rows_has_no_scores() -> None:
    empty = numbered([3, 2]).select([])
    for dp_size in (1, 3):
        assert canned(dp_size).infer_batch(empty, PLAN)["log_probs"].shape == (0,)


def test_a_padding_batch_is_padding_on_every_replica() -> None:
    engine = canned(3)
    batch = padding_like(numbered([3]))
    parts, _ = engine._split(batch)
    assert [p.is_padding for p in parts] == [True] * 3
    assert engine.infer_batch(batch, PLAN)["log_probs"].tolist() == [0.0, 0.0]


def test_balance_decides_who_gets_what() -> None:
    batch = numbered([9, 8, 1, 2])
    for balanced, wanted in ((True, [[0, 2], [1, 3]]), (False, [[0, 1], [2, 3]])):
        engine = canned(2, balance=balanced)
        assert engine._rows_by_part(batch) == wanted
        assert engine.seqlen_metrics(batch)["global_seqlen/balanced_max"] == (10.0 if balanced else 17.0)
        assert engine.seqlen_metrics(batch)["global_seqlen/max"] == 17.0
    assert canned(1).seqlen_metrics(batch) == {}


def test_groups_travel_and_stay_together() -> None:
    lengths = [Random(4).randrange(20, 30) for _ in range(24)]
    groups = [i % 6 for i in range(24)]
    parts, indices = canned(3)._split(numbered(lengths, groups))
    assert balance.num_pieces(groups, indices) == 6
    for part, rows in zip(parts, indices, strict=True):
        assert part.rows["group"].tolist() == [groups[i] for i in rows]
        assert len(set(part.rows["group"].tolist())) == 2


def test_a_batch_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To score, to train and for the metrics: one plan, made again when lengths or groups are others."""
    made: list[int] = []
    honest = balance.split_rows
    monkeypatch.setattr(remote, "split_rows", lambda *a, **k: made.append(len(a[0])) or honest(*a, **k))
    engine, batch = canned(3), numbered([4, 5, 6, 7])
    engine.infer_batch(batch, PLAN)
    engine.train_batch(batch.with_items(more=torch.zeros(22)), CrossEntropyLoss(), PLAN)
    engine.seqlen_metrics(batch)
    assert made == [4]
    engine.infer_batch(numbered([4, 5, 7, 6]), PLAN)
    engine.infer_batch(numbered([4, 5, 7, 6], [0, 0, 1, 1]), PLAN)
    engine.infer_batch(numbered([4, 5, 7, 6], [0, 1, 0, 1]), PLAN)
    assert made == [4, 4, 4, 4]


class ShortAnswers(CannedTransport):
    """Scores all tokens but one."""

    def _scores(self, batch: PackedBatch) -> torch.Tensor:
        return super()._scores(batch)[1:]


def test_scores_of_another_length_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = canned(2)
    monkeypatch.setattr(engine.group, "_transport", ShortAnswers(engine.places, "input_ids"))
    with pytest.raises(EngineError, match="dp rank 0 of actor scored another number of tokens") as caught:
        engine.infer_batch(numbered([4, 4]), PLAN)
    assert caught.value.found == "log_probs of shape (3,)"
    assert caught.value.wanted == "log_probs of shape (4,)"


def test_bad_rows_are_named_by_their_index_in_the_whole_batch() -> None:
    engine = canned(2)
    transport = engine.group._transport
    assert isinstance(transport, CannedTransport)
    sent = transport.num_sent
    with pytest.raises(BatchError, match=r"rows 3 \(9 tokens\)"):
        engine.train_batch(numbered([2, 3, 4, 9]), CrossEntropyLoss(), MicroBatchPlan(max_tokens=8))
    first_scored = numbered([2, 3, 4]).with_items(
        loss_mask=torch.tensor([False, True, True, True, True, False] + [True] * 3)
    )
    with pytest.raises(BatchError, match="rows 1"):
        engine.infer_batch(first_scored, PLAN)
    assert transport.num_sent == sent, "nothing left the controller"


# ---- what it costs --------------------------------------------------------------------------------------------------
class Operations(TorchDispatchMode):
    """Counts torch operations, and those that make a tensor of at least ``large`` items."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.total, self.large, self.threshold = 0, 0, large

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += 1
        if isinstance(out, torch.Tensor) and out.numel() >= self.threshold and not func.is_view:
            self.large += 1
        return out


def one_step(dp_size: int, num_rows: int, more_fields: int = 0, tp: int = 1) -> tuple[Operations, CannedTransport]:
    """Scores and one update of ``num_rows`` rows on simulated ranks."""
    random = Random(num_rows)
    lengths = [random.randrange(40, 90) for _ in range(num_rows)]
    batch = numbered(lengths, [i // 4 for i in range(num_rows)])
    fields = {f"field_{i}": torch.zeros(batch.num_items) for i in range(more_fields)}
    batch = batch.with_items(advantages=torch.ones(batch.num_items), **fields)
    engine = canned(dp_size, tp, echo=None)
    actor = ActorRole(engine, ActorConfig(), PLAN, 10, SkipBudget(3), check_rollout=False)
    operations = Operations(batch.num_items)
    with operations:
        ready = batch.with_items(old_log_probs=actor.score(batch)["log_probs"])
        actor.update(ready, num_rows, set(range(num_rows)), torch.Generator())
    transport = engine.group._transport
    assert isinstance(transport, CannedTransport)
    return operations, transport


def test_operations_of_a_step_do_not_grow_with_the_rows() -> None:
    """A controller of 1,024 ranks cannot afford one for each row, or for each field of each rank."""
    base, _ = one_step(8, 128)
    assert one_step(8, 512)[0].total == base.total
    # A field costs one, whatever the number of ranks: the mini-batch is a view of the batch.
    assert one_step(8, 128, more_fields=5)[0].total <= base.total + 5
    doubled, _ = one_step(16, 128)
    # A rank costs two: its answer is cut from a longer tensor by the simulation, and read.
    assert doubled.total - base.total <= 8 * 2
    assert base.total < 200


def test_tokens_are_moved_a_few_times_a_step() -> None:
    """Over all tokens: where the row weights come from, and the scores into order. No field is moved before it travels."""
    found = {dp: one_step(dp, 256, more_fields=9)[0].large for dp in (2, 32)}
    assert found[2] == found[32] <= 8


def test_a_call_is_packed_once_a_replica_and_sent_once_a_rank() -> None:
    for dp_size, tp in ((4, 1), (4, 3), (16, 2)):
        _, transport = one_step(dp_size, 64, tp=tp)
        # Start-up and build go to all in one packing each; then the scores and the update.
        assert transport.num_packed == 2 + 2 * dp_size
        assert transport.num_sent == 4 * dp_size * tp


# ---- what the replicas report ----------------------------------------------------------------------------------------
class ReportsOwnNumbers(CannedTransport):
    """Each replica reports what ``numbers`` gives for its dp rank."""

    numbers: Callable[[int, TrainOutput], TrainOutput]

    def _answer(self, rank: int, call: Any) -> Any:
        answer = super()._answer(rank, call)
        return self.numbers(self._places[rank].dp_rank, answer) if call.method == "train_batch" else answer


def reporting(numbers: Callable[[int, TrainOutput], TrainOutput], monkeypatch: pytest.MonkeyPatch) -> RemoteEngine:
    engine = canned(3)
    transport = ReportsOwnNumbers(engine.places)
    transport.numbers = numbers
    monkeypatch.setattr(engine.group, "_transport", transport)
    return engine


def with_norm(out: TrainOutput, norm: float) -> TrainOutput:
    return replace(out, step=replace(out.step, grad_norm=norm))


@pytest.mark.parametrize(
    ("what", "numbers", "found"),
    [
        ("loss", lambda dp, out: replace(out, loss=0.5 + 0.001 * (dp == 2)), "0.5 on dp rank 0, 0.501 on dp rank 2"),
        ("loss", lambda dp, out: replace(out, loss=float("nan") if dp else 0.5), "0.5 on dp rank 0, nan on dp rank 1"),
        ("grad norm", lambda dp, out: with_norm(out, 1.0 + dp), "1.0 on dp rank 0, 2.0 on dp rank 1"),
        (
            "number of micro-batches",
            lambda dp, out: replace(out, num_micro_batches=2 - (dp == 1)),
            "2.0 on dp rank 0, 1.0",
        ),
    ],
)
def test_replicas_that_disagree_stop_the_run(
    what: str, numbers: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = reporting(numbers, monkeypatch)
    with pytest.raises(GuardError, match=f"the replicas of actor report different values of the {what}") as caught:
        engine.train_batch(numbered([3, 4, 5]), CrossEntropyLoss(), PLAN)
    assert caught.value.found is not None
    assert caught.value.found.startswith(found)
    assert caught.value.wanted == "one value: it is reduced over all of them"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e-300])
def test_replicas_may_agree_on_any_number(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = reporting(
        lambda dp, out: with_norm(replace(out, loss=value * (1 + 1e-9 * dp), num_padding=dp), value), monkeypatch
    )
    out = engine.train_batch(numbered([3, 4, 5]), CrossEntropyLoss(), PLAN)
    assert out.num_padding == 0 + 1 + 2
