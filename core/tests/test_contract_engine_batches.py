"""What the facade works out itself: counts, orders, weights and metrics over data parallel ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from facade_toys import Reader, ToyTrain, batch_of, built, loss

from rlctl.batch import PackedBatch, padding_like
from rlctl.engine import MeshInfo, MicroOutput
from rlctl.errors import BatchError, EngineError
from rlctl.hookspecs import hookimpl
from rlctl.logits import LossOutput
from rlctl.microbatch import MicroBatchPlan


def test_train_batch_runs_in_order() -> None:
    provider = ToyTrain()
    out = built(provider).train_batch(batch_of([3, 2, 4]), loss, MicroBatchPlan(max_rows=2))
    assert provider.log == ["mesh", "init False", "train True", "forward [False, False]", "step"]
    # Scored ids: 2, 3 | 5 | 7, 8, 9; token-mean of minus the id.
    assert out.loss == pytest.approx(-34 / 6)
    assert out.sums == pytest.approx({"a": -34 / 6, "b": 3.0})
    assert out.maxes == {"top": -2.0}
    assert (out.num_micro_batches, out.step.grad_norm) == (2, 1.0)


def test_weights_that_the_caller_gives_are_kept() -> None:
    batch = batch_of([3]).with_items(item_weight=torch.tensor([0.0, 10.0, 0.0]))
    assert built().train_batch(batch, loss, MicroBatchPlan(max_rows=1)).loss == -20.0
    assert built().eval_loss(batch, loss, MicroBatchPlan(max_rows=1))[0] == -20.0


@pytest.mark.parametrize("plan", [MicroBatchPlan(max_rows=1), MicroBatchPlan(max_rows=9), MicroBatchPlan(max_tokens=6)])
def test_infer_batch_keeps_the_order_of_its_batch(plan: MicroBatchPlan) -> None:
    provider = ToyTrain()
    batch = batch_of([2, 6, 1, 3])
    out = built(provider).infer_batch(batch, plan, ("log_probs", "entropy"))
    assert torch.equal(out["log_probs"], Reader(batch).log_prob())
    assert torch.equal(out["entropy"], Reader(batch).entropy())
    assert "train False" in provider.log
    assert "step" not in provider.log


def test_infer_batch_needs_something_to_compute() -> None:
    with pytest.raises(AssertionError):
        built().infer_batch(batch_of([2]), MicroBatchPlan(max_rows=1), ())


class OneOfTwo(ToyTrain):
    """Rank 0 of two; ``other`` is what rank 1 would have sent to each reduction, in order."""

    def __init__(self, other: list[list[float]], **mesh: Any) -> None:
        super().__init__(MeshInfo(world_size=2, dp_size=2, **mesh))
        self.other = list(other)
        self.seen: list[list[float]] = []

    @hookimpl
    def rlctl_reduce(self, values: Sequence[float], op: str) -> list[float]:
        self.seen.append(list(values))
        theirs = self.other.pop(0) if self.other else list(values)
        join = {"sum": lambda a, b: a + b, "max": max, "min": min}[op]
        return [join(a, b) for a, b in zip(values, theirs, strict=True)]


def test_the_count_is_the_largest_of_all_ranks() -> None:
    # Reductions in order: longest row and rows scored from their start, then the number of micro-batches.
    engine = built(OneOfTwo([[4, 0], [5]], count_multiple=4))
    micro_batches, groups = engine.micro_batches(batch_of([4, 2]), MicroBatchPlan(max_tokens=4))
    assert len(micro_batches) == len(groups) == 8
    assert [b.is_padding for b in micro_batches] == [False] * 2 + [True] * 6
    assert groups == [[0], [1]] + [[]] * 6


def test_the_token_budget_grows_with_the_sequence_parallel_size() -> None:
    engine = built(ToyTrain(MeshInfo(token_multiplier=2)))
    micro_batches, _ = engine.micro_batches(batch_of([4, 4]), MicroBatchPlan(max_tokens=4))
    assert len(micro_batches) == 1
    micro_batches, _ = engine.micro_batches(batch_of([4, 4]), MicroBatchPlan(max_rows=1))
    assert len(micro_batches) == 2


def test_every_rank_refuses_an_over_long_row() -> None:
    plan = MicroBatchPlan(max_tokens=4)
    with pytest.raises(BatchError, match="another rank has a row longer"):
        built(OneOfTwo([[9, 0]])).micro_batches(batch_of([3]), plan)
    own = OneOfTwo([[3, 0]])
    with pytest.raises(BatchError, match="1 row is longer"):
        built(own).micro_batches(batch_of([9]), plan)
    assert own.seen == [[9, 0]], "this rank took part in the reduction that its peers wait for"


def test_every_rank_refuses_a_first_token_in_the_loss() -> None:
    batch = batch_of([2, 3]).with_items(loss_mask=torch.tensor([False, True, True, True, True]))
    with pytest.raises(BatchError, match="first token") as caught:
        built(OneOfTwo([[3, 0]])).micro_batches(batch, MicroBatchPlan(max_rows=2))
    assert caught.value.found == "rows 1"
    with pytest.raises(BatchError, match="first token") as caught:
        built(OneOfTwo([[3, 1]])).micro_batches(batch_of([2]), MicroBatchPlan(max_rows=2))
    assert caught.value.found == "a row of another rank"


def test_metrics_add_up_over_ranks() -> None:
    # Reductions: global counts, row checks, number of micro-batches, agreement on names, sums, maxima.
    provider = OneOfTwo([[2, 1], [3, 0], [1]])
    engine = built(provider)
    out = engine.train_batch(batch_of([3]), loss, MicroBatchPlan(max_rows=1))
    assert provider.seen[0] == [2.0, 1.0]
    # Two of four scored tokens are here (ids 2 and 3); the other rank, by default, sends the same as this one.
    assert out.loss == pytest.approx(2 * -(2 + 3) / 4)
    assert out.sums["b"] == 2.0
    assert out.maxes == {"top": -2.0}


def test_padding_never_wins_a_maximum() -> None:
    # This rank has no row at all: its padding micro-batch reports 0, which is more than every real value.
    provider = OneOfTwo([[2, 1], [3, 0], [1]])
    out = built(provider).train_batch(batch_of([3]).select([]), loss, MicroBatchPlan(max_rows=1))
    assert "forward [True]" in provider.log
    assert out.maxes == {"top": float("-inf")}


def test_ranks_with_other_metric_names_are_told_so() -> None:
    provider = OneOfTwo([[2, 1], [3, 0], [1], [-5.0, 5.0]])
    with pytest.raises(EngineError, match="metrics of different names") as caught:
        built(provider).train_batch(batch_of([3]), loss, MicroBatchPlan(max_rows=1))
    assert caught.value.found == "a, b, top"


def test_one_output_for_each_micro_batch() -> None:
    class Drops(ToyTrain):
        @hookimpl
        def rlctl_forward_backward(self, micro_batches: Sequence[PackedBatch], loss_fn: Any) -> list[MicroOutput]:
            return [MicroOutput(0.0, {}, {}, {}) for b in micro_batches if not b.is_padding]

    engine = built(Drops(MeshInfo(count_multiple=2)))
    with pytest.raises(EngineError, match="left micro-batches out"):
        engine.train_batch(batch_of([3]), loss, MicroBatchPlan(max_rows=1))


def test_the_facade_calls_hooks_completely() -> None:
    """pluggy only warns about a keyword that a call leaves out; here such a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = built(provider := ToyTrain())
        batch = batch_of([3, 2])
        engine.train_batch(batch, loss, MicroBatchPlan(max_rows=1))
        engine.infer_batch(batch, MicroBatchPlan(max_rows=1))
        engine.eval_loss(batch, loss, MicroBatchPlan(max_rows=1), "seq-mean-token-sum-norm", norm_length=4)
        list(engine.export_weights("float32"))
        engine.move("cpu", "model")
        engine.set_mode(True)
        engine.save_state("x")  # type: ignore[arg-type]
        engine.load_state("x")  # type: ignore[arg-type]
        engine.forward_backward([padding_like(batch)], lambda r, b: LossOutput(torch.tensor(0.0)), forward_only=True)
        engine.release("weights")
        engine.resume("weights")
        engine.shutdown()
    assert provider.exported == 3
    assert "move cpu ['model']" in provider.log
