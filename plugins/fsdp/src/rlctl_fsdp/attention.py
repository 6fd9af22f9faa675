"""Packed causal attention as one attention function of transformers.

Rows lie end to end in one sequence of N tokens; ``cu_seq_lens_q`` ``[R + 1]`` says where each begins. Nothing is padded
and no mask over ``[N, N]`` is built. On accelerators with bf16 or fp16 the varlen flash kernel of torch computes it;
everywhere else neighbouring rows of equal length run as one batch of exact scaled dot-product attention.

Shapes: N tokens, R rows, H query heads, G key/value heads, E head size, B rows of one length L.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rlctl.errors import EngineError

NAME = "rlctl_packed"

_IGNORED_KEYWORDS = frozenset(
    {"cu_seq_lens_k", "max_length_k", "position_ids", "use_cache", "output_attentions", "output_hidden_states"}
    | {"output_router_logits", "is_causal", "cache_position", "position_embeddings", "cache", "past_key_values"}
)
"""Keywords that models hand on to every attention function and that change nothing here."""


class PackedAttentionError(EngineError):
    """The model asks for something that packed attention does not compute; the engine then takes another path."""


@dataclass
class Trace:
    """What one forward asked of attention: the evidence that no window or mask was lost on the way."""

    calls: int = 0
    windows: set[int] = field(default_factory=set)
    mask_windows: set[int] = field(default_factory=set)


_trace: Trace | None = None


@contextmanager
def tracing() -> Iterator[Trace]:
    """Record every call of the attention and mask functions of this process."""
    global _trace
    outer, _trace = _trace, Trace()
    try:
        yield _trace
    finally:
        _trace = outer


def register() -> None:
    """Make :data:`NAME` known to transformers. Safe to call again."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, strict_mask)


@contextmanager
def attention_set(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run ``model`` with the attention function ``name``; outside, it keeps its own (generation needs that)."""
    configs = list({id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values())
    before = [c._attn_implementation for c in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            config._attn_implementation_internal = old


def strict_mask(*args: Any, **kwargs: Any) -> None:
    """The mask function that goes with :func:`packed_attention`: there is never a mask.

    Raises:
        PackedAttentionError: a padding mask was given; it would be dropped in silence.
    """
    if kwargs.get("attention_mask") is not None:
        raise PackedAttentionError(
            "packed attention takes no padding mask",
            found="an attention_mask",
            wanted="rows end to end with cu_seq_lens_q",
        )
    if _trace is not None and kwargs.get("local_size") is not None:
        _trace.mask_windows.add(int(kwargs["local_size"]))


@lru_cache(maxsize=64)
def _length_groups(bounds: tuple[int, ...]) -> tuple[tuple[int, int, int, int], ...]:
    """Runs of neighbouring rows of one length: (first token, last token, rows, length)."""
    groups: list[tuple[int, int, int, int]] = []
    for start, end in pairwise(bounds):
        length = end - start
        if groups and groups[-1][3] == length:
            first, _, rows, _ = groups[-1]
            groups[-1] = (first, end, rows + 1, length)
        else:
            groups.append((start, end, 1, length))
    return tuple(groups)


@lru_cache(maxsize=1)
def _varlen_kernel() -> tuple[Any, bool]:
    """(torch's varlen attention or None, whether it wants to be told of grouped heads)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, False
    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None) -> str:
    """``varlen`` or ``sdpa``: which implementation computes a packed call."""
    fits = head_dim == value_dim and head_dim % 8 == 0 and head_dim <= 256 and softcap is None
    half = dtype in (torch.bfloat16, torch.float16)
    return "varlen" if device.type == "cuda" and half and fits and _varlen_kernel()[0] is not None else "sdpa"


def _compute_dtype(query: torch.Tensor) -> torch.dtype:
    # Rotary embeddings and query norms come out of autocast in float32; the matrix products run in its dtype.
    if query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    return query.dtype


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each row.

    Args:
        query: ``[1, H, N, E]``; key ``[1, G, N, E]``, value ``[1, G, N, Ev]``.
        sliding_window: token i sees j when ``i - j < sliding_window`` (and j <= i, same row).
        softcap: scores s become ``softcap * tanh(s / softcap)`` (Gemma 2).
        cu_seq_lens_q: ``[R + 1]`` int32 starts of the rows, N at the end.

    Returns:
        ``[1, N, H, Ev]`` and no attention weights.

    Raises:
        PackedAttentionError: a mask, sinks, a bias or anything else that this function would silently ignore.
    """
    if cu_seq_lens_q is None:
        raise PackedAttentionError(
            f"{type(module).__name__} does not hand row boundaries to its attention function",
            found="no cu_seq_lens_q",
            wanted="keyword arguments passed on to every layer",
        )
    if attention_mask is not None:
        raise PackedAttentionError(
            f"{type(module).__name__} brings a mask of its own",
            found=f"a mask of shape {tuple(attention_mask.shape)}",
            wanted="none",
        )
    if query.shape[0] != 1 or key.shape[2] != query.shape[2] or getattr(module, "is_causal", True) is False:
        raise PackedAttentionError(
            f"{type(module).__name__} is not causal self-attention over one packed sequence",
            found=f"query {tuple(query.shape)}, key {tuple(key.shape)}",
            wanted="one sequence attending to itself",
        )
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _IGNORED_KEYWORDS)
    if unknown or kwargs.get("is_causal") is False:
        raise PackedAttentionError(
            f"{type(module).__name__} asks attention for more than packed attention computes",
            found=", ".join(unknown) or "is_causal=False",
            wanted="query, key, value, scaling, sliding_window, softcap",
        )
    if _trace is not None:
        _trace.calls += 1
        if sliding_window is not None:
            _trace.windows.add(int(sliding_window))
    dtype = _compute_dtype(query)
    if dtype != query.dtype or key.dtype != dtype or value.dtype != dtype:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if kernel_for(query.device, dtype, query.shape[-1], value.shape[-1], softcap) == "varlen" and dropout == 0.0:
        out = _varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    else:
        out = _per_length(query, key, value, cu_seq_lens_q, dropout, scaling, sliding_window, softcap)
    return out, None


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int | None,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    kernel, wants_gqa = _varlen_kernel()
    longest = int(max_length) if max_length is not None else int((cu_seq_lens[1:] - cu_seq_lens[:-1]).max())
    # The kernel's left window counts tokens before this one; transformers' window counts this one too.
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    extra = {"enable_gqa": True} if wants_gqa and q.shape[1] != k.shape[1] else {}
    cu = cu_seq_lens.to(torch.int32)
    return kernel(q, k, v, cu, cu, longest, longest, scale=scaling, window_size=window, **extra)[None]


def _per_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    num_tokens = query.shape[2]
    bounds = tuple(cu_seq_lens.tolist())
    if bounds[0] != 0 or bounds[-1] != num_tokens:
        raise PackedAttentionError(
            "row boundaries do not cover the packed sequence", found=f"{bounds[0]} to {bounds[-1]}", wanted=f"0 to {num_tokens}"
        )  # fmt: skip
    groups = _length_groups(bounds)
    sizes = [last - first for first, last, _, _ in groups]
    # One split a tensor, not one slice a group: the gradient of a slice is a whole tensor of zeros.
    parts = zip(*(t[0].transpose(0, 1).split(sizes) for t in (query, key, value)), strict=True)  # [B * L, heads, E]
    outputs = []
    for (_, _, rows, length), part in zip(groups, parts, strict=True):
        qb, kb, vb = (t.unflatten(0, (rows, length)).transpose(1, 2) for t in part)  # [B, heads, L, E]
        mask = _window_mask(length, sliding_window, query.device)
        if softcap is not None:
            out = _capped_attention(qb, kb, vb, mask, dropout, scaling, softcap)
        else:
            out = scaled_dot_product_attention(
                qb, kb, vb, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling,
                enable_gqa=qb.shape[1] != kb.shape[1],
            )  # fmt: skip
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [B * L, H, Ev]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


def _window_mask(length: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """``[L, L]`` True where a token may look; None when causality alone decides."""
    if sliding_window is None or length <= sliding_window:
        return None
    i = torch.arange(length, device=device)
    distance = i[:, None] - i
    return (distance >= 0) & (distance < sliding_window)


def _capped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Attention with capped scores, written out: no fused kernel of torch has it. Softmax in float32."""
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    probs = scores.float().masked_fill(~mask, float("-inf")).softmax(-1).to(q.dtype)
    return torch.nn.functional.dropout(probs, dropout) @ v
