"""Where weights, gradients and moments are, and bringing them in when they are used.

With ``param_offload`` weights rest on the host between calls, with ``optimizer_offload`` the moments. A caller may also
send parts away at any time (``rlctl_move``); they come back on their next use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from rlctl.errors import EngineError

PARTS = ("model", "optimizer", "grad")


class Stepper(Protocol):
    """Whatever steps: its optimizers' moments can be moved."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those that hold moments."""
        ...


class Whereabouts:
    """Moves the parts of one engine between ``device`` and the host.

    Args:
        device: where the computation runs. On the CPU there is nothing to move.
    """

    def __init__(
        self, device: torch.device | None = None, param_offload: bool = False, optimizer_offload: bool = False
    ) -> None:
        self._device = device or torch.device("cpu")
        self._param_offload = param_offload
        self._optimizer_offload = optimizer_offload
        self._model_away = False
        self._optimizer_away = False

    def model_in(self, root: nn.Module) -> None:
        """Weights (and gradients that exist) onto the device."""
        if self._model_away:
            move_module(root, self._device)
            self._model_away = False

    def optimizer_in(self, stepper: Stepper) -> None:
        """Moments onto the device."""
        if self._optimizer_away:
            move_moments(stepper, self._device)
            self._optimizer_away = False

    def rest(self, root: nn.Module, stepper: Stepper | None) -> None:
        """After a call: send away what the settings keep on the host. Weights with gradients stay for the step."""
        if self._device.type == "cpu":
            return
        if self._param_offload and not self._model_away and all(p.grad is None for p in root.parameters()):
            move_module(root, torch.device("cpu"))
            self._model_away = True
        if self._optimizer_offload and stepper is not None and not self._optimizer_away:
            move_moments(stepper, torch.device("cpu"))
            self._optimizer_away = True

    def move(self, device: str, parts: Sequence[str], root: nn.Module, stepper: Stepper | None) -> None:
        """Move ``parts`` now.

        Raises:
            EngineError: an unknown part.
        """
        unknown = sorted(set(parts) - set(PARTS))
        if unknown:
            raise EngineError("there is no such part to move", found=", ".join(unknown), wanted=", ".join(PARTS))
        if self._device.type == "cpu":
            return
        away = torch.device(device).type == "cpu"
        target = torch.device("cpu") if away else self._device
        if "model" in parts:
            move_module(root, target)
            self._model_away = away
        if "grad" in parts and "model" not in parts:
            move_gradients(root, target)
        if "optimizer" in parts and stepper is not None:
            move_moments(stepper, target)
            self._optimizer_away = away


def move_module(root: nn.Module, device: torch.device) -> None:
    """Weights, buffers and gradients, keeping the parameter objects that the optimizer knows."""
    root.to(device)


def move_gradients(root: nn.Module, device: torch.device) -> None:
    """Gradients alone."""
    for parameter in root.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(device)


def move_moments(stepper: Stepper, device: torch.device) -> None:
    """AdamW's moments; step counts stay with the kernel that reads them."""
    for optimizer in stepper.optimizers:
        for moments in optimizer.state.values():
            for name, value in moments.items():
                if name != "step":
                    moments[name] = value.to(device)
