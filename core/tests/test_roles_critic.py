"""The critic's part of a batch: its mini-batches, the numbers it reports, rows without a trained token."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from rlctl.batch import PackedBatch, pack
from rlctl.config.schema_critic import CriticConfig
from rlctl.engine_records import StepOutput, TrainOutput
from rlctl.logits import LossFn
from rlctl.microbatch import MicroBatchPlan
from rlctl.normalizer_modes import LossAggMode
from rlctl.readers import DenseValueReader
from rlctl.roles.budget import NonFiniteStepsError, SkipBudget
from rlctl.roles.critic import CriticRole
from rlctl.runtime.remote import RemoteEngine


class OneNumber:
    """A value model that says one number everywhere, and learns it by plain gradient descent."""

    def __init__(self, value: float, lr: float) -> None:
        self.value, self.lr = torch.tensor(value, requires_grad=True), lr
        self.batches: list[PackedBatch] = []
        self.skipped = False

    def infer_batch(self, batch: PackedBatch, plan: MicroBatchPlan, want: tuple[str, ...]) -> dict[str, torch.Tensor]:
        assert want == ("values",)
        said = DenseValueReader(self.value.detach().expand(batch.num_items), batch).values()
        return {"values": said}

    def train_batch(
        self, batch: PackedBatch, loss_fn: LossFn, plan: MicroBatchPlan, mode: LossAggMode, norm_length: int
    ) -> TrainOutput:
        self.batches.append(batch)
        out = loss_fn(cast("Any", DenseValueReader(self.value.expand(batch.num_items), batch)), batch)
        (gradient,) = torch.autograd.grad(out.loss, self.value)
        with torch.no_grad():
            self.value -= self.lr * gradient
        sums = {name: float(torch.as_tensor(number).detach()) for name, number in out.sums.items()}
        return TrainOutput(
            float(out.loss.detach()), sums, {}, StepOutput(abs(float(gradient)), self.lr, self.skipped), 1
        )


def role(engine: OneNumber, epochs: int = 1, **settings: Any) -> CriticRole:
    config = CriticConfig(**settings)
    return CriticRole(
        cast("RemoteEngine", engine), config, MicroBatchPlan(max_rows=2), 2, epochs, 4, SkipBudget(0, "critic.optim.lr")
    )


def made(engine: OneNumber, masks: list[list[int]], returns: list[float]) -> PackedBatch:
    """Rows of one return; advantages are what is left of it, and something only an actor reads."""
    batch = pack(
        {
            "input_ids": [[1] * len(row) for row in masks],
            "loss_mask": masks,
            "returns": [[value] * len(row) for value, row in zip(returns, masks, strict=True)],
            "old_log_probs": [[-1.0] * len(row) for row in masks],
        },
        dtypes={"loss_mask": torch.bool, "returns": torch.float32, "old_log_probs": torch.float32},
    )
    values = role(engine).values(batch)
    return batch.with_items(values=values, advantages=batch.items["returns"] - values)


@pytest.mark.parametrize("mode", list(LossAggMode))
def test_the_numbers_are_those_of_the_batch_and_of_the_steps(mode: LossAggMode) -> None:
    engine = OneNumber(0.25, lr=1e-3)
    batch = made(engine, [[0, 1, 1], [0, 1], [0, 0, 1], [0, 1, 1, 1]], [1.0, 0.0, 1.0, 0.0])
    m = role(engine, loss_agg_mode=mode).update(batch, torch.Generator())
    assert [part.num_rows for part in engine.batches] == [2, 2]
    assert all(
        set(part.items) == {"input_ids", "loss_mask", "returns", "old_values", "item_weight"} for part in engine.batches
    )
    assert m["critic/num_steps"] == 2
    # Three of the seven trained tokens return 1, the others 0; a constant explains nothing.
    assert m["critic/returns/mean"] == pytest.approx(3 / 7)
    assert m["critic/advantages/mean"] == pytest.approx(3 / 7 - 0.25)
    assert (m["critic/values/min"], m["critic/values/mean"], m["critic/values/max"]) == (0.25, 0.25, 0.25)
    assert m["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-12)
    # Means over trained tokens, whatever the weights add up to.
    assert m["critic/vpred_mean"] == pytest.approx(0.25, abs=2e-3)
    assert m["critic/vf_clipfrac"] == 0.0
    if mode is LossAggMode.TOKEN_MEAN:
        one, two = (2 * 0.75**2 + 0.25**2) / 3 / 2, (0.75**2 + 3 * 0.25**2) / 4 / 2
        assert m["critic/vf_loss"] == pytest.approx((one + two) / 2, abs=1e-3)


def test_a_mini_batch_without_a_trained_token_reports_nothing_and_moves_nothing() -> None:
    engine = OneNumber(0.5, lr=1.0)
    batch = made(engine, [[0, 1], [0, 1], [0, 0], [0, 0, 0]], [1.0, 1.0, 9.0, 9.0])
    m = role(engine).update(batch, torch.Generator())
    assert m["critic/vf_loss"] == pytest.approx(0.125), "of the one step that saw something"
    assert m["critic/vpred_mean"] == pytest.approx(0.5)
    assert m["critic/num_steps"] == 2
    assert float(engine.value) == pytest.approx(1.0)
    silent = OneNumber(0.5, lr=1.0)
    m = role(silent).update(made(silent, [[0, 0], [0, 0]], [1.0, 1.0]), torch.Generator())
    assert not {"critic/vf_loss", "critic/vpred_mean", "critic/values/mean", "critic/vf_explained_var"} & m.keys()
    assert float(silent.value) == 0.5


def test_passes_after_the_first_mix_the_rows_and_the_bound_holds() -> None:
    engine = OneNumber(0.0, lr=1.0)
    masks = [[0] * n + [1] for n in range(1, 9)]
    batch = made(engine, masks, [1.0] * 8)
    m = role(engine, epochs=3, value_clip=0.5).update(batch, torch.Generator().manual_seed(0))
    lengths = [[int(n) for n in part.cu_seqlens.diff()] for part in engine.batches]
    first, later = lengths[:4], lengths[4:]
    assert first == [[2, 3], [4, 5], [6, 7], [8, 9]]
    assert later[:4] != first
    for start in (0, 4):
        assert sorted(n for step in later[start : start + 4] for n in step) == list(range(2, 10))
    # The first step goes the whole way to 1, beyond the bound: at it the error is 0.5, and nothing pulls any more.
    assert float(engine.value) == 1.0
    assert m["critic/vf_clipfrac"] == pytest.approx(11 / 12)


def test_steps_that_are_skipped_stop_the_run_with_the_critic_s_setting() -> None:
    engine = OneNumber(0.0, lr=1.0)
    engine.skipped = True
    with pytest.raises(NonFiniteStepsError, match=r"critic\.optim\.lr"):
        role(engine).update(made(engine, [[0, 1], [0, 1]], [1.0, 1.0]), torch.Generator())
