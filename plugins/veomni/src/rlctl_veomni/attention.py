"""Packed attention between VeOmni's exchanges of heads: the attention of every model that this backend builds.

Under Ulysses a rank holds a slice of the packed sequence. VeOmni's models leave the exchange around attention to the attention
function: one that does not know of it attends within the slice alone, and trains on, wrong, without a word. So the models get
this function, and :func:`check_calls` sees that they use it.

Shapes: U ranks, N tokens of the packed sequence, m of a slice (the last slices are filled up), H query heads, G key/value heads,
E head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from veomni.ops.kernels.attention.ulysses import (  # pyright: ignore[reportMissingImports]
    prepare_ulysses_qkv,
    restore_ulysses_output,
)

from rlctl.errors import EngineError
from rlctl.parts.attention import packed_attention, strict_mask
from rlctl.parts.ulysses import Slice

NAME = "rlctl_veomni_packed"


def register() -> None:
    """Make :data:`NAME` known to transformers. Safe to call again."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, strict_mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sequence_slice: Slice | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As :func:`rlctl.parts.attention.packed_attention`, with VeOmni's exchange where the tokens are a slice.

    Args:
        query: ``[1, H, m, E]``; key and value ``[1, G, m, E]``. With fewer key/value heads than ranks each one goes to all the
            ranks whose query heads it serves.

    Returns:
        ``[1, m, H, E]`` and no attention weights.
    """
    if sequence_slice is None:
        return packed_attention(module, query, key, value, attention_mask, **kwargs)
    ulysses = sequence_slice.ulysses
    by_token = [t.transpose(1, 2).contiguous() for t in (query, key, value)]
    q, k, v, _ = prepare_ulysses_qkv(*by_token, group=ulysses.group, ulysses_size=ulysses.size)
    q, k, v = (t[:, : sequence_slice.num_tokens].transpose(1, 2) for t in (q, k, v))
    out, _ = packed_attention(module, q, k, v, attention_mask, **kwargs)  # [1, N, H / U, E]
    if sequence_slice.filling:
        out = F.pad(out, (0, 0, 0, 0, 0, sequence_slice.filling))
    return restore_ulysses_output(out.contiguous(), group=ulysses.group), None


def check_name(config: Any, usp: int) -> None:
    """Refuse to split rows between ranks under another attention.

    Raises:
        EngineError: the model was given an attention that does not exchange heads.
    """
    found = config._attn_implementation
    if usp > 1 and found != NAME:
        raise EngineError(
            "rows are split between ranks, and the model's attention does not know of it: each rank would look at its own slice",
            found=f"attention {found} and parallel.usp={usp}",
            wanted=f"attention {NAME}",
            next="leave the model's attention to the engine, or set parallel.usp=1",
        )


def check_calls(calls: int, layers: int, family: str) -> None:
    """Refuse a model in which not every layer's attention came through here.

    Raises:
        EngineError: it has an attention of its own.
    """
    if calls != layers:
        raise EngineError(
            f"not every layer of this {family} uses the attention that it was given",
            found=f"{calls} calls in a forward pass",
            wanted=f"{layers}, one a layer",
            next="take fsdp2, which tries a model before it packs its rows",
        )


def num_attention_layers(config: Any) -> int:
    """Layers with attention: all of them, in the families that this backend runs."""
    return int(config.num_hidden_layers)
