"""The optimizer step: VeOmni's optimizers and clipping, rlctl's schedule.

Parameters of experts live on another mesh than the others, so VeOmni has an optimizer for each, and one norm over both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from veomni.optim import build_optimizer  # pyright: ignore[reportMissingImports]

from rlctl.engine import StepOutput
from rlctl.errors import ConfigError, EngineError
from rlctl.schedule import lr_factor


class Stepper:
    """Optimizers, schedule and clipping of one model. Use it inside :meth:`rlctl_veomni.mesh.Place.here`.

    Weight decay falls on matrices only: biases and norm weights (one dimension) have none. ``sgd`` has no momentum, so that its
    update is linear in the gradient.

    Args:
        model: sharded by VeOmni.
        settings: the ``optim`` section.

    Raises:
        ConfigError: the schedule does not know its length, or an optimizer that this backend has not.
    """

    def __init__(self, model: nn.Module, settings: Mapping[str, Any], device: torch.device) -> None:
        self._settings = dict(settings)
        lr_factor(0, self._settings)  # an impossible schedule fails here, not after the first forward
        self._model = model
        self.name = str(settings.get("name", "adamw"))
        self.num_steps = 0
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizers = _optimizers(model, self.parameters, settings, device)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self._settings.get("lr", 1e-6)) * lr_factor(self.num_steps, self._settings)

    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Moments and step count of a parameter; empty before its first step."""
        for optimizer in self.optimizers:
            if parameter in optimizer.state:
                return optimizer.state[parameter]
        return {}

    def owner_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """The optimizer that steps a parameter."""
        for optimizer in self.optimizers:
            if any(p is parameter for group in optimizer.param_groups for p in group["params"]):
                return optimizer
        raise AssertionError("every trained parameter is in an optimizer")

    def step(self) -> StepOutput:
        """Clip, step, schedule, zero gradients. A non-finite norm skips the step; the schedule then stays.

        Raises:
            EngineError: gradients are missing: nothing was run, or their reduction between ranks never happened.
        """
        missing = [n for n, p in self.parameters.items() if p.grad is None]
        if missing:
            raise EngineError(
                "there are no gradients to step with",
                found=f"{len(missing)} of {len(self.parameters)} missing, first {missing[0]}",
                wanted="a forward_backward call without forward_only before each optimizer step",
            )
        clip = float(self._settings.get("clip_grad", 1.0))
        # Norm and clipping are one call there. Where the norm is not finite it spoils gradients that are dropped anyway.
        grad_norm = float(self._model.clip_grad_norm_(clip if clip > 0 else math.inf))  # type: ignore[operator]
        lr = self.lr
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
                optimizer.step()
            self.num_steps += 1
        self.drop_gradients()
        return StepOutput(grad_norm=grad_norm, lr=lr, skipped=skipped)

    def drop_gradients(self) -> None:
        """Forget what was added up."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


def _optimizers(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], settings: Mapping[str, Any], device: torch.device
) -> list[torch.optim.Optimizer]:
    name = str(settings.get("name", "adamw"))
    if name not in ("adamw", "sgd"):
        raise ConfigError("unknown optimizer", found=f"optim.name {name}", wanted="adamw or sgd")
    beta1, beta2 = settings.get("betas", (0.9, 0.999))
    lr = float(settings.get("lr", 1e-6))
    built = build_optimizer(
        model,
        lr=lr,
        betas=(float(beta1), float(beta2)),
        eps=float(settings.get("eps", 1e-8)),
        weight_decay=float(settings.get("weight_decay", 0.01)),
        fused=device.type == "cuda",
        no_decay_params=[n.lower() for n, p in parameters.items() if p.ndim <= 1],
    )
    found = list(built.optimizers_dict.values()) if hasattr(built, "optimizers_dict") else [built]
    held = [p for optimizer in found for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in parameters.values()}, "VeOmni steps what is trained"
    if name == "sgd":
        # VeOmni has none. Its parameter groups, so that weights decay alike.
        return [
            torch.optim.SGD([{k: g[k] for k in ("params", "weight_decay")} for g in o.param_groups], lr=lr)
            for o in found
        ]
    return found
