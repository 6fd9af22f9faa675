"""Ulysses sequence parallelism: the ranks of a group hold slices of one packed sequence and swap heads for tokens.

Everything but attention works on one token at a time, so each rank runs it on its own slice. Around attention an
all-to-all gives every rank the whole sequence for its share of the heads, and another one takes the result back
(DeepSpeed Ulysses, arXiv 2309.14509). Attention itself sees a packed sequence as always.

The loss is computed alike on every rank of the group, from per-token numbers that each rank computed for its slice. The
gradient of such a number therefore goes to the one rank that computed it: weights' gradients summed over the group
are those of the whole sequence, each token counted once.

Shapes: U ranks of the group, M tokens of the packed sequence, m = ceil(M / U) tokens of a slice (the last slices are
filled up), H query heads, G key/value heads, E head size, P scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn import functional as F


@dataclass(frozen=True)
class Ulysses:
    """One rank's place in its group.

    Args:
        group: the ranks that share one replica's rows.
        size: U.
        rank: this rank's index in the group, which is the index of its slice.
    """

    group: dist.ProcessGroup
    size: int
    rank: int

    def slice_of(self, num_tokens: int) -> Slice:
        """This rank's slice of a packed sequence."""
        return Slice(self, num_tokens)


@dataclass(frozen=True)
class Slice:
    """This rank's part of a packed sequence of ``num_tokens``, in model order.

    Alignment fills the sequence up to U * m tokens. Filling tokens pass through the layers, but attention neither reads
    nor writes them and no loss looks at them.
    """

    ulysses: Ulysses
    num_tokens: int

    @property
    def width(self) -> int:
        """m."""
        return -(-self.num_tokens // self.ulysses.size)

    @property
    def filling(self) -> int:
        """Alignment tokens of the whole sequence."""
        return self.width * self.ulysses.size - self.num_tokens

    def take(self, whole: NDArray[np.int64]) -> NDArray[np.int64]:
        """``[M]`` -> ``[m]``; filling repeats the last token, so that it is as good a token as any."""
        start = self.ulysses.rank * self.width
        return whole[np.minimum(np.arange(start, start + self.width), self.num_tokens - 1)]

    def own(self, sources: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices ``[P]`` into the packed sequence -> (which of them lie in this slice, their indices within it)."""
        start = self.ulysses.rank * self.width
        mine = ((sources >= start) & (sources < start + self.width)).nonzero()[:, 0]
        return mine, sources[mine] - start


def heads_problem(heads: int, kv_heads: int, size: int) -> str | None:
    """Why ``size`` ranks cannot share these heads, or None."""
    if heads % size:
        return f"{heads} attention heads do not divide by usp={size}"
    if kv_heads % size and size % kv_heads:
        return f"neither do {kv_heads} key/value heads divide by usp={size}, nor usp by them"
    return None


def to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All heads of a slice -> a share of the heads for every token.

    With fewer key/value heads than ranks each one goes to all the ranks whose query heads it serves; autograd adds up
    what comes back from them.

    Args:
        query: ``[1, H, m, E]``; key ``[1, G, m, E]``, value ``[1, G, m, Ev]``.

    Returns:
        ``[1, H / U, M, E]``, and keys and values with max(1, G / U) heads.
    """
    size = part.ulysses.size
    copies = max(1, size // key.shape[1])
    parts = [_blocks(query, size, 1), _blocks(key, size, copies), _blocks(value, size, copies)]
    if query.shape[-1] == value.shape[-1]:
        together = _swap(torch.cat(parts, 2), part)
        found = list(together.split([p.shape[2] for p in parts], 1))
    else:
        found = [_swap(p, part) for p in parts]
    query, key, value = (t.transpose(0, 1)[None] for t in found)
    return query, key, value


def to_sequence(out: torch.Tensor, part: Slice) -> torch.Tensor:
    """``[1, M, H / U, Ev]``, a share of the heads for every token -> ``[1, m, H, Ev]``, all heads of a slice."""
    size = part.ulysses.size
    if part.filling:
        out = F.pad(out, (0, 0, 0, 0, 0, part.filling))
    blocks = _Swap.apply(out[0].unflatten(0, (size, part.width)), part.ulysses.group)  # [U, m, H / U, Ev]
    return blocks.transpose(0, 1).flatten(1, 2)[None]


def assemble(values: torch.Tensor, index: torch.Tensor, total: int, ulysses: Ulysses) -> torch.Tensor:
    """Per-token numbers of every rank's slice, whole on every rank.

    The gradient is this rank's own part of the incoming one, not a sum over ranks: each of them computes the same loss.

    Args:
        values: ``[P_u, ...]`` of this rank.
        index: ``[P_u]`` places among the ``total`` = P tokens; over the ranks, every place once.

    Returns:
        ``[P, ...]``.
    """
    return _Assemble.apply(values, index, total, ulysses.group)


def _blocks(t: torch.Tensor, size: int, copies: int) -> torch.Tensor:
    """``[1, heads, m, E]`` -> ``[U, m, heads * copies / U, E]``: what goes to each rank."""
    t = t[0].transpose(0, 1)
    if copies > 1:
        t = t.repeat_interleave(copies, 1)
    return t.unflatten(1, (size, -1)).transpose(0, 1)


def _swap(blocks: torch.Tensor, part: Slice) -> torch.Tensor:
    """``[U, m, h, E]``, a block for each rank -> ``[M, h, E]``, one from each."""
    whole = _Swap.apply(blocks, part.ulysses.group).flatten(0, 1)
    return whole[: part.num_tokens] if part.filling else whole


class _Swap(torch.autograd.Function):
    """Block r of rank s becomes block s of rank r. Its own inverse and its own adjoint."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchange(blocks, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _exchange(grad, ctx.group), None


def _exchange(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return received


class _Assemble(torch.autograd.Function):
    """See :func:`assemble`. Every place has one number and zeros, so the sum changes no bit of it."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, index: torch.Tensor, total: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        whole = values.new_zeros((total, *values.shape[1:])).index_copy_(0, index, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None, None
