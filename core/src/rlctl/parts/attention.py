"""Packed causal attention as one attention function of transformers.

Segments (rows, shared prompts, and what follows them) lie end to end in one sequence of N tokens; ``cu_seq_lens_q`` says
where each begins. Nothing is padded and no mask over ``[N, N]`` is built. On accelerators with bf16 or fp16 the varlen
flash kernel of torch computes it; everywhere else neighbouring segments of one shape run as one batch of exact scaled
dot-product attention.

Shapes: N tokens, S segments, H query heads, G key/value heads, E head size, B segments of one length L.
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
from rlctl.parts.ulysses import Slice, heads_problem, to_heads, to_sequence

NAME = "rlctl_packed"

_IGNORED_KEYWORDS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states"}
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


@dataclass(frozen=True)
class _Group:
    """Neighbouring segments of one shape.

    Args:
        tokens: of the group; ``rows`` segments of ``length`` tokens.
        parent: index of the group of roots that its segments continue, None for roots.
        members: which segment of that group each one continues.
    """

    tokens: int
    rows: int
    length: int
    parent: int | None = None
    members: tuple[int, ...] = ()


@lru_cache(maxsize=64)
def _groups(bounds: tuple[int, ...], parents: tuple[int, ...] | None) -> tuple[_Group, ...]:
    """Groups of a packed sequence in its order (see :class:`rlctl.parts.segments.Segments`)."""
    shapes: list[tuple[int, int | None]] = []
    members: list[list[int]] = []
    place: dict[int, tuple[int, int]] = {}  # root segment -> (its group, its index there)
    for segment, (start, end) in enumerate(pairwise(bounds)):
        parent = -1 if parents is None else parents[segment]
        group, member = place[parent] if parent >= 0 else (None, -1)
        shape = (end - start, group)
        if not shapes or shapes[-1] != shape:
            shapes.append(shape)
            members.append([])
        if group is None:
            place[segment] = (len(shapes) - 1, len(members[-1]))
        members[-1].append(member)
    return tuple(
        _Group(length * len(m), len(m), length, group, () if group is None else tuple(m))
        for (length, group), m in zip(shapes, members, strict=True)
    )


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
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    key_index: torch.Tensor | None = None,
    segment_parents: torch.Tensor | None = None,
    sequence_slice: Slice | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each row, where a segment may continue another (a prompt that several rows share).

    Boundaries and keys speak of the whole packed sequence, also where this rank holds a slice of it.

    Args:
        query: ``[1, H, N, E]``; key ``[1, G, N, E]``, value ``[1, G, N, Ev]``. Of a slice: its tokens for N.
        sliding_window: token i sees j when ``i - j < sliding_window`` (and j <= i, same row).
        softcap: scores s become ``softcap * tanh(s / softcap)`` (Gemma 2).
        cu_seq_lens_q: ``[S + 1]`` int32 starts of the segments, N at the end; ``max_length_q`` the longest.
        cu_seq_lens_k: ``[S + 1]`` int32 starts of each segment's keys; ``max_length_k`` the most keys.
        key_index: ``[K]`` index of each segment's keys among the N tokens; None when segments see only themselves.
        segment_parents: ``[S]`` on the CPU, the segment that each one continues or -1; None when none does.
        sequence_slice: the tokens are one rank's slice of the sequence (:mod:`rlctl.parts.ulysses`); None: all of it.

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
    if sequence_slice is not None:
        problem = heads_problem(query.shape[1], key.shape[1], sequence_slice.ulysses.size)
        if problem is not None:
            raise PackedAttentionError(f"the heads of {type(module).__name__} cannot be shared out", found=problem)
        query, key, value = to_heads(query, key, value, sequence_slice)
    if kernel_for(query.device, dtype, query.shape[-1], value.shape[-1], softcap) == "varlen" and dropout == 0.0:
        if key_index is not None:
            key, value = key.index_select(2, key_index), value.index_select(2, key_index)
        cu_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        out = _varlen(query, key, value, cu_seq_lens_q, cu_k, max_length_q, max_length_k, scaling, sliding_window)
    else:
        parents = None if segment_parents is None else tuple(segment_parents.tolist())
        groups = _groups(tuple(cu_seq_lens_q.tolist()), parents)
        out = _by_group(query, key, value, groups, dropout, scaling, sliding_window, softcap)
    return out if sequence_slice is None else to_sequence(out, sequence_slice), None


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int | None,
    max_k: int | None,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    kernel, wants_gqa = _varlen_kernel()
    longest_q = int((cu_q[1:] - cu_q[:-1]).max()) if max_q is None else int(max_q)
    longest_k = int((cu_k[1:] - cu_k[:-1]).max()) if max_k is None else int(max_k)
    # The kernel's left window counts tokens before this one; transformers' window counts this one too. With more keys
    # than queries the kernel aligns the causal edge at the end, which is where a tail's own tokens are.
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    extra = {"enable_gqa": True} if wants_gqa and q.shape[1] != k.shape[1] else {}
    cu_q, cu_k = cu_q.to(torch.int32), cu_k.to(torch.int32)
    return kernel(q, k, v, cu_q, cu_k, longest_q, longest_k, scale=scaling, window_size=window, **extra)[None]


def _by_group(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: tuple[_Group, ...],
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    sizes = [g.tokens for g in groups]
    if sum(sizes) != query.shape[2]:
        raise PackedAttentionError(
            "row boundaries do not cover the packed sequence", found=f"{sum(sizes)} tokens", wanted=query.shape[2]
        )
    # One split a tensor, not one slice a group: the gradient of a slice is a whole tensor of zeros.
    parts = [t[0].transpose(0, 1).split(sizes) for t in (query, key, value)]  # [B * L, heads, E]
    shaped = [
        [t.unflatten(0, (g.rows, g.length)) for t, g in zip(part, groups, strict=True)] for part in parts
    ]  # [B, L, heads, E]
    outputs = []
    for g, q, k, v in zip(groups, *shaped, strict=True):
        before = 0
        if g.parent is not None:
            before = groups[g.parent].length
            members = torch.tensor(g.members, device=q.device)
            k = torch.cat([shaped[1][g.parent].index_select(0, members), k], 1)
            v = torch.cat([shaped[2][g.parent].index_select(0, members), v], 1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, heads, L, E]
        mask = _mask(g.length, before, sliding_window, q.device)
        if softcap is not None:
            out = _capped_attention(q, k, v, mask, dropout, scaling, softcap)
        else:
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [B * L, H, Ev]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


def _mask(length: int, before: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """``[L, before + L]`` True where a token may look; None when plain causality over ``[L, L]`` decides."""
    window = before + length if sliding_window is None else sliding_window
    if not before and window >= length:
        return None
    distance = torch.arange(before, before + length, device=device)[:, None] - torch.arange(
        before + length, device=device
    )
    return (distance >= 0) & (distance < window)


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
