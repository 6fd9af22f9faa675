"""Modules under ``fully_shard``: finding them, and leaving them as a call found them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    """Every FSDP module below and including ``root``."""
    return [m for m in root.modules() if isinstance(m, FSDPModule)]


def param_groups(module: FSDPModule) -> list[Any]:
    """What the module gathers and reduces together: one group, in newer versions of torch several."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return list(groups)


def reshard(root: nn.Module) -> None:
    """After a forward without backward the root's weights are still whole; parameters must be shards again."""
    for module in fsdp_modules(root):
        module.reshard()


def drop_unreduced(root: nn.Module) -> None:
    """Forget gradients that wait for the last micro-batch of a call that failed before it.

    FSDP keeps them beside the parameters, where ``zero_grad`` does not come, and would add them to the next call's.
    """
    for module in fsdp_modules(root):
        for group in param_groups(module):
            for held in group.fsdp_params:
                held.unsharded_accumulated_grad = None
                if hasattr(held, "_unsharded_param"):
                    held._unsharded_param.grad = None
