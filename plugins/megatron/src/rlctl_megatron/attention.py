"""Core attention for packed rows: causal within each row, with grouped heads, a window and context parallelism.

megatron's own core attention without Transformer Engine takes neither packed rows nor context parallelism. With cp ranks
every rank gathers all keys and values, and asks for its own queries only: of each row its two chunks, each of which sees
the row up to its own end. Their gradients are summed over the ranks and go back to the rank that made them.

Shapes: f tokens of this rank, F = f * cp of all cp ranks, h query heads, g key/value heads, d head size. A *segment* is a
run of queries that sees one run of keys, its last query the last key: a row, or with cp one chunk of it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from rlctl.errors import EngineError
from rlctl_megatron import compat
from rlctl_megatron.layout import zigzag

_CAUSAL = (None, AttnMaskType.causal, AttnMaskType.padding_causal)


class PackedAttention(MegatronModule):
    """What megatron's ``SelfAttention`` calls as ``core_attention``; see :meth:`forward`.

    Args:
        config: ``window_size`` ``(left, 0)`` lets a token see itself and ``left`` before it, in the layers that
            ``window_attn_skip_freq`` names (all by default).
        softmax_scale: of the scores; d ** -0.5 by default.
        pg_collection: its ``cp`` group; megatron's own where there is none.

    Raises:
        EngineError: dropout, a softmax with an offset, or a window that looks ahead: not computed here.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        assert attention_type == "self", attention_type
        assert attn_mask_type in _CAUSAL, attn_mask_type
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        softmax = getattr(config, "softmax_type", "vanilla")
        window = compat.window_of(config, layer_number)
        for asked, found in (
            ("attention dropout", dropout if dropout else None),
            ("a softmax of another kind", softmax if softmax != "vanilla" else None),
            ("a window that looks ahead", window if window is not None and window[1] != 0 else None),
        ):
            if found is not None:
                raise EngineError(
                    f"packed attention does not compute {asked}",
                    found=found,
                    wanted="plain causal attention without dropout",
                    next="choose another model, or set its attention_dropout to 0",
                )
        self._window = -1 if window is None else int(window[0])
        self._scale = softmax_scale
        self._cp_group: Any = None
        if config.context_parallel_size > 1:
            given = getattr(pg_collection, "cp", None)
            self._cp_group = parallel_state.get_context_parallel_group() if given is None else given

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Causal attention within each row.

        Args:
            query: ``[f, h, d]``; key and value ``[f, g, d]``. With cp: of this rank's tokens, as
                :func:`rlctl_megatron.layout.zigzag` orders them.
            packed_seq_params: ``cu_seqlens_q_padded`` (or, without, ``cu_seqlens_q``) of all cp ranks' tokens together.

        Returns:
            ``[f, h, d]``.
        """
        assert packed_seq_params is not None, "rows come packed"
        assert packed_seq_params.qkv_format == "thd", packed_seq_params.qkv_format
        assert attention_mask is attention_bias is None, "the rows' boundaries are the only mask"
        assert attn_mask_type in _CAUSAL, attn_mask_type
        assert query.ndim == 3, query.shape
        assert len(query) == len(key) == len(value), (query.shape, key.shape, value.shape)
        cu_seqlens = packed_seq_params.cu_seqlens_q_padded
        bounds = tuple((packed_seq_params.cu_seqlens_q if cu_seqlens is None else cu_seqlens).tolist())
        group = self._cp_group
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        assert len(query) * size == bounds[-1], (len(query), size, bounds[-1])
        plan = _plan(bounds, size, rank, query.device)
        if group is not None:
            # One collective for both.
            both = gather_tokens(torch.cat([key, value], -1), group).index_select(0, plan.key_index)
            key, value = both.split([key.shape[-1], value.shape[-1]], -1)
        return _attend(query, key, value, plan, self._scale, self._window)


def gather_tokens(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[f, ...]`` of each rank -> ``[F, ...]``, rank by rank; each gets back the sum of all ranks' gradients for it."""
    return _GatherTokens.apply(mine, group)


class _GatherTokens(torch.autograd.Function):
    """See :func:`gather_tokens`."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        everyone = mine.new_empty((group.size() * mine.shape[0], *mine.shape[1:]))
        dist.all_gather_into_tensor(everyone, mine.contiguous(), group=group)
        return everyone

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        mine = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(mine, grad.contiguous(), group=ctx.group)
        return mine, None


@dataclass(frozen=True)
class _Plan:
    """How this rank's queries meet keys.

    Args:
        shapes: (queries, keys) of each segment, in the order of the queries.
        cu_queries, cu_keys: ``[segments + 1]`` int32 starts.
        key_index: each segment's keys, one segment after another, among the gathered F; without cp they are as they lie.
    """

    shapes: tuple[tuple[int, int], ...]
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    key_index: torch.Tensor


@lru_cache(maxsize=16)
def _plan(bounds: tuple[int, ...], cp: int, rank: int, device: torch.device) -> _Plan:
    """The plan of one micro-batch, shared by its layers."""
    starts = np.array(bounds, dtype=np.int64)
    if cp == 1:
        shapes = tuple((int(n), int(n)) for n in np.diff(starts))
        index = np.empty(0, dtype=np.int64)
    else:
        lies_at = np.empty(bounds[-1], dtype=np.int64)
        lies_at[np.concatenate([zigzag(starts, cp, r) for r in range(cp)])] = np.arange(bounds[-1])
        segments = [
            (start, width, (chunk + 1) * width)
            for start, width in zip(bounds[:-1], (np.diff(starts) // (2 * cp)).tolist(), strict=True)
            for chunk in (rank, 2 * cp - 1 - rank)
        ]
        shapes = tuple((width, seen) for _, width, seen in segments)
        index = np.concatenate([lies_at[start : start + seen] for start, _, seen in segments])
    cu = np.concatenate([np.zeros((1, 2), dtype=np.int32), np.cumsum(shapes, axis=0, dtype=np.int32)])
    # Outlives this call: made in inference mode, the tensors could not be used where there are gradients.
    with torch.inference_mode(False):
        found = [torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in (cu[:, 0], cu[:, 1], index)]
    return _Plan(shapes, *found)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: _Plan, scale: float | None, window: int
) -> torch.Tensor:
    """``[f, h, d]`` from queries ``[f, h, d]`` and each segment's keys and values, end to end."""
    kernel, wants_gqa = _varlen_kernel()
    d = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.device.type == "cuda" and half and d % 8 == 0 and d <= 256 and value.shape[-1] == d and kernel is not None:
        extra = {"enable_gqa": True} if wants_gqa and query.shape[1] != key.shape[1] else {}
        longest_q, longest_k = (max(s[i] for s in plan.shapes) for i in (0, 1))
        # With more keys than queries the kernel aligns the causal edge at their ends, which is where a chunk lies.
        return kernel(
            query.contiguous(), key.contiguous(), value.contiguous(), plan.cu_queries, plan.cu_keys, longest_q, longest_k,
            scale=scale, window_size=(window, 0), **extra,
        )  # fmt: skip
    # Neighbouring segments of one shape as a batch. One split a tensor: the gradient of a slice is a whole tensor of zeros.
    groups = [(shape, len(list(same))) for shape, same in groupby(plan.shapes)]
    queries = query.split([rows * shape[0] for shape, rows in groups])
    keys, values = (t.split([rows * shape[1] for shape, rows in groups]) for t in (key, value))
    outputs = []
    for (shape, rows), q, k, v in zip(groups, queries, keys, values, strict=True):
        q, k, v = (t.unflatten(0, (rows, -1)).transpose(1, 2) for t in (q, k, v))  # [rows, heads, tokens, d]
        mask = _mask(*shape, window, query.device)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _mask(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor | None:
    """``[queries, keys]`` True where a query sees a key, the last one the last; None where plain causality says so."""
    if queries == keys and not 0 <= window < keys - 1:
        return None
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    seen = distance >= 0
    return seen & (distance <= window) if window >= 0 else seen


@lru_cache(maxsize=1)
def _varlen_kernel() -> tuple[Any, bool]:
    """(torch's attention over rows of any length or None, whether it wants to be told of grouped heads)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, False
    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters
