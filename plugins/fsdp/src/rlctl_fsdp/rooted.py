"""A model with its weights on this rank, whole or sharded, with adapters or without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from rlctl.parts.job import Root
from rlctl_fsdp import build, shard
from rlctl_fsdp.config import FSDPConfig
from rlctl_fsdp.lora.inject import add_adapters
from rlctl_fsdp.place import Place


def build_root(
    model: Mapping[str, Any], lora: Mapping[str, Any] | None, place: Place, config: FSDPConfig, compute: torch.dtype
) -> Root:
    """Build the module of the ``model`` section under the root that jobs run in. Collective.

    Args:
        lora: the section of adapters to add; None for none.
        compute: dtype of the forward pass of sharded modules.
    """
    device, mesh, seed = place.device, place.mesh, int(model.get("seed") or 0)

    def adapted(hf: PreTrainedModel) -> PreTrainedModel:
        return add_adapters(hf, lora, seed) if lora else hf

    if mesh is None:
        root = Root(adapted(build.build_whole(model, seed)))
        return root if device.type == "cpu" else root.to(device)
    # Every rank starts from the empty structure; only rank 0 reads (or draws) weights, so the host holds them once.
    root = Root(adapted(build.build_empty(model)))
    source = shard.on_first_rank(lambda: adapted(build.build_whole(model, seed)))
    reduce = torch.float32 if config.reduce_dtype == "auto" else build.DTYPES[config.reduce_dtype]
    shard.shard(root, mesh, compute, reduce, config.reshard_after_forward)
    shard.materialize(root, source, device)
    return root
