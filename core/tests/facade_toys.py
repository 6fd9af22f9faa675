"""A provider of every training hook that does no learning, and what the tests of the facade feed it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlctl.batch import PackedBatch, pack
from rlctl.engine import Engine, EngineInfo, MeshInfo, MicroOutput, StepOutput
from rlctl.hookspecs import hookimpl
from rlctl.logits import LossOutput
from rlctl.records import BackendKind
from rlctl.topology import Topology


class ToyTrain:
    """A provider of every training hook; it records calls and does no learning."""

    def __init__(self, mesh: MeshInfo | None = None) -> None:
        self.mesh = mesh or MeshInfo()
        self.log: list[str] = []
        self.exported = 0
        self.closed = False

    @hookimpl
    def rlctl_build_mesh(self, topology: Topology) -> MeshInfo:
        self.log.append("mesh")
        return self.mesh

    @hookimpl
    def rlctl_engine_init(self, mesh: MeshInfo, forward_only: bool) -> EngineInfo | None:
        self.log.append(f"init {forward_only}")
        return EngineInfo(num_parameters=1, vocab_size=4, model_family="toy")

    @hookimpl
    def rlctl_forward_backward(self, micro_batches: Sequence[PackedBatch], loss_fn: Any) -> list[MicroOutput] | None:
        self.log.append(f"forward {[b.is_padding for b in micro_batches]}")
        outputs = []
        for batch in micro_batches:
            out: LossOutput = loss_fn(Reader(batch), batch)
            outputs.append(
                MicroOutput(
                    float(out.loss),
                    {k: float(v) for k, v in out.sums.items()},
                    {k: float(v) for k, v in out.maxes.items()},
                    out.items,
                )
            )
        return outputs

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput | None:
        self.log.append("step")
        return StepOutput(grad_norm=1.0, lr=0.1, skipped=False)

    @hookimpl
    def rlctl_export_weights(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for i in range(3):
                self.exported += 1
                yield f"w{i}", torch.full((2,), float(i))
        finally:
            self.closed = True

    @hookimpl
    def rlctl_set_mode(self, train: bool) -> bool:
        self.log.append(f"train {train}")
        return True

    @hookimpl
    def rlctl_move(self, device: str, parts: Sequence[str]) -> bool:
        self.log.append(f"move {device} {list(parts)}")
        return True

    @hookimpl
    def rlctl_save_state(self, path: Any) -> bool:
        return True

    @hookimpl
    def rlctl_load_state(self, path: Any) -> bool:
        return True

    @hookimpl
    def rlctl_reduce(self, values: Sequence[float], op: str) -> list[float] | None:
        self.log.append(f"reduce {op}")
        return list(values)


class Reader:
    """Log-prob of a token is minus its id: enough to see which token an answer belongs to."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch

    def log_prob(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        return torch.where(self.batch.items["loss_mask"], -self.batch.items["input_ids"].float(), 0.0)

    def entropy(self) -> torch.Tensor:
        return torch.where(self.batch.items["loss_mask"], self.batch.items["input_ids"].float() * 10, 0.0)

    def log_prob_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.log_prob(), self.entropy()


def batch_of(lengths: Sequence[int]) -> PackedBatch:
    at, rows = 1, []
    for n in lengths:
        rows.append(list(range(at, at + n)))
        at += n
    return pack({"input_ids": rows, "loss_mask": [[i > 0 for i in range(n)] for n in lengths]})


def loss(reader: Any, batch: PackedBatch) -> LossOutput:
    value = (reader.log_prob() * batch.items["item_weight"]).sum()
    top = reader.log_prob()[batch.items["loss_mask"]]
    return LossOutput(
        value, {"a": value, "b": float(batch.num_rows)}, {"top": top.max() if len(top) else torch.tensor(0.0)}
    )


def built(provider: object | None = None, wrappers: Sequence[tuple[str, object]] = ()) -> Engine:
    engine = Engine(provider or ToyTrain(), BackendKind.TRAIN, "toy", wrappers)
    engine.build(Topology(), {}, {}, {})
    return engine
