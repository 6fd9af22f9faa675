"""A correct toy training engine, and engines that each break one promise of the contract."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import toy_config
from toy_model import ToyLM, make_model

from rlctl.batch import PackedBatch
from rlctl.engine import EngineInfo, MeshInfo, MicroOutput, StepOutput
from rlctl.errors import CheckpointError, EngineError
from rlctl.hookspecs import hookimpl
from rlctl.logits import LossFn
from rlctl.readers import DenseReader
from rlctl.schedule import lr_factor
from rlctl.topology import Topology


class Toy:
    """Every promise kept, in plain torch."""

    model: ToyLM
    optimizer: torch.optim.Optimizer | None = None
    optimizer_class: Any = torch.optim.AdamW
    reader: type[DenseReader] = DenseReader
    steps = 0

    @hookimpl
    def rlctl_build_mesh(self, topology: Topology, settings: Mapping[str, Any]) -> MeshInfo:
        return MeshInfo(device=settings["device"])

    @hookimpl
    def rlctl_engine_init(
        self, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None, forward_only: bool
    ) -> EngineInfo:
        self.model = make_model(model)
        if not forward_only:
            assert optimizer is not None
            self.section = optimizer
            if optimizer["name"] == "sgd":
                self.optimizer = self.sgd(optimizer["lr"])
            else:
                self.optimizer = self.optimizer_class(
                    self.model.parameters(),
                    lr=optimizer["lr"],
                    betas=optimizer["betas"],
                    eps=optimizer["eps"],
                    weight_decay=optimizer["weight_decay"],
                )
        size = sum(p.numel() for p in self.model.parameters())
        return EngineInfo(size, self.model.embed.num_embeddings, "toy")

    def sgd(self, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr)

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        return torch.cat([self.model(ids) for ids in batch.split_items(batch.items["input_ids"])])

    def backward(self, loss: torch.Tensor, micro_batches: Sequence[PackedBatch]) -> None:
        loss.backward()

    @hookimpl
    def rlctl_forward_backward(
        self, micro_batches: Sequence[PackedBatch], loss_fn: LossFn, forward_only: bool
    ) -> list[MicroOutput]:
        outputs = []
        with torch.set_grad_enabled(not forward_only):
            for batch in micro_batches:
                try:
                    out = loss_fn(self.reader(self.logits(batch), batch), batch)
                except BaseException:
                    if not forward_only:
                        self.forget()
                    raise
                if not forward_only:
                    self.backward(out.loss, micro_batches)
                sums, maxes = ({k: float(v) for k, v in d.items()} for d in (out.sums, out.maxes))
                outputs.append(MicroOutput(out.loss.item(), sums, maxes, out.items))
        return outputs

    def forget(self) -> None:
        self.model.zero_grad()

    def clip(self) -> float:
        parameters = list(self.model.parameters())
        return float(torch.nn.utils.clip_grad_norm_(parameters, self.section["clip_grad"] or math.inf))

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput:
        if self.optimizer is None:
            raise EngineError("this engine was built without an optimizer", next="build it with forward_only=False")
        lr = self.section["lr"] * lr_factor(self.steps, self.section)
        norm = self.clip()
        skipped = not math.isfinite(norm)
        if not skipped:
            self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.step()
            self.steps += 1
        self.optimizer.zero_grad()
        return StepOutput(norm, lr, skipped)

    @hookimpl
    def rlctl_export_weights(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.state_dict().items():
            yield name, tensor if dtype is None else tensor.to(getattr(torch, dtype))

    @hookimpl
    def rlctl_set_mode(self, train: bool) -> bool:
        self.model.train(train)
        return True

    @hookimpl
    def rlctl_move(self, device: str, parts: Sequence[str]) -> bool:
        return True

    def state(self) -> dict[str, Any]:
        assert self.optimizer is not None
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "rng": torch.get_rng_state(),
        }

    @hookimpl
    def rlctl_save_state(self, path: Path) -> bool:
        torch.save(self.state(), path / "state.pt")
        return True

    @hookimpl
    def rlctl_load_state(self, path: Path) -> bool:
        if not (path / "state.pt").is_file():
            raise CheckpointError("no toy state here", found=path, wanted="state.pt")
        state = torch.load(path / "state.pt")
        self.model.load_state_dict(state["model"])
        assert self.optimizer is not None
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state.get("steps", self.steps)
        if "rng" in state:
            torch.set_rng_state(state["rng"])
        return True

    @hookimpl
    def rlctl_reduce(self, values: Sequence[float], op: str) -> list[float]:
        return list(values)


# ---- one broken promise each ---------------------------------------------------------------------------------------
class MeanOverMicroBatches(Toy):
    """The commonest fault: the loss is averaged over micro-batches, as if all were of one size."""

    def backward(self, loss: torch.Tensor, micro_batches: Sequence[PackedBatch]) -> None:
        (loss / len(micro_batches)).backward()


class OwnTokenMean(Toy):
    """Normalises by the tokens of this call once more, on top of the global weights."""

    def backward(self, loss: torch.Tensor, micro_batches: Sequence[PackedBatch]) -> None:
        weight = sum(float(b.items["item_weight"].sum()) for b in micro_batches)
        (loss / max(weight, 1e-12)).backward()


class DropsPadding(Toy):
    """Runs no micro-batch that has no weight: its peers would wait for it."""

    @hookimpl
    def rlctl_forward_backward(
        self, micro_batches: Sequence[PackedBatch], loss_fn: LossFn, forward_only: bool
    ) -> list[MicroOutput]:
        real = [b for b in micro_batches if not b.is_padding]
        return Toy.rlctl_forward_backward(self, real, loss_fn, forward_only)


class ForgetsMoments(Toy):
    """Saves weights and step count without the optimizer."""

    def state(self) -> dict[str, Any]:
        return {k: v for k, v in super().state().items() if k != "optimizer"}


class ForgetsSchedule(Toy):
    """Starts the schedule again after a resume."""

    def state(self) -> dict[str, Any]:
        return {k: v for k, v in super().state().items() if k != "steps"}


class ForgetsRandomState(Toy):
    """Saves no generator state."""

    def state(self) -> dict[str, Any]:
        return {k: v for k, v in super().state().items() if k != "rng"}


class StepsOnce(Toy):
    """Reports a second step without taking it."""

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput:
        before = {k: v.clone() for k, v in self.model.state_dict().items()}
        out = Toy.rlctl_optimizer_step(self)
        if self.steps > 1:
            self.model.load_state_dict(before)
        return out


class NeverClips(Toy):
    def clip(self) -> float:
        return float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))


class ReportsClippedNorm(Toy):
    def clip(self) -> float:
        super().clip()
        return NeverClips.clip(self)  # type: ignore[arg-type]


class StepsOnNan(Toy):
    """Replaces gradients that are not finite by zero and steps."""

    def clip(self) -> float:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.nan_to_num_(0.0, 0.0, 0.0)
        return super().clip()


class KeepsGradients(Toy):
    """Clears no gradients."""

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput:
        assert self.optimizer is not None
        zero_grad, self.optimizer.zero_grad = self.optimizer.zero_grad, lambda *a, **k: None
        try:
            return Toy.rlctl_optimizer_step(self)
        finally:
            self.optimizer.zero_grad = zero_grad


class KeepsAFailedCall(Toy):
    """Adds what a failed call has left to the next call's gradients."""

    def forget(self) -> None:
        pass


class TakesOthersAlong(Toy):
    """What its engines share goes with the first that shuts down."""

    @hookimpl
    def rlctl_engine_init(
        self, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None, forward_only: bool
    ) -> EngineInfo:
        info = Toy.rlctl_engine_init(self, model, optimizer, forward_only)
        _shared[:] = [self]
        return info

    @hookimpl
    def rlctl_shutdown(self) -> bool:
        for engine in _shared:
            engine.model = None
        return True


_shared: list[Any] = []


class BackwardInForwardOnly(Toy):
    """Scoring leaves gradients behind."""

    @hookimpl
    def rlctl_forward_backward(self, micro_batches: Any, loss_fn: Any, forward_only: bool) -> list[MicroOutput]:
        return Toy.rlctl_forward_backward(self, micro_batches, loss_fn, False)


class RowsSeeEachOther(Toy):
    """One long sequence instead of rows."""

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        return self.model(batch.items["input_ids"])


class LooksAhead(Toy):
    """The mean of a row includes the tokens to come."""

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        parts = []
        for ids in batch.split_items(batch.items["input_ids"]):
            parts.append(self.model(ids) + 0.1 * self.model(ids.flip(0)).mean(0))
        return torch.cat(parts)


class WrongEntropyReader(DenseReader):
    def entropy(self) -> torch.Tensor:
        return super().entropy() / math.log(2)


class EntropyInBits(Toy):
    reader = WrongEntropyReader


class NoGradEntropyReader(DenseReader):
    def entropy(self) -> torch.Tensor:
        return super().entropy().detach() + 0.0 * self.log_prob()


class EntropyWithoutGradient(Toy):
    reader = NoGradEntropyReader


class ColdReader(DenseReader):
    def __init__(self, logits: torch.Tensor, batch: PackedBatch) -> None:
        super().__init__(logits, batch.with_meta(temperature=1.0))


class IgnoresTemperature(Toy):
    reader = ColdReader


class UnmaskedReader(DenseReader):
    def log_prob(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        return super().log_prob(ids) - (self._at_items(torch.ones(len(self._index))) == 0).float()


class FillsUnscored(Toy):
    reader = UnmaskedReader


class ScoresUnderDropout(Toy):
    """Stays in training mode for ever."""

    @hookimpl
    def rlctl_set_mode(self, train: bool) -> bool:
        self.model.train()
        return True


class IgnoresSeed(Toy):
    @hookimpl
    def rlctl_engine_init(self, model: Any, optimizer: Any, forward_only: bool) -> EngineInfo:
        return Toy.rlctl_engine_init(self, {**model, "seed": 0}, optimizer, forward_only)


class WarmsUpLate(Toy):
    """Reports the rate of the step before."""

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput:
        last = getattr(self, "last", 0.0)
        out = Toy.rlctl_optimizer_step(self)
        self.last = out.lr
        return StepOutput(out.grad_norm, last, out.skipped)


class ExportsAList(Toy):
    @hookimpl
    def rlctl_export_weights(self, dtype: str | None) -> Any:
        return list(Toy.rlctl_export_weights(self, dtype))


class LeaksNoGrad(Toy):
    @hookimpl
    def rlctl_export_weights(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            yield from Toy.rlctl_export_weights(self, dtype)


class ExportsMasterAlways(Toy):
    @hookimpl
    def rlctl_export_weights(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        return Toy.rlctl_export_weights(self, None)


class LeavesWeightsOut(Toy):
    @hookimpl
    def rlctl_export_weights(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        return (pair for pair in Toy.rlctl_export_weights(self, dtype) if "mix" not in pair[0])


class CoupledDecay(Toy):
    """L2 in the gradient (Adam) in place of AdamW's decoupled decay."""

    optimizer_class = torch.optim.Adam


class SgdWithMomentum(Toy):
    def sgd(self, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr, momentum=0.9)


class IgnoresOptimizerName(Toy):
    @hookimpl
    def rlctl_engine_init(self, model: Any, optimizer: Any, forward_only: bool) -> EngineInfo:
        return Toy.rlctl_engine_init(self, model, optimizer and {**optimizer, "name": "adamw"}, forward_only)


class NoMoments(Toy):
    """Sign descent: Adam's first step, again and again."""

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput:
        assert self.optimizer is not None
        self.optimizer.state.clear()
        return Toy.rlctl_optimizer_step(self)


class LosesMomentsInMove(Toy):
    """A move to the host drops the moments."""

    @hookimpl
    def rlctl_move(self, device: str, parts: Sequence[str]) -> bool:
        assert self.optimizer is not None
        self.optimizer.state.clear()
        return True


class StepsWithoutOptimizer(Toy):
    """A forward-only engine that says it stepped."""

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput:
        if self.optimizer is None:
            return StepOutput(0.0, 0.0, False)
        return Toy.rlctl_optimizer_step(self)


class LoadsNothingSilently(Toy):
    """Takes an empty directory for a checkpoint."""

    @hookimpl
    def rlctl_load_state(self, path: Path) -> bool:
        return Toy.rlctl_load_state(self, path) if (path / "state.pt").exists() else True


class WrongPlace(Toy):
    @hookimpl
    def rlctl_build_mesh(self, topology: Topology, settings: Mapping[str, Any]) -> MeshInfo:
        return MeshInfo(device=settings["device"], is_collect=False)


class HeavyConfig(toy_config.ToyConfig):
    """A config model in a module that imports torch."""
