"""Main weights: the float32 numbers that the optimizer steps, where the computation has a lower precision.

They are made from the rounded weights when the optimizer is built, so a model that was read in bfloat16 would start from
rounded numbers, and an export of the rounded ones would lose every step smaller than their last digit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlctl_megatron.optim import Stepper


class MainWeights:
    """Reads and writes whole main weights of this rank's parameters.

    Args:
        stepper: None where nothing is trained: there are no other weights than the module's.
    """

    def __init__(self, stepper: Stepper | None) -> None:
        self._owner: dict[nn.Parameter, Any] = {}
        """Who shards a weight over data parallel ranks; nothing of it may be on this one."""
        for part in stepper.parts() if stepper is not None and stepper.distributed else ():
            self._owner |= {parameter: part for buffer in part.buffers for parameter in buffer.params}

    def store(self, parameter: nn.Parameter, whole: torch.Tensor) -> None:
        """Fill a parameter, and what the optimizer keeps of it, with the same numbers."""
        parameter.copy_(whole)
        main = getattr(parameter, "main_param", None)
        if main is not None:
            main.copy_(self._shard(parameter, whole.to(main.device)))

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter as the optimizer has it. Collective over data parallel ranks where they share it."""
        main = getattr(parameter, "main_param", None)
        optimizer = self._owner.get(parameter)
        if optimizer is None or parameter.dtype is torch.float32:
            return parameter.detach() if main is None else main.detach().view(parameter.shape)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if main is not None:
            self._shard(parameter, whole).copy_(main)
        # Every number is on one rank and zero on the others, so the sum changes no bit of it.
        dist.all_reduce(whole, group=optimizer.data_parallel_group)
        return whole.view(parameter.shape)

    def _shard(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """The part of ``whole`` that lies on this rank, as the main weight has it."""
        optimizer = self._owner.get(parameter)
        if optimizer is None:
            return whole
        found = optimizer._get_model_param_range_map(parameter)["param"]
        return whole.reshape(-1)[found.start : found.end]
