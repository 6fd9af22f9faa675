"""Weights read back from the live model, under their Hugging Face names and whole.

Nothing here looks at what was received: a linear layer of the CPU is read out of its kernel, experts out of the layout of
theirs, slices of fused matrices are cut out, and the shards of all tp ranks are put together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlctl_vllm import compat
from rlctl_vllm.names import Part

_SHARDS = {"q": 0, "k": 1, "v": 2}


class LiveReader:
    """Reads one model; keeps unpacked modules for as long as it lives, so make one for each use.

    Args:
        model: vLLM's live model of this rank.
        negative_zeros: name -> places where the tensor that was loaded had -0.0. A kernel's product turns those into 0.0,
            which is the same number in other bits; where a zero is found there, it is given its sign back.
    """

    def __init__(self, model: nn.Module, negative_zeros: Mapping[str, torch.Tensor] | None = None) -> None:
        self._model = model
        self._modules: dict[str, dict[str, torch.Tensor]] = {}
        self._negative_zeros = negative_zeros or {}

    def read(self, part: Part) -> torch.Tensor:
        """The whole tensor of one published name. Collective over tp."""
        module = self._model.get_submodule(part.module)
        tensor = self._experts(module, part) if part.expert is not None else self._plain(module, part)
        places = self._negative_zeros.get(part.name)
        if places is not None:
            flat = tensor.clone().reshape(-1)
            places = places[flat[places] == 0]
            flat[places] = torch.tensor(-0.0, dtype=flat.dtype, device=flat.device)
            tensor = flat.reshape(tensor.shape)
        return tensor

    def _plain(self, module: Any, part: Part) -> torch.Tensor:
        local = self._local(module, part)
        split = compat.split_of(module)
        copies = 1
        if part.shard is not None:
            sizes = [int(n) for n in module.output_partition_sizes]
            local = local.split(sizes)[_SHARDS[part.shard] if isinstance(part.shard, str) else int(part.shard)]
            if part.shard in ("k", "v"):
                copies = int(getattr(module, "num_kv_head_replicas", 1))
        if not split or (split == "in" and part.parameter == "bias"):
            return local
        shards = compat.gather(local)[::copies]
        whole = shards[0] if len(shards) == 1 else torch.cat(shards, dim=1 if split == "in" else 0)
        return whole[: part.shape[0]] if split == "vocab" else whole

    def _local(self, module: nn.Module, part: Part) -> torch.Tensor:
        kept = self._modules.setdefault(part.module, {})
        if part.parameter not in kept:
            stored = module.get_parameter(part.parameter).detach()
            packed = compat.packed_matrix(module) if part.parameter == "weight" else None
            # An embedding serves from its weight. A head (tied or not) and every other layer serve from their kernel.
            use_packed = packed is not None and (not stored.numel() or not part.is_embedding)
            kept[part.parameter] = packed if use_packed and packed is not None else stored
        return kept[part.parameter]

    def _experts(self, module: nn.Module, part: Part) -> torch.Tensor:
        kept = self._modules.setdefault(part.module, {})
        if part.parameter not in kept:
            kept[part.parameter] = unpacked_experts(module, part.parameter)
        local = kept[part.parameter][int(part.expert or 0)]
        if part.parameter == "w13_weight":
            local = local.chunk(2)[int(part.shard or 0)]
        shards = compat.gather(local)
        return shards[0] if len(shards) == 1 else torch.cat(shards, dim=0 if part.parameter == "w13_weight" else 1)


_ORDERS: dict[tuple[Any, ...], torch.Tensor] = {}


def unpacked_experts(module: nn.Module, parameter: str) -> torch.Tensor:
    """``[experts, out, in]`` as a checkpoint has them."""
    weight = module.get_parameter(parameter).detach()
    isa = compat.experts_isa(module)
    if isa is None:
        return weight
    order = _order(tuple(weight.shape[1:]), weight.dtype, isa)
    flat = weight.reshape(weight.shape[0], -1)
    out = torch.empty_like(flat)
    out[:, order] = flat
    return out.reshape(weight.shape)


def _order(shape: tuple[int, ...], dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Where each element of one packed expert comes from: packing only moves elements, so packed numbers tell.

    The numbers are packed digit by digit, since bfloat16 has whole numbers up to 256 only.
    """
    key = (shape, dtype, isa)
    if key not in _ORDERS:
        count = shape[0] * shape[1]
        numbers = torch.arange(count)
        order = torch.zeros(count, dtype=torch.long)
        factor = 1
        while factor < count or factor == 1:
            digits = (numbers // factor % 256).to(dtype).reshape(1, *shape)
            order += compat.pack_experts(digits, isa).reshape(-1).long() * factor
            factor *= 256
        assert torch.equal(order.sort().values, numbers), "packing moves elements and does nothing else"
        _ORDERS[key] = order
    return _ORDERS[key]
