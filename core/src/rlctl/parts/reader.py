"""The chunked logits reader: per-token numbers at the scored positions, without ``[N, V]`` in float32.

Logits exist for P scored tokens only, and in float32 for one chunk of them at a time. When the raw logits of a
micro-batch fit in a budget they are kept for the backward pass; otherwise the backward pass computes each chunk again.

Under sequence parallelism a reader computes the numbers of the scored tokens that its rank's slice predicts, and hands out
those of all ranks: a loss sees whole ``[N]`` tensors wherever it runs. Each call is then one collective of the group.

Shapes: N tokens, P scored tokens (of this rank's slice, where it holds one), C tokens of a chunk, K alternatives a token,
V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from rlctl.logits import to_logits_scale
from rlctl.parts.head import HeadSpec
from rlctl.parts.ulysses import Ulysses, assemble

_CHUNK_BYTES = {"cpu": 8 << 20}
_CHUNK_BYTES_ACCELERATOR = 512 << 20
_CHUNK_ROWS_MIN = 256


def chunk_rows(vocab_size: int, device_type: str) -> int:
    """Tokens of a chunk: float32 logits of a few MiB on the CPU (its caches), of half a GiB on an accelerator.

    At least 256 tokens: each chunk reads the whole head weight, and the backward pass adds to its whole gradient.
    """
    return max(_CHUNK_ROWS_MIN, _CHUNK_BYTES.get(device_type, _CHUNK_BYTES_ACCELERATOR) // (4 * vocab_size))


@dataclass(frozen=True)
class Head:
    """Weights of the output layer and what follows it. ``dtype`` is that of the matrix product."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    spec: HeadSpec
    dtype: torch.dtype
    temperature: float = 1.0


def _scaled(raw: torch.Tensor, spec: HeadSpec, temperature: float) -> torch.Tensor:
    """Raw product ``[C, V]`` -> logits in float32, divided by ``temperature``."""
    return to_logits_scale(spec.apply(raw.float()), temperature)


def _unscaled_grad(grad: torch.Tensor, logits: torch.Tensor, spec: HeadSpec, temperature: float) -> torch.Tensor:
    """Gradient by the raw product from the gradient by the logits ``[C, V]``; overwrites ``grad``."""
    if spec.softcap is not None:
        # logits * temperature = softcap * tanh(x / softcap); d tanh = 1 - tanh^2
        grad.mul_(1.0 - (logits * (temperature / spec.softcap)).square_())
    factor = spec.scale / temperature
    return grad if factor == 1.0 else grad.mul_(factor)


def _logit_grad(
    z: torch.Tensor,
    lse: torch.Tensor,
    by_log_prob: tuple[torch.Tensor, torch.Tensor] | None,
    by_entropy: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Gradient by the logits ``z`` ``[C, V]`` of a chunk; ``z`` stays as it is.

    Args:
        by_log_prob: ids ``[C, K]`` and the gradients of their log-probs.
        by_entropy: entropies ``[C, 1]`` and their gradients.
    """
    if by_entropy is None:
        factor = 0.0 if by_log_prob is None else -by_log_prob[1].sum(-1, keepdim=True)
        grad = (z - lse).exp_().mul_(factor)
    else:
        log_p = z - lse
        p = log_p.exp()
        grad = log_p.add_(by_entropy[0]).mul_(by_entropy[1])
        if by_log_prob is not None:
            grad.add_(by_log_prob[1].sum(-1, keepdim=True))
        grad.mul_(p).neg_()
    if by_log_prob is not None:
        grad.scatter_add_(-1, by_log_prob[0], by_log_prob[1])
    return grad


class _TokenStats(torch.autograd.Function):
    """Log-probs ``[P, K]`` of given ids and entropy ``[P]`` from hidden states ``[P, D]``, chunk by chunk.

    With z the logits, p = softmax(z), H its entropy, g_k and g_H the incoming gradients:
    dz = sum_k g_k (onehot(id_k) - p) - g_H p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        raw: torch.Tensor | None,
        ids: torch.Tensor | None,
        want_entropy: bool,
        head: Head,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        num, vocab = hidden.shape[0], weight.shape[0]
        rows = chunk_rows(vocab, hidden.device.type)
        log_probs = None if ids is None else hidden.new_empty(ids.shape, dtype=torch.float32)
        entropy = hidden.new_empty(num, dtype=torch.float32) if want_entropy else None
        lse = hidden.new_empty(num, dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            w, b = _cast(weight, bias, head.dtype)
            for s in range(0, num, rows):
                c = slice(s, s + rows)
                product = raw[c] if raw is not None else F.linear(hidden[c].to(head.dtype), w, b)
                z = _scaled(product, head.spec, head.temperature)
                if entropy is None:
                    lse[c] = z.logsumexp(-1)
                else:
                    # H = lse - sum_v p_v z_v, from one exponential
                    top = z.amax(-1, keepdim=True)
                    e = (z - top).exp_()
                    total = e.sum(-1)
                    lse[c] = top[:, 0] + total.log()
                    entropy[c] = lse[c] - torch.einsum("cv,cv->c", e, z) / total
                if log_probs is not None and ids is not None:
                    log_probs[c] = z.gather(-1, ids[c]) - lse[c, None]
        ctx.save_for_backward(hidden, weight, bias, raw, ids, lse, entropy)
        ctx.head = head
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:  # type: ignore[override]
        hidden, weight, bias, raw, ids, lse, entropy = ctx.saved_tensors
        head: Head = ctx.head
        num, vocab = hidden.shape[0], weight.shape[0]
        rows = chunk_rows(vocab, hidden.device.type)
        one_chunk = num <= rows
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if not one_chunk or num == 0 else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        w, b = _cast(weight, bias, head.dtype)
        for s in range(0, num, rows):
            c = slice(s, s + rows)
            h = hidden[c].to(head.dtype)
            z = _scaled(raw[c] if raw is not None else F.linear(h, w, b), head.spec, head.temperature)
            grad = _logit_grad(
                z,
                lse[c, None],
                None if ids is None or grad_log_probs is None else (ids[c], grad_log_probs[c]),
                None if entropy is None or grad_entropy is None else (entropy[c, None], grad_entropy[c, None]),
            )
            grad = _unscaled_grad(grad, z, head.spec, head.temperature)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(head.dtype)
            if grad_hidden is not None:
                grad_hidden[c] = grad @ w
            if ctx.needs_input_grad[1]:
                part = grad.T @ h
                grad_weight = part if grad_weight is None else grad_weight.add_(part)
        if not ctx.needs_input_grad[1]:
            grad_weight = None
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None, None, None, None,
        )  # fmt: skip


def _cast(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)


class _ScoredTokens:
    """Between fields of all tokens and numbers of the scored tokens that this rank computes."""

    def __init__(
        self, positions: torch.Tensor, input_ids: torch.Tensor, mine: torch.Tensor | None, ulysses: Ulysses | None
    ) -> None:
        assert (mine is None) == (ulysses is None), "a slice and its group go together"
        self._positions = positions
        self._input_ids = input_ids
        self._mine = mine
        self._ulysses = ulysses
        self._own = positions if mine is None else positions[mine]

    def _pick(self, values: torch.Tensor) -> torch.Tensor:
        """``[N, ...]`` -> ``[P, ...]``."""
        return values[self._own]

    def _targets(self, ids: torch.Tensor | None) -> torch.Tensor:
        """``[P, 1]`` the tokens whose log-probs are asked for."""
        return self._pick(self._input_ids if ids is None else ids).long()[:, None]

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """``[P, ...]`` -> ``[N, ...]`` with zeros where nothing is scored; of all ranks, where they hold slices."""
        if self._mine is not None and self._ulysses is not None:
            values = assemble(values, self._mine, self._positions.numel(), self._ulysses)
        out = values.new_zeros((self._input_ids.shape[0], *values.shape[1:]))
        return out.index_copy(0, self._positions, values)


class ChunkedReader(_ScoredTokens):
    """:class:`rlctl.logits.LogitsReader` over hidden states and a head.

    Args:
        hidden: ``[P, D]`` hidden states that predict the scored tokens.
        positions: index of each scored token of the micro-batch among its N tokens.
        input_ids: ``[N]``.
        keep_bytes: budget for raw logits kept for the backward pass.
        mine: ``[P]`` which of ``positions`` this rank's slice predicts, with ``ulysses`` its group; None: all of them.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        input_ids: torch.Tensor,
        head: Head,
        keep_bytes: int,
        mine: torch.Tensor | None = None,
        ulysses: Ulysses | None = None,
    ) -> None:
        super().__init__(positions, input_ids, mine, ulysses)
        self._hidden = hidden
        self._head = head
        size = hidden.shape[0] * head.weight.shape[0] * head.dtype.itemsize
        self._keep = size <= keep_bytes
        self._raw: torch.Tensor | None = None

    def log_prob(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """See :meth:`rlctl.logits.LogitsReader.log_prob`."""
        log_probs, _ = self._stats(self._targets(ids), want_entropy=False)
        return self._spread(log_probs[:, 0])

    def entropy(self) -> torch.Tensor:
        """See :meth:`rlctl.logits.LogitsReader.entropy`."""
        return self._spread(self._stats(None, want_entropy=True)[1])

    def log_prob_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`rlctl.logits.LogitsReader.log_prob_and_entropy`."""
        log_probs, entropy = self._stats(self._targets(None), want_entropy=True)
        return self._spread(log_probs[:, 0]), self._spread(entropy)

    def log_prob_at(self, ids: torch.Tensor) -> torch.Tensor:
        """See :meth:`rlctl.logits.LogitsReader.log_prob_at`."""
        return self._spread(self._stats(self._pick(ids).long(), want_entropy=False)[0])

    @torch.no_grad()
    def topk(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`rlctl.logits.LogitsReader.topk`."""
        hidden = self._hidden
        log_probs = hidden.new_empty((hidden.shape[0], k), dtype=torch.float32)
        ids = torch.empty((hidden.shape[0], k), dtype=torch.long, device=hidden.device)
        for c, z in self._chunks():
            best = z.topk(k, dim=-1)
            log_probs[c] = best.values - z.logsumexp(-1, keepdim=True)
            ids[c] = best.indices
        return self._spread(log_probs), self._spread(ids)

    @torch.no_grad()
    def sum_p2(self) -> torch.Tensor:
        """See :class:`rlctl.logits.LogitsReader`."""
        out = self._hidden.new_empty(self._hidden.shape[0], dtype=torch.float32)
        for c, z in self._chunks():
            e = (z - z.amax(-1, keepdim=True)).exp_()
            total = e.sum(-1)
            out[c] = e.square_().sum(-1) / total.square()
        return self._spread(out)

    def _chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """(which tokens, their logits ``[C, V]`` in float32), chunk by chunk."""
        head, hidden = self._head, self._hidden
        raw = self._raw_logits()
        rows = chunk_rows(head.weight.shape[0], hidden.device.type)
        with torch.autocast(hidden.device.type, enabled=False):
            w, b = _cast(head.weight, head.bias, head.dtype)
            for s in range(0, hidden.shape[0], rows):
                c = slice(s, s + rows)
                product = raw[c] if raw is not None else F.linear(hidden[c].to(head.dtype), w, b)
                yield c, _scaled(product, head.spec, head.temperature)

    @torch.no_grad()
    def _raw_logits(self) -> torch.Tensor | None:
        """``[P, V]`` raw logits in the head's dtype when they fit in the budget; shared by every call."""
        if self._raw is None and self._keep:
            head = self._head
            with torch.autocast(self._hidden.device.type, enabled=False):
                self._raw = F.linear(self._hidden.to(head.dtype), *_cast(head.weight, head.bias, head.dtype))
        return self._raw

    def _stats(self, ids: torch.Tensor | None, want_entropy: bool) -> tuple[Any, Any]:
        head = self._head
        return _TokenStats.apply(self._hidden, head.weight, head.bias, self._raw_logits(), ids, want_entropy, head)


class FullReader(_ScoredTokens):
    """:class:`rlctl.logits.LogitsReader` over logits that the model made itself.

    Args:
        logits: ``[P, V]`` that predict the scored tokens; scale and cap are already in them.
        mine, ulysses: as for :class:`ChunkedReader`.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        input_ids: torch.Tensor,
        temperature: float,
        mine: torch.Tensor | None = None,
        ulysses: Ulysses | None = None,
    ) -> None:
        super().__init__(positions, input_ids, mine, ulysses)
        self._log_p = to_logits_scale(logits, temperature).log_softmax(-1)

    def log_prob(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """See :meth:`rlctl.logits.LogitsReader.log_prob`."""
        return self._spread(self._log_p.gather(-1, self._targets(ids))[:, 0])

    def entropy(self) -> torch.Tensor:
        """See :meth:`rlctl.logits.LogitsReader.entropy`."""
        return self._spread(-(self._log_p.exp() * self._log_p).sum(-1))

    def log_prob_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`rlctl.logits.LogitsReader.log_prob_and_entropy`."""
        return self.log_prob(), self.entropy()

    def log_prob_at(self, ids: torch.Tensor) -> torch.Tensor:
        """See :meth:`rlctl.logits.LogitsReader.log_prob_at`."""
        return self._spread(self._log_p.gather(-1, self._pick(ids).long()))

    @torch.no_grad()
    def topk(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`rlctl.logits.LogitsReader.topk`."""
        best = self._log_p.topk(k, dim=-1)
        return self._spread(best.values), self._spread(best.indices)

    @torch.no_grad()
    def sum_p2(self) -> torch.Tensor:
        """See :class:`rlctl.logits.LogitsReader`."""
        return self._spread((2.0 * self._log_p).exp().sum(-1))
