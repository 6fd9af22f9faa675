"""Which of VeOmni's kernels compute a model, and keeping the choices of several engines apart.

VeOmni binds kernels to slots that are globals of a model's module: the model that was built last decides for all of them.
With whole experts beside experts that are spread over ranks that ends in a wrong index, or in wrong numbers. So each engine
binds its own choice again whenever it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from veomni.arguments.arguments_types import OpsImplementationConfig  # pyright: ignore[reportMissingImports]
from veomni.ops.dispatch import OpSlot  # pyright: ignore[reportMissingImports]
from veomni.utils.import_utils import is_fused_moe_available  # pyright: ignore[reportMissingImports]

from rlctl.errors import BackendUnavailableError, ConfigError
from rlctl_veomni import attention
from rlctl_veomni.config import VeOmniConfig
from rlctl_veomni.standins import EXPERTS_KERNEL

EAGER = "eager"


def experts_implementation(config: VeOmniConfig, ep: int, device: torch.device, compute: torch.dtype) -> str:
    """VeOmni's name for how experts are computed.

    Raises:
        ConfigError: a choice that cannot compute what the ranks hold.
        BackendUnavailableError: the kernel for experts does not load here.
    """
    grouped = config.experts == "grouped" or (
        config.experts == "auto" and (ep > 1 or (device.type != "cpu" and compute == torch.bfloat16))
    )
    if not grouped:
        if ep > 1:
            raise ConfigError(
                "experts one after another cannot be spread over ranks: VeOmni would look for experts that are not here",
                found=f"engine.experts=eager and parallel.ep={ep}",
                wanted="engine.experts=auto or grouped, or parallel.ep=1",
                next="set actor.engine.experts=auto",
            )
        return EAGER
    if device.type == "cpu":
        if ep == 1:
            raise ConfigError(
                "on a CPU grouped experts are there for ranks that share them only",
                found="engine.experts=grouped and parallel.ep=1",
                wanted="engine.experts=auto or eager",
                next="set actor.engine.experts=auto",
            )
        return f"fused_{EXPERTS_KERNEL}"
    if compute != torch.bfloat16:
        raise ConfigError(
            "VeOmni's kernel for experts computes in bfloat16",
            found=f"float32, with parallel.ep={ep} and engine.experts={config.experts}",
            wanted="engine.param_dtype auto or bfloat16; in float32 engine.experts eager and parallel.ep=1",
            next="set actor.engine.param_dtype=auto",
        )
    if device.type == "npu":
        return "fused_npu"
    if not is_fused_moe_available():
        raise BackendUnavailableError(
            "VeOmni's kernel for experts needs Triton",
            found="no triton that it can use, or a GPU older than compute capability 7.0",
            wanted="triton, which torch brings on Linux with CUDA",
            next="pip install triton, or set actor.engine.experts=eager and parallel.ep=1",
        )
    return "fused_triton"


def operators(experts: str) -> Any:
    """VeOmni's choice of kernels: its own for experts, the model's plain code for everything else.

    The defaults of this class raise without liger-kernel, flash-linear-attention and Triton.
    """
    names = (
        "cross_entropy_loss",
        "rms_norm",
        "swiglu_mlp",
        "rotary_pos_emb",
        "load_balancing_loss",
        "rms_norm_gated",
        "causal_conv1d",
        "chunk_gated_delta_rule",
    )
    plain: dict[str, Any] = {f"{name}_implementation": EAGER for name in names}
    return OpsImplementationConfig(attn_implementation=attention.NAME, moe_implementation=experts, **plain)


class Kernels:
    """The slots of a model's module, as they were bound when the model was built."""

    def __init__(self, model: nn.Module) -> None:
        module = sys.modules[type(model).__module__]
        slots = [slot for slot in vars(module).values() if isinstance(slot, OpSlot)]
        self._bound = [(slot, slot._impl_name) for slot in slots if slot._impl_name is not None]

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Inside, the module's slots have this engine's kernels."""
        for slot, name in self._bound:
            if slot._impl_name != name:
                slot.bind(name)
        yield
