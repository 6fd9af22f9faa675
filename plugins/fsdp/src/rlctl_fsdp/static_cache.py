"""A preallocated key/value cache and the attention function that reads it.

Shapes: P prompts, C copies of each, R = P x C rows, H query heads, K key/value heads, L columns, D head size.

Layout. Every row owns columns ``0 .. width`` for its prompt (filled from the left; what is right of its end is masked)
and ``width + t`` for its t-th generated token. Prompts are padded on the right, so prefill is plainly causal and needs
no mask; a new token is one slice write; with prompts of one length nothing is ever masked.

The attention function is told what it needs through keyword arguments of the model call, never through globals.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer

ATTENTION = "rlctl_static"
"""Name under which transformers knows the attention function."""
STATE = "rlctl_state"
"""Keyword argument of the model call that carries the :class:`StaticCache`."""


class UnsupportedAttentionError(Exception):
    """The model asks of attention what this path does not do; another path is taken."""


class _Layer(DynamicLayer):
    """One layer's buffers. What the model's own code asks of a cache is answered from the owner's columns."""

    def __init__(self, owner: StaticCache) -> None:
        super().__init__()
        self.owner = owner

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        owner = self.owner
        if not owner.store:
            return key_states, value_states
        if not self.is_initialized:
            self.keys, self.values = owner.allocate(key_states), owner.allocate(value_states)
            self.is_initialized = True
        assert self.keys is not None
        assert self.values is not None
        if owner.prompts is not None:
            first, last = owner.prompts
            length = key_states.shape[2]
            for buffer, new in ((self.keys, key_states), (self.values, value_states)):
                rows = buffer.view(-1, owner.copies, *buffer.shape[1:])
                rows[first:last, :, :, :length] = new.unsqueeze(1)
                if length < owner.width:
                    # Hidden columns are multiplied by a weight of zero: they must hold numbers, not what malloc left.
                    rows[first:last, :, :, length : owner.width] = 0
            return key_states, value_states
        column, rows = owner.column, key_states.shape[0]
        self.keys[:rows, :, column : column + 1] = key_states
        self.values[:rows, :, column : column + 1] = value_states
        return self.keys[:rows, :, : column + 1], self.values[:rows, :, : column + 1]

    def get_seq_length(self) -> int:
        return self.owner.column

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.owner.column + length, 0


class StaticCache(Cache):
    """Buffers ``[R, K, L, D]`` of every layer.

    Args:
        num_layers: attention layers of the model.
        lengths: prompt lengths, one a prompt.
        copies: rows a prompt.
        max_new: generated tokens that fit.
        device: where the buffers live.
    """

    def __init__(self, num_layers: int, lengths: list[int], copies: int, max_new: int, device: torch.device) -> None:
        self.buffers = [_Layer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.buffers))
        self.copies = copies
        self.width = max(lengths)
        # The last sampled token is never fed back, so it needs no column.
        self.columns = self.width + max(max_new - 1, 0)
        self.rows = len(lengths) * copies
        self.device = device
        self.lengths = torch.tensor(lengths, device=device).repeat_interleave(copies)
        self.ragged = min(lengths) != self.width
        self.prompts: tuple[int, int] | None = None
        """During prefill: the range of prompts that the running forward pass holds."""
        self.store = True
        """False: only score what is given, keep nothing."""
        self.column = 0
        self._bias: torch.Tensor | None = None
        self._step_bias: dict[int | None, torch.Tensor | None] = {}
        self.seen_windows: dict[int, int | None] = {}
        """Layer index -> the sliding window that its attention asked for."""

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(self.rows, like.shape[1], self.columns, like.shape[3])

    def begin_decoding(self) -> None:
        self.prompts = None
        self.column = self.width - 1

    def advance(self) -> torch.Tensor:
        """Move to the next column; returns the positions ``[R, 1]`` of the tokens that go there."""
        self.column += 1
        self._step_bias.clear()
        return (self.lengths + (self.column - self.width))[:, None]

    def keep(self, index: torch.Tensor) -> None:
        """Keep the rows of ``index`` (ascending), moving them to the front of the buffers."""
        count, used = index.shape[0], self.column + 1
        for layer in self.buffers:
            for buffer in (layer.keys, layer.values):
                assert buffer is not None
                # index_select first: rows move downwards and must not be overwritten before they are read.
                buffer[:count, :, :used] = buffer[:, :, :used].index_select(0, index)
        self.lengths = self.lengths.index_select(0, index)
        if self._bias is not None:
            self._bias = self._bias.index_select(0, index)
        self._step_bias.clear()

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask ``[R, 1, 1, L]`` of the columns in use, or None when each row sees them all."""
        longest = self.column + 1
        if window is not None and longest <= window:
            window = None
        if window not in self._step_bias:
            self._step_bias[window] = self._make_bias(window, dtype)
        return self._step_bias[window]

    def _make_bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        used = self.column + 1
        if window is None:
            if not self.ragged:
                return None
            if self._bias is None:
                columns = torch.arange(self.columns, device=self.device)
                hidden = (columns >= self.lengths[:, None]) & (columns < self.width)
                self._bias = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(
                    hidden, float("-inf")
                )
                self._bias = self._bias[:, None, None, :]
            return self._bias[..., :used]
        columns = torch.arange(used, device=self.device)
        lengths = self.lengths[:, None]
        position = torch.where(columns < self.width, columns, lengths + (columns - self.width))
        current = lengths + (self.column - self.width)
        hidden = ((columns >= lengths) & (columns < self.width)) | (current - position >= window)
        return torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))[
            :, None, None
        ]


def _plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention spelled out. On a CPU in float32 it is up to twice as fast as the fused kernel for one query a row."""
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype), value)


def _causal_bias(length: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    i = torch.arange(length, device=like.device)
    distance = i[:, None] - i[None, :]
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


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
    """Attention of one layer, prefill and decoding; ``[R, H, Q, D]`` -> ``[R, Q, H, D]``."""
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
    rows, heads, length = query.shape[:3]
    groups = heads // key.shape[1]
    if cache.prompts is not None:
        window = None if sliding_window is None or length <= sliding_window else sliding_window
        if softcap is None and window is None:
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=length > 1, scale=scale, enable_gqa=groups > 1
            )
        else:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            out = _plain_attention(query, key, value, _causal_bias(length, window, query), scale, softcap)
        return out.transpose(1, 2), None
    bias = cache.bias(sliding_window, query.dtype)
    # One query a row: the heads that share keys become the query rows, so keys and values are never repeated.
    query = query.view(rows, key.shape[1], groups, query.shape[-1])
    if softcap is not None or (query.dtype == torch.float32 and query.device.type == "cpu"):
        out = _plain_attention(query, key, value, bias, scale, softcap)
    else:
        mask = None if bias is None else bias.expand(-1, -1, groups, -1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out.reshape(rows, 1, heads, value.shape[-1]), None


def register_attention() -> None:
    """Make the attention function known to transformers. A name without a mask function gets no mask built at all."""
    AttentionInterface.register(ATTENTION, static_attention)
