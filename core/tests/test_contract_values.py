"""Value models in the contract: which head an engine is told, what can be asked of it, and how values line up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from facade_toys import Reader, ToyTrain, batch_of, built

from rlctl.batch import PackedBatch, pack
from rlctl.engine import Engine, EngineInfo, MeshInfo
from rlctl.errors import EngineError
from rlctl.hookspecs import hookimpl
from rlctl.microbatch import MicroBatchPlan
from rlctl.readers import DenseValueReader
from rlctl.records import BackendKind
from rlctl.runtime.records import Boot, BuildSpec
from rlctl.runtime.worker import Worker
from rlctl.topology import Topology


class Told(ToyTrain):
    """Keeps the ``model`` section."""

    @hookimpl
    def rlctl_engine_init(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, mesh: MeshInfo, model: Mapping[str, Any], forward_only: bool
    ) -> EngineInfo:
        self.model = dict(model)
        return EngineInfo(num_parameters=1, vocab_size=4, model_family="toy")


def value_engine(provider: ToyTrain | None = None) -> Engine:
    engine = Engine(provider or ToyTrain(), BackendKind.TRAIN, "toy")
    engine.build(Topology(), {}, {"model_type": "value_model"})
    return engine


def test_engines_are_told_their_head() -> None:
    told = Told()
    built(told)
    assert told.model == {"model_type": "language_model"}
    value_engine(told)
    assert told.model == {"model_type": "value_model"}
    with pytest.raises(ValueError, match="reward_model"):
        Engine(Told(), BackendKind.TRAIN, "toy").build(Topology(), {}, {"model_type": "reward_model"})


def test_a_worker_tells_the_engine_the_head_of_its_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    worker = Worker(Boot(), plugins=None)  # type: ignore[arg-type]
    monkeypatch.setattr(worker, "_create", lambda *_: Engine(told, BackendKind.TRAIN, "toy"))
    worker.build(BuildSpec("critic", "train", "toy", {"path": "x"}, {}, {}, model_type="value_model"))
    assert told.model == {"path": "x", "model_type": "value_model"}


def test_scores_of_another_head_are_refused_in_words() -> None:
    provider = ToyTrain()
    batch, plan = batch_of([3, 2]), MicroBatchPlan(max_rows=1)
    with pytest.raises(EngineError, match="'toy' holds a value_model, which has no log_probs and no entropy") as caught:
        value_engine(provider).infer_batch(batch, plan, ("values", "log_probs", "entropy"))
    assert "language_model" in str(caught.value.wanted)
    with pytest.raises(EngineError, match="language_model, which has no values") as caught:
        built(provider).infer_batch(batch, plan, ("values",))
    assert caught.value.next == "build the engine with model_type value_model"
    assert not any(entry.startswith("forward") for entry in provider.log)


def test_values_come_back_in_the_order_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def values(self: Reader) -> torch.Tensor:
        return torch.where(self.batch.items["loss_mask"], self.batch.items["input_ids"].float() / 2, 0.0)

    monkeypatch.setattr(Reader, "values", values, raising=False)
    batch = batch_of([4, 1, 3, 2])
    found = value_engine().infer_batch(batch, MicroBatchPlan(max_tokens=4), ("values",))
    assert list(found) == ["values"]
    assert torch.equal(found["values"], torch.where(batch.items["loss_mask"], batch.items["input_ids"] / 2, 0.0))
    assert found["values"].dtype == torch.float32


def scored() -> PackedBatch:
    masks = [[False, True, True], [False, False, False], [False, True]]
    return pack({"input_ids": [[1, 2, 3], [4, 5, 6], [7, 8]], "loss_mask": masks}, dtypes={"loss_mask": torch.bool})


def test_a_value_is_that_of_the_state_before_its_token() -> None:
    outputs = torch.arange(8.0, dtype=torch.float64, requires_grad=True)
    found = DenseValueReader(outputs, scored()).values()
    assert found.dtype == torch.float32
    assert found.tolist() == [0, 0, 1, 0, 0, 0, 0, 6]
    found.sum().backward()
    assert outputs.grad is not None
    # What the head says of a row's last token, or where nothing is scored, is nobody's value.
    assert outputs.grad.tolist() == [1, 1, 0, 0, 0, 0, 1, 0]


def test_values_of_nothing_still_hang_on_the_graph() -> None:
    batch = scored().with_items(loss_mask=torch.zeros(8, dtype=torch.bool))
    outputs = torch.ones(8, requires_grad=True)
    DenseValueReader(outputs, batch).values().sum().backward()
    assert outputs.grad is not None
    assert outputs.grad.tolist() == [0.0] * 8
