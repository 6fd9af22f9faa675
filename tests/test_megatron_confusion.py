"""The worked example of test_runtime_confusion on real ranks: 2 prompts, 3 samples each, megatron at tp=2 on 4 processes.

Two replicas with three trajectories each, two optimizer steps, and the numbers of one process of fsdp2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_fault_cases import MODEL, boots
from safetensors.torch import load_file
from test_runtime_confusion import PROMPTS, SAMPLES, rollout, rows_in

import rlctl_cli
from rlctl.batch import PackedBatch
from rlctl.config.schema import ActorConfig, ModelConfig, OptimConfig
from rlctl.microbatch import MicroBatchPlan
from rlctl.plugins import load_plugins
from rlctl.roles.actor import ActorRole
from rlctl.roles.budget import SkipBudget
from rlctl.runtime.channel import Parcel
from rlctl.runtime.group import WorkerGroup
from rlctl.runtime.records import BuildSpec, Call
from rlctl.runtime.remote import RemoteEngine
from rlctl.runtime.transports.base import Transport
from rlctl.runtime.transports.inline import InlineTransport
from rlctl.runtime.transports.process import ProcessTransport
from rlctl.runtime.worker import Worker

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.slow

TOKENIZER = Path(rlctl_cli.__file__).parent / "recipes" / "quickstart" / "model"
OPTIM = OptimConfig(lr=1e-3, clip_grad=1.0).model_dump()


class Watched(ProcessTransport):
    """Remembers what each rank is sent."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__(log_dir)
        self._packed: list[tuple[Parcel, Call]] = []
        self.sent: list[tuple[int, Call]] = []

    def pack(self, call: Call) -> Parcel:
        self._packed.append((super().pack(call), call))
        return self._packed[-1][0]

    def send(self, rank: int, packed: Any) -> None:
        self.sent += [(rank, call) for parcel, call in self._packed if parcel is packed]
        super().send(rank, packed)

    def rows(self, method: str) -> list[list[PackedBatch]]:
        """What each call of ``method`` gave to the ranks, by rank."""
        calls: dict[int, dict[int, PackedBatch]] = {}
        for rank, call in self.sent:
            if call.method == method:
                calls.setdefault(call.id, {})[rank] = call.args[1]
        return [[by_rank[rank] for rank in sorted(by_rank)] for by_rank in calls.values()]


@contextmanager
def actor_on(transport: Transport, world: int, backend: str, axes: dict[str, int]) -> Iterator[ActorRole]:
    group = WorkerGroup("main", transport, boots(world), Worker)
    try:
        group.start()
        engine = RemoteEngine.build(group, BuildSpec("actor", "train", backend, MODEL, {}, axes, OPTIM))
        yield ActorRole(
            engine, ActorConfig(ppo_epochs=2), MicroBatchPlan(max_tokens=16), 8, SkipBudget(0), check_rollout=True
        )
    finally:
        group.close()


def update(actor: ActorRole, export: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Two epochs over the one mini-batch: metrics, and the weights that they left."""
    batch = rollout()
    ready = batch.with_items(old_log_probs=actor.score(batch)["log_probs"])
    metrics = actor.update(ready, PROMPTS * SAMPLES, set(range(batch.num_rows)), torch.Generator().manual_seed(0))
    section: dict[str, Any] = {k: v for k, v in MODEL.items() if k != "seed"} | {"tokenizer": str(TOKENIZER)}
    actor.engine.export_directory(export, ModelConfig(**section))
    return metrics, load_file(export / "model.safetensors")


def test_real_ranks_with_tp_2_are_two_replicas_of_three_trajectories_and_take_two_steps(tmp_path: Path) -> None:
    inline = InlineTransport(lambda boot: Worker(boot, load_plugins(), print))
    with actor_on(inline, 1, "fsdp2", {}) as one:
        wanted, reference = update(one, tmp_path / "one")
    transport = Watched(tmp_path / "logs")
    with actor_on(transport, 4, "megatron", {"tp": 2}) as many:
        assert many.engine.dp_size == 2
        assert [p.dp_rank for p in many.engine.places] == [0, 0, 1, 1]
        assert [p.rank for p in many.engine.places if p.is_collect] == [0, 2]
        metrics, weights = update(many, tmp_path / "many")
    assert metrics["actor/num_steps"] == 2
    assert len(transport.rows("train_batch")) == 2
    for by_rank in [*transport.rows("train_batch"), *transport.rows("infer_batch")]:
        assert [part.num_rows for part in by_rank] == [3, 3, 3, 3], "tp computes every row twice: 12 for 6"
        assert by_rank[0] is by_rank[1], "the ranks of one replica are given the same rows"
        assert by_rank[2] is by_rank[3]
        assert sorted(rows_in(by_rank[0]) + rows_in(by_rank[2])) == list(range(6)), "each row on one replica"
    counts = {"actor/num_micro_batches", "actor/num_padding_micro_batches"}
    assert {"actor/pg_loss", "actor/entropy", "actor/grad_norm", "training/rollout_probs_diff_mean"} <= set(wanted)
    assert {k: v for k, v in metrics.items() if k not in counts} == pytest.approx(
        {k: v for k, v in wanted.items() if k not in counts}, rel=1e-4, abs=1e-6
    )
    assert weights.keys() == reference.keys()
    # A third step, or half a gradient, would move weights by a good part of lr.
    for name, value in weights.items():
        assert torch.allclose(value, reference[name], atol=2e-5), name
