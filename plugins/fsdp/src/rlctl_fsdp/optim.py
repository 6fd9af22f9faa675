"""The optimizer, clipping and the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlctl.engine import StepOutput
from rlctl.errors import ConfigError, EngineError
from rlctl.schedule import lr_factor


class Stepper:
    """Optimizer, schedule and clipping of one model.

    Weight decay falls on matrices only: biases and norm weights (one dimension) have none, as in AdamW's usual use. ``sgd``
    has no momentum, so that its update is linear in the gradient.

    Args:
        parameters: name -> trainable parameter.
        settings: the ``optim`` section.

    Raises:
        ConfigError: the schedule does not know its length, or an optimizer that this backend has not.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        lr_factor(0, self._settings)  # an impossible schedule fails here, not after the first forward
        self.parameters = dict(parameters)
        self.num_steps = 0
        decay = float(settings.get("weight_decay", 0.01))
        wide = [p for p in self.parameters.values() if p.ndim > 1]
        narrow = [p for p in self.parameters.values() if p.ndim <= 1]
        groups = [{"params": wide, "weight_decay": decay}, {"params": narrow, "weight_decay": 0.0}]
        self.optimizer = _optimizer([g for g in groups if g["params"]], settings)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The one that holds moments."""
        return [self.optimizer]

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self._settings.get("lr", 1e-6)) * lr_factor(self.num_steps, self._settings)

    def step(self) -> StepOutput:
        """Clip, step, schedule, zero gradients. A non-finite norm skips the step; the schedule then stays.

        Raises:
            EngineError: no gradients are there: nothing was run, or their reduction between ranks never happened.
        """
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not grads:
            raise EngineError(
                "there are no gradients to step with",
                found="every gradient is missing",
                wanted="a forward_backward call without forward_only before each optimizer step",
            )
        norm = _whole(torch.nn.utils.get_total_norm(grads))
        grad_norm = float(norm)
        lr = self.lr
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            clip = float(self._settings.get("clip_grad", 1.0))
            if 0 < clip < grad_norm:
                torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.num_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return StepOutput(grad_norm=grad_norm, lr=lr, skipped=skipped)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _optimizer(groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    name = settings.get("name", "adamw")
    if name == "sgd":
        return torch.optim.SGD(groups, lr=float(settings.get("lr", 1e-6)))
    if name != "adamw":
        raise ConfigError("unknown optimizer", found=f"optim.name {name}", wanted="adamw or sgd")
    return _adamw(groups, settings)


def _adamw(groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> torch.optim.AdamW:
    beta1, beta2 = settings.get("betas", (0.9, 0.999))
    arguments = {
        "lr": float(settings.get("lr", 1e-6)),
        "betas": (float(beta1), float(beta2)),
        "eps": float(settings.get("eps", 1e-8)),
    }
    try:
        return torch.optim.AdamW(groups, fused=True, **arguments)
    except RuntimeError:
        # torch refuses fused=True on devices without that kernel.
        return torch.optim.AdamW(groups, **arguments)
