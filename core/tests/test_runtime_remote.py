"""An engine over many ranks gives what it would on one: rows, order, weights, samples, and words for what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlctl import balance
from rlctl.algorithms.losses import CrossEntropyLoss
from rlctl.batch import PackedBatch, pack, padding_like
from rlctl.config.schema import ActorConfig, OptimConfig
from rlctl.engine import Engine, MeshInfo, TrainOutput
from rlctl.errors import BatchError, EngineError, GuardError
from rlctl.generation import Completion, FinishReason, GenerateRequest, SamplingParams, ScoreRequest, TokenScores
from rlctl.hookspecs import hookimpl
from rlctl.logits import LogitsReader, LossOutput
from rlctl.microbatch import MicroBatchPlan
from rlctl.normalizer_modes import LossAggMode
from rlctl.records import BackendKind
from rlctl.roles.actor import ActorRole
from rlctl.roles.budget import SkipBudget
from rlctl.runtime import remote
from rlctl.runtime.group import WorkerGroup
from rlctl.runtime.records import Boot, BuildSpec, RankPlace
from rlctl.runtime.remote import RemoteEngine
from rlctl.runtime.worker import Worker
from rlctl.testing.fake_engine import FakeTrain, Place, by_topology, fake_train
from rlctl.testing.fake_transport import CannedTransport, Fabric, fake_group
from rlctl.topology import Topology

PLAN = MicroBatchPlan(max_rows=2)


# ---- many ranks that answer at once ----------------------------------------------------------------------------------
def canned(dp_size: int, tp: int = 1, echo: str | None = "input_ids", **engine: Any) -> RemoteEngine:
    """Ranks whose scores of a token are the token itself."""
    topology = Topology(dp_size * tp, dp_shard=dp_size, tp=tp)
    places = [RankPlace(r, topology.dp_rank(r), dp_size, topology.is_collector(r)) for r in range(topology.world_size)]
    boots = [Boot(rank=r, world_size=len(places)) for r in range(len(places))]
    group = WorkerGroup("canned", CannedTransport(places, echo), boots, Worker)
    group.start()
    spec = BuildSpec("actor", "train", "none", {}, {}, {})
    return RemoteEngine.build(group, spec, **engine)


def numbered(lengths: Sequence[int], groups: Sequence[int] | None = None) -> PackedBatch:
    """Every token has an id of its own, so that any mix-up shows."""
    at, rows = 1, []
    for n in lengths:
        rows.append(list(range(at, at + n)))
        at += n
    masks = [[t > 0 for t in range(n)] for n in lengths]
    batch = pack({"input_ids": rows, "loss_mask": masks}, dtypes={"loss_mask": torch.bool})
    return batch if groups is None else batch.with_rows(group=torch.tensor(groups))


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


# ---- real losses on simulated ranks ----------------------------------------------------------------------------------
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


# ---- rollout ---------------------------------------------------------------------------------------------------------
class Streams:
    """A rollout engine whose samples name their stream: (seed, row), the token of the prompt, and the replica."""

    def __init__(self, fabric: Fabric, rank: int, tp: int) -> None:
        self.fabric, self.rank, self.tp = fabric, rank, tp
        self.seeds: list[int | None] = []

    @hookimpl
    def rlctl_build_mesh(self, topology: Topology) -> MeshInfo:
        self.world = topology.world_size
        return by_topology(topology, self.rank)

    @hookimpl
    def rlctl_engine_init(self) -> Any:
        from rlctl.engine import EngineInfo

        return EngineInfo(1, 1000, "streams")

    @hookimpl
    def rlctl_generate(
        self, request: GenerateRequest, on_done: Callable[[Completion], None] | None
    ) -> list[Completion]:
        # As with sharded weights: every rank takes part, one without prompts too.
        self.seeds = self.fabric.gather(range(self.world), self.rank, request.params.seed, "weights")
        out = []
        for p, prompt in enumerate(request.prompts):
            for s in range(request.params.n):
                row = request.params.row_offset + p * request.params.n + s
                out.append(Completion(p, s, [prompt[0], row], [0.0, 0.0], FinishReason.LENGTH))
                if on_done is not None:
                    on_done(out[-1])
        return out

    @hookimpl
    def rlctl_score(self, request: ScoreRequest) -> list[TokenScores]:
        self.fabric.gather(range(self.world), self.rank, None, "weights")
        return [TokenScores([float(t) for t in ids]) for ids in request.sequences]

    @hookimpl
    def rlctl_load_weights(self, weights: Any) -> dict[str, Any]:
        return {"loaded": [], "missing": []}

    @hookimpl
    def rlctl_weight_fingerprint(self, names: Sequence[str]) -> dict[str, str]:
        return {}


@contextmanager
def rollout(replicas: int, tp: int = 1) -> Iterator[tuple[RemoteEngine, list[Streams]]]:
    made: dict[int, Streams] = {}

    def make(spec: BuildSpec, boot: Boot, fabric: Fabric) -> Engine:
        made[boot.rank] = Streams(fabric, boot.rank, tp)
        return Engine(made[boot.rank], BackendKind.ROLLOUT, spec.backend)

    group = fake_group(replicas * tp, make, timeout_s=5.0)
    try:
        spec = BuildSpec("rollout", "rollout", "streams", {}, {}, {"dp_shard": 1, "dp_replicate": replicas, "tp": tp})
        yield RemoteEngine.build(group, spec), [made[r] for r in sorted(made)]
    finally:
        group.close()


@pytest.mark.parametrize(("replicas", "tp"), [(1, 1), (2, 1), (3, 2), (5, 1)])
@pytest.mark.parametrize("num_prompts", [0, 1, 2, 4, 7])
def test_rows_sample_the_same_on_any_replica(replicas: int, tp: int, num_prompts: int) -> None:
    prompts = [[100 + p, 1] for p in range(num_prompts)]
    with rollout(replicas, tp) as (engine, _):
        for n, offset in ((1, 0), (3, 0), (2, 40)):
            done: list[int] = []
            params = SamplingParams(n=n, seed=9, row_offset=offset)
            out = engine.generate(GenerateRequest(prompts, params), done.append)
            assert [(c.prompt_index, c.sample_index) for c in out] == [
                (p, s) for p in range(num_prompts) for s in range(n)
            ]
            assert [c.token_ids for c in out] == [[100 + i // n, offset + i] for i in range(num_prompts * n)]
            assert sum(done) == num_prompts * n, "each completion once, whatever the number of ranks that made it"


def test_one_fresh_seed_for_all_ranks() -> None:
    with rollout(2, tp=2) as (engine, ranks):
        seen = []
        for _ in range(2):
            engine.generate(GenerateRequest([[1], [2]], SamplingParams()))
            assert len(set(ranks[0].seeds)) == 1
            seen.append(ranks[0].seeds[0])
        assert None not in seen
        assert seen[0] != seen[1], "no seed means another one each time"


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_score_restores_the_order(replicas: int) -> None:
    random = Random(2)
    sequences = [[random.randrange(900) for _ in range(random.randrange(1, 40))] for _ in range(5)]
    with rollout(replicas) as (engine, _):
        found = engine.score(ScoreRequest(sequences, temperature=0.7))
        assert [s.log_probs for s in found] == [[float(t) for t in ids] for ids in sequences]
        assert engine.score(ScoreRequest([])) == []
