"""What an engine keeps, gives back and leaves behind: main weights over a resume, gradients of a failed call, memory, processes."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from rlctl.algorithms.losses import CrossEntropyLoss
from rlctl.batch import PackedBatch, pack
from rlctl.engine import Engine
from rlctl.errors import BatchError
from rlctl.logits import LossOutput
from rlctl.microbatch import MicroBatchPlan
from rlctl.records import BackendKind
from rlctl.topology import resolve
from rlctl.verify import tiny
from rlctl_megatron.standins import prepare

prepare("cpu")

from rlctl_megatron import build  # noqa: E402
from rlctl_megatron.engine import MegatronEngine  # noqa: E402

PLAN = MicroBatchPlan(max_rows=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tiny(tiny.TinyModel(family="qwen3"), tmp_path_factory.mktemp("model"))


def built(directory: Path, name: str = "adamw", distributed: str = "never") -> Engine:
    engine = Engine(MegatronEngine(), BackendKind.TRAIN, "megatron")
    settings = {"device": "cpu", "distributed_optimizer": distributed}
    engine.build(resolve(1, {}), settings, {"path": str(directory), "seed": 0}, {"lr": 1e-2, "name": name})
    return engine


def batch() -> PackedBatch:
    mask = [[False, True, True, True, True], [False, True, True]]
    return pack({"input_ids": [[1, 2, 3, 4, 5], [7, 8, 9]], "loss_mask": mask}, dtypes={"loss_mask": torch.bool})


def exported(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


@pytest.mark.parametrize(
    ("name", "steps", "distributed"),
    [("sgd", 2, "never"), ("adamw", 0, "never"), ("adamw", 0, "always"), ("adamw", 2, "never"), ("adamw", 2, "always")],
)
def test_main_weights_beside_bfloat16_are_what_a_resume_goes_on_with(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, steps: int, distributed: str
) -> None:
    monkeypatch.setattr(build, "compute_dtype", lambda *_: torch.bfloat16)  # refused on a CPU otherwise
    first = built(directory, name, distributed)
    for _ in range(steps):
        first.train_batch(batch(), CrossEntropyLoss(), PLAN)
    wanted = exported(first)
    first.save_state(tmp_path)
    first.shutdown()
    second = built(directory, name, distributed)
    second.load_state(tmp_path)
    found = exported(second)
    second.shutdown()
    assert {t.dtype for t in found.values()} == {torch.float32}
    assert any(not torch.equal(t, t.bfloat16().float()) for t in wanted.values())  # else rounding would show nothing
    assert all(torch.equal(found[k], wanted[k]) for k in wanted)


def test_a_call_that_fails_adds_nothing_to_the_next(directory: Path) -> None:
    engine = built(directory, "sgd")
    calls = [0]

    def failing(reader: object, rows: PackedBatch) -> LossOutput:
        calls[0] += 1
        if calls[0] == 2:
            raise BatchError("the second micro-batch")
        return CrossEntropyLoss()(reader, rows)

    with pytest.raises(BatchError):
        engine.train_batch(batch(), failing, PLAN)
    after = engine.train_batch(batch(), CrossEntropyLoss(), PLAN).step.grad_norm
    engine.shutdown()
    fresh = built(directory, "sgd")
    wanted = fresh.train_batch(batch(), CrossEntropyLoss(), PLAN).step.grad_norm
    fresh.shutdown()
    assert after == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("distributed", ["never", "always"])
def test_an_engine_that_has_ended_is_gone(tmp_path: Path, family: str, distributed: str) -> None:
    """megatron-core ties gradient nodes and buffers into a circle, and keeps rotary embeddings in a cache."""
    experts = 4 if family == "qwen3_moe" else 0
    directory = tiny.write_tiny(tiny.TinyModel(family=family, num_experts=experts), tmp_path / "model")
    threads = []
    for number in range(2):
        provider = MegatronEngine()
        engine = Engine(provider, BackendKind.TRAIN, "megatron")
        settings = {"device": "cpu", "distributed_optimizer": distributed}
        engine.build(resolve(1, {}), settings, {"path": str(directory), "seed": 0}, {"lr": 1e-2})
        engine.train_batch(batch(), CrossEntropyLoss(), PLAN)
        engine.save_state(tmp_path / str(number))
        model = weakref.ref(provider._ready().models[0])
        engine.shutdown()
        del engine, provider
        gc.collect()
        assert model() is None
        threads.append(len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0)
    assert threads[1] <= threads[0]


def test_saving_leaves_no_process(directory: Path, tmp_path: Path) -> None:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    engine = built(directory)
    engine.train_batch(batch(), CrossEntropyLoss(), PLAN)
    engine.save_state(tmp_path)
    engine.shutdown()
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


def test_building_draws_nothing_from_the_process(directory: Path) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    built(directory).shutdown()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_group_of_all_ranks_goes_with_the_last_of_two(directory: Path) -> None:
    assert not dist.is_initialized()
    first, second = built(directory), built(directory)
    first.shutdown()  # it made the group
    assert dist.is_initialized()
    second.shutdown()
    assert not dist.is_initialized()
