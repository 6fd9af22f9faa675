"""The attention function that reads a :class:`~rlctl_fsdp.static_cache.StaticCache`.

Shapes: R rows, P prompts, C copies in the grid, H query heads, K key/value heads, N = H / K heads a group, Q queries of
a row, W prompt columns, T own columns, D head size.

It is told what it needs through keyword arguments of the model call, never through globals.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from rlctl_fsdp.static_cache import StaticCache

ATTENTION = "rlctl_static"
"""Name under which transformers knows the attention function."""
STATE = "rlctl_state"
"""Keyword argument of the model call that carries the cache."""


class UnsupportedAttentionError(Exception):
    """The model asks of attention what this path does not do; another path is taken."""


def register_attention() -> None:
    """Make the attention function known to transformers. A name without a mask function gets no mask built at all."""
    AttentionInterface.register(ATTENTION, static_attention)


def static_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, prefill and decoding: ``[R, H, Q, D]`` -> ``[R, Q, H, D]``.

    Raises:
        UnsupportedAttentionError: a mask, a sink, a bias, or a model that does not hand its keyword arguments on.
    """
    cache = kwargs.get(STATE)
    if not isinstance(cache, StaticCache):
        raise UnsupportedAttentionError("the model does not hand keyword arguments on to its attention function")
    if attention_mask is not None:
        raise UnsupportedAttentionError("the model made a mask of its own")
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(f"attention with {name}")
    cache.seen_windows[int(getattr(module, "layer_idx", -1))] = sliding_window
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cache.prompts is not None:
        return _prefill(query, key, value, scale, sliding_window, softcap).transpose(1, 2), None
    rows, heads = query.shape[:2]
    bias = cache.bias(sliding_window, query.dtype)
    # One query a row: the heads that share keys become the query rows, so keys and values are never repeated.
    query = query.reshape(rows, key.shape[1], heads // key.shape[1], query.shape[-1])
    if cache.shared:
        out = _shared(query, key, value, cache, bias, scale, softcap)
    elif softcap is not None or (query.dtype is torch.float32 and query.device.type == "cpu"):
        out = _plain(query, key, value, bias, scale, softcap)
    else:
        mask = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out.reshape(rows, 1, heads, value.shape[-1]), None


def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Causal attention of whole prompts ``[P, H, W, D]``; what is right of a prompt's end is seen by nothing left of it."""
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    hides = window is not None and length > window
    if softcap is None and not hides:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=length > 1, scale=scale, enable_gqa=groups > 1
        )
    i = torch.arange(length, device=query.device)
    distance = i[:, None] - i[None, :]
    hidden = (distance < 0) | (distance >= window) if window is not None and hides else distance < 0
    bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
    return _plain(query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), bias, scale, softcap)


def _weights(scores: torch.Tensor, bias: torch.Tensor | None, softcap: float | None) -> torch.Tensor:
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    return torch.softmax(scores, -1, dtype=torch.float32)


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention spelled out. On a CPU in float32 it is up to twice as fast as the fused kernel for one query a row."""
    weights = _weights(torch.matmul(query * scale, key.transpose(2, 3)), bias, softcap)
    return torch.matmul(weights.to(value.dtype), value)


def _shared(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: StaticCache,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """One token a row ``[R, K, N, D]`` against its prompt's keys (read once for all its copies) and its own.

    One softmax over both parts, so the result is the same as with the two joined.
    """
    layer = cache.current
    assert layer is not None
    assert layer.prompt_keys is not None
    query = query * scale
    width = layer.prompt_keys.shape[2]
    prompt_scores = _of_prompts(query, cache, layer.prompt_keys.transpose(2, 3))
    weights = _weights(torch.cat([prompt_scores, torch.matmul(query, key.transpose(2, 3))], -1), bias, softcap)
    out = torch.matmul(weights[..., width:], value)
    return out + _of_prompts(weights[..., :width], cache, layer.prompt_values)


def _of_prompts(rows: torch.Tensor, cache: StaticCache, matrices: torch.Tensor | None) -> torch.Tensor:
    """``rows`` ``[R, K, N, A]`` times the matrix ``[P, K, A, B]`` of each row's prompt and head: ``[R, K, N, B]``."""
    assert matrices is not None
    prompts, heads = matrices.shape[:2]
    copies, slots = cache.copies, cache.slots
    count, size = rows.shape[2], rows.shape[3]
    if slots is not None:
        # Rows have left: their places in the grid are filled with zeros, so that each prompt has as many.
        rows = rows.new_zeros(prompts * copies, *rows.shape[1:]).index_copy_(0, slots, rows)
    grid = (
        rows.reshape(prompts, copies, heads, count, size).transpose(1, 2).reshape(prompts, heads, copies * count, size)
    )
    out = torch.matmul(grid, matrices)
    out = out.view(prompts, heads, copies, count, -1).transpose(1, 2).reshape(prompts * copies, heads, count, -1)
    return out if slots is None else out.index_select(0, slots)
