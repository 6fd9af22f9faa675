"""Engines for `rlctl verify` in one process: transformers, a row at a time, with either head. One is right, the others are not.

They share transformers' models with the reference, and nothing else: batches, losses and readers are rlctl's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rlctl.batch import PackedBatch
from rlctl.engine import EngineInfo, MeshInfo, MicroOutput, StepOutput
from rlctl.hookspecs import hookimpl
from rlctl.logits import LossFn
from rlctl.readers import DenseReader, DenseValueReader


class Plain:
    """Every promise kept."""

    @hookimpl
    def rlctl_build_mesh(self, settings: Mapping[str, Any]) -> MeshInfo:
        return MeshInfo(device=settings["device"])

    @hookimpl
    def rlctl_engine_init(
        self, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None, forward_only: bool
    ) -> EngineInfo:
        self.of_values = model["model_type"] == "value_model"
        kind = AutoModelForTokenClassification if self.of_values else AutoModelForCausalLM
        self.model: Any = kind.from_pretrained(model["path"], dtype=torch.float32)
        assert optimizer is not None
        self.section = optimizer
        parameters = list(self.model.parameters())
        if optimizer["name"] == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, optimizer["lr"])
        else:
            self.optimizer = torch.optim.AdamW(
                parameters, optimizer["lr"], betas=optimizer["betas"], eps=optimizer["eps"], weight_decay=0.0
            )
        return EngineInfo(1, int(self.model.config.vocab_size), str(self.model.config.model_type))

    def reader(self, outputs: torch.Tensor, batch: PackedBatch) -> Any:
        return DenseValueReader(outputs[:, 0], batch) if self.of_values else DenseReader(outputs, batch)

    @hookimpl
    def rlctl_forward_backward(
        self, micro_batches: Sequence[PackedBatch], loss_fn: LossFn, forward_only: bool
    ) -> list[MicroOutput]:
        outputs = []
        with torch.set_grad_enabled(not forward_only):
            for batch in micro_batches:
                rows = batch.split_items(batch.items["input_ids"])
                logits = torch.cat([self.model(input_ids=ids[None], use_cache=False).logits[0] for ids in rows])
                out = loss_fn(self.reader(logits, batch), batch)
                if not forward_only:
                    out.loss.backward()
                sums, maxes = ({k: float(v) for k, v in d.items()} for d in (out.sums, out.maxes))
                outputs.append(MicroOutput(out.loss.item(), sums, maxes, out.items))
        return outputs

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput:
        limit = self.section["clip_grad"] or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepOutput(norm, self.section["lr"], False)

    @hookimpl
    def rlctl_export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()

    @hookimpl
    def rlctl_set_mode(self, train: bool) -> bool:
        self.model.train(train)
        return True

    @hookimpl
    def rlctl_move(self, device: str) -> bool:
        return True

    @hookimpl
    def rlctl_save_state(self, path: Path) -> bool:
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], path / "state.pt")
        return True

    @hookimpl
    def rlctl_load_state(self, path: Path) -> bool:
        model, optimizer = torch.load(path / "state.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        return True

    @hookimpl
    def rlctl_reduce(self, values: Sequence[float]) -> list[float]:
        return list(values)


class Shifted(Plain):
    """Values of the state behind each token, instead of the one before it."""

    def reader(self, outputs: torch.Tensor, batch: PackedBatch) -> Any:
        return super().reader(outputs.roll(-1, 0) if self.of_values else outputs, batch)


class HeadForgotten(Plain):
    """The value head is not trained."""

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput:
        if self.of_values:
            self.model.score.weight.grad.zero_()
        return super().rlctl_optimizer_step()


class HeadMisnamed(Plain):
    """The value head is handed out under a name that no checkpoint has."""

    @hookimpl
    def rlctl_export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.named_parameters():
            yield name.replace("score.", "value_head."), tensor
