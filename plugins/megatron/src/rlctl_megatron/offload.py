"""Weights, gradient buffers and moments on the host between calls, and back where they were.

megatron-core's tensors are views: of gradient buffers, of buffers of weights, of shards of them. So storages are moved, not
tensors: every view goes on pointing to its storage, whose memory is given back and later taken again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from rlctl.errors import EngineError
from rlctl_megatron.build import Built
from rlctl_megatron.optim import Stepper

PARTS = ("model", "optimizer", "grad")


class Parked:
    """Storages whose contents wait on the host."""

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._away)

    def park(self, tensors: Iterable[torch.Tensor]) -> int:
        """Copy the storages of ``tensors`` to the host and free them; returns the bytes that were freed."""
        seen: set[int] = set()
        freed = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.size() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
            self._away.append((storage, whole.to("cpu", copy=True)))
            freed += storage.size()
            del whole
            storage.resize_(0)
        return freed

    def restore(self) -> None:
        """Bring everything back into the storages that it came from."""
        for storage, copy in self._away:
            storage.resize_(copy.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(copy)  # type: ignore[call-overload]
        self._away.clear()


class Whereabouts:
    """Moves the parts of one engine between its device and the host.

    Args:
        device: where the computation runs. On the CPU there is nothing to move.
    """

    def __init__(
        self, device: torch.device | None = None, param_offload: bool = False, optimizer_offload: bool = False
    ) -> None:
        self._device = device or torch.device("cpu")
        self._param_offload = param_offload
        self._optimizer_offload = optimizer_offload
        self._model = Parked()
        self._grad = Parked()
        self._moments = Parked()

    def model_in(self, built: Built) -> None:
        """Weights and gradient buffers onto the device."""
        del built
        self._model.restore()
        self._grad.restore()

    def optimizer_in(self, stepper: Stepper) -> None:
        """Moments and main weights onto the device."""
        del stepper
        self._moments.restore()

    def rest(self, built: Built, stepper: Stepper | None) -> None:
        """After a call: send away what the settings keep on the host. Weights with gradients stay for the step."""
        if self._device.type == "cpu":
            return
        if self._param_offload and not self._model and not (stepper is not None and stepper.pending):
            self._model.park(weights(built))
            self._grad.park(gradients(built))
        if self._optimizer_offload and stepper is not None and not self._moments:
            self._moments.park(moments(stepper))

    def move(self, device: str, parts: Sequence[str], built: Built, stepper: Stepper | None) -> None:
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
        for part in parts:
            parked = {"model": self._model, "grad": self._grad, "optimizer": self._moments}[part]
            if not away:
                parked.restore()
            elif part == "model":
                parked.park(weights(built))
            elif part == "grad":
                parked.park(gradients(built))
            elif stepper is not None:
                parked.park(moments(stepper))


def weights(built: Built) -> Iterator[torch.Tensor]:
    """Every weight and kept buffer of this rank."""
    for model in built.models:
        yield from (p.data for p in model.parameters())
        yield from model.buffers()


def gradients(built: Built) -> Iterator[torch.Tensor]:
    """The buffers that gradients are added up in."""
    for model in built.models:
        found = (getattr(p, "main_grad", None) for p in model.parameters())
        yield from (g for g in found if g is not None)


def moments(stepper: Stepper) -> Iterator[torch.Tensor]:
    """Moments, and main weights that are not the model's own. Step counts stay with the kernel that reads them."""
    own = {p.untyped_storage().data_ptr() for p in weights(stepper.built)}
    for part in stepper.parts():
        if part.optimizer is None:
            continue
        for group in part.optimizer.param_groups:
            yield from (p.data for p in group["params"] if p.untyped_storage().data_ptr() not in own)
        for state in part.optimizer.state.values():
            yield from (v for k, v in state.items() if isinstance(v, torch.Tensor) and k != "step")
