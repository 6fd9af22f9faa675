"""A model with adapters as the model without them: base and adapter merged, one tensor at a time, on the way out.

What is trained is not touched: a merged weight is a new tensor, made in float32 and then rounded once to the dtype that is
asked for. With adapters at work and *every* merged weight bit-equal to its base, nothing of the training would reach whoever
takes the weights: that is refused.

Legend: r rank, I inputs, O outputs. A is ``[r, I]``, B is ``[O, r]``, the base ``[O, I]`` (``[I, O]`` of a Conv1D).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlctl.errors import GuardError
from rlctl_fsdp.lora.inject import NAME, adapted_layers, parts

if TYPE_CHECKING:
    from peft.tuners.lora.layer import Linear as Adapted

BASE = ".base_layer."
_ADAPTER = (".lora_A.", ".lora_B.")
Reader = Callable[[], torch.Tensor]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank; of a shard a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def delta(layer: Adapted) -> torch.Tensor:
    """``scaling * B @ A`` in float32, in the layout of the base weight."""
    down, up = (whole(part).float() for part in parts(layer))
    product = (up @ down) * layer.scaling[NAME]
    return product.T if layer.fan_in_fan_out else product


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is one of an adapter's own."""
    return any(part in name for part in _ADAPTER)


class Merged:
    """The tensors of a model under the names that it has without adapters.

    Args:
        tensors: name in the model -> parameter or buffer.
        dtype: of floating tensors; None keeps the base weight's own.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> None:
        self._layers = dict(adapted_layers(model))
        self._dtype = dtype
        self._at_work = 0
        self._changed = 0
        self.readers: dict[str, Reader] = {}
        for name, tensor in tensors.items():
            if not self._layers:  # names are the model's own, whatever they are
                self.readers[name] = self._reader("", tensor)
            elif not is_adapter(name):
                self.readers[name.replace(BASE, ".")] = self._reader(name, tensor)

    def _reader(self, name: str, tensor: torch.Tensor) -> Reader:
        layer, _, own = name.partition(BASE)
        if own != "weight":
            return lambda: whole(tensor)
        return lambda: self._merge(self._layers[layer], tensor)

    def _merge(self, layer: Adapted, tensor: torch.Tensor) -> torch.Tensor:
        base, change = whole(tensor), delta(layer)
        wanted = self._dtype or base.dtype
        merged = (base.float() + change).to(wanted)
        if bool(change.any()):
            self._at_work += 1
            self._changed += not torch.equal(merged, base.to(wanted))
        return merged

    def check(self) -> None:
        """After the last tensor.

        Raises:
            GuardError: adapters are at work, and no merged weight shows it.
        """
        if self._at_work and not self._changed:
            raise GuardError(
                "the merged weights are the base weights: the adapters do not reach whoever takes them",
                found=f"{self._at_work} adapted layers, each bit-equal to its base in {self._dtype or 'its own dtype'}",
                wanted="merged weights that differ from the base",
                next="set a higher actor.optim.lr, or model.dtype=float32: smaller changes are rounded away",
            )


def adapter_tensors(model: nn.Module) -> dict[str, Any]:
    """Name in the model -> adapter parameter, live."""
    return {name: p for name, p in model.named_parameters() if is_adapter(name)}
