"""megatron-core on an NPU: the ``megatron`` engine with another device, and what follows from it.

MindSpeed's patches are in place when this module is imported (:mod:`rlctl_mindspeed.prepare`): megatron-core's calls of
``torch.cuda`` are Ascend's from then on, and process groups carry NPU tensors by HCCL. No kernel of CUDA is asked for.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from rlctl import device as devices
from rlctl_megatron import versions
from rlctl_megatron.config import MegatronConfig
from rlctl_megatron.engine import MegatronEngine
from rlctl_mindspeed.config import MindSpeedConfig


class MindSpeedEngine(MegatronEngine):
    """Provider of the engine hooks on an NPU."""

    devices: ClassVar[tuple[str, ...]] = ("npu",)
    config_model: ClassVar[type[MegatronConfig]] = MindSpeedConfig

    def _kernel_device(self) -> torch.device:
        """A simulated NPU computes as the CPU on which it stands: in float32."""
        device = super()._kernel_device()
        return torch.device("cpu") if devices.is_simulated(device) else device

    def _notes(self, settings: Any, distributed: bool, engine: bool) -> dict[str, str]:
        notes = {
            **super()._notes(settings, distributed, engine),
            "megatron-core": f"{versions.installed()}, patched by MindSpeed",
            "collectives": devices.collective_backend(self._place.device),
        }
        if devices.is_simulated(self._place.device):
            notes["device"] = "simulated: the npu stands on the CPU, and nothing here is proved of a real one"
        return notes
