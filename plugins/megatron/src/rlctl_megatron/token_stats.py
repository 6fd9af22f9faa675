"""Log-probs, entropy and top tokens from hidden states and one shard of the output layer, chunk by chunk.

Each tp rank makes the logits of its part of the vocabulary; four numbers a token go over the group: the largest logit, the
sum of exponentials, their mean shifted logit and the logits asked for. Nothing ``[P, V]`` exists in float32, and no input is
written to (``vocab_parallel_cross_entropy`` of megatron-core leaves its logits overwritten).

Convention for gradients. Hidden states come in alike on every tp rank, and the gradient that goes out to them is *this
shard's part* of it: the sum over tp is the caller's (see :func:`rlctl_megatron.reader.predicting`). The gradient of the
weight is whole: each rank has all that its shard gets.

Numbers are float32, or float64 where the hidden states are.

Shapes: P tokens, C of a chunk, D hidden, V vocabulary, S rows of the weight here, s of them real, K ids a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from rlctl.errors import EngineError

_CHUNK_BYTES = {"cpu": 8 << 20}
_CHUNK_BYTES_ACCELERATOR = 512 << 20
_CHUNK_ROWS_MIN = 256


@dataclass(frozen=True)
class VocabShard:
    """One rank's rows of the output layer.

    Args:
        weight: ``[S, D]``. Rows for ids of ``vocab_size`` and beyond fill the shards up to one size; they are no tokens.
        vocab_size: V.
        start: id of the first row.
        group: the ranks that hold the other rows; None: there are none.
        temperature: logits are divided by it.
    """

    weight: torch.Tensor
    vocab_size: int
    start: int = 0
    group: dist.ProcessGroup | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        assert self.group is not None or (self.start == 0 and self.rows == self.vocab_size), "rows are missing"

    @property
    def rows(self) -> int:
        """s; 0 in a shard of nothing but filling."""
        return max(0, min(self.weight.shape[0], self.vocab_size - self.start))


def chunk_rows(rows: int, device_type: str) -> int:
    """Tokens of a chunk: float32 logits of a few MiB on the CPU (its caches), of half a GiB on an accelerator.

    At least 256 tokens: each chunk reads the whole shard, and the backward pass adds to its whole gradient.
    """
    size = _CHUNK_BYTES.get(device_type, _CHUNK_BYTES_ACCELERATOR)
    return max(_CHUNK_ROWS_MIN, size // (4 * max(rows, 1)))


def raw_logits(hidden: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """``[P, s]`` the plain product in the weight's dtype, as the functions below take it to save making it again."""
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.to(shard.weight.dtype), shard.weight[: shard.rows])


def token_stats(
    hidden: torch.Tensor, shard: VocabShard, ids: torch.Tensor | None, entropy: bool, raw: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Log-probs ``[P, K]`` at ``ids`` ``[P, K]`` and entropy ``[P]`` (nats), each where it is asked for.

    Every rank of the group calls it with the same ``hidden`` and ``ids``. Ids must be real ones: another would be a token
    without a logit (:class:`rlctl_megatron.reader.VocabParallelReader` checks).

    Args:
        hidden: ``[P, D]``; see above for its gradient.
        raw: what :func:`raw_logits` returned; without it the backward pass makes each chunk's logits again.
    """
    return _TokenStats.apply(hidden, shard.weight, raw, ids, entropy, shard)


@torch.no_grad()
def top_tokens(
    hidden: torch.Tensor, shard: VocabShard, k: int, raw: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs ``[P, k]``, ids ``[P, k]``) of the most probable tokens of the whole vocabulary, best first.

    Raises:
        EngineError: the vocabulary has fewer than ``k`` tokens.
    """
    if k > shard.vocab_size:
        raise EngineError(
            "more of the most probable tokens are asked for than the vocabulary has",
            found=f"k = {k}",
            wanted=f"at most {shard.vocab_size}",
        )
    num, rows = hidden.shape[0], shard.rows
    own = min(k, rows)
    best = _wide(hidden).new_full((num, k), float("-inf"))
    ids = torch.zeros((num, k), dtype=torch.long, device=hidden.device)
    sums = _Sums.empty(hidden, num_ids=0, entropy=False)
    for c in _chunks(num, rows, hidden.device.type):
        z = _logits(hidden[c], shard, None if raw is None else raw[c])
        found = z.topk(own, dim=-1)
        best[c, :own], ids[c, :own] = found.values, found.indices + shard.start
        sums.add(c, z, None)
    sums = sums.over(shard.group)
    if shard.group is not None and num:
        best, ids = _side_by_side(best, shard.group), _side_by_side(ids, shard.group)
        found = best.topk(k, dim=-1)
        best, ids = found.values, ids.gather(-1, found.indices)
    return best - sums.top[:, None] - sums.total.log()[:, None], ids


@torch.no_grad()
def squared_probs(hidden: torch.Tensor, shard: VocabShard, raw: torch.Tensor | None = None) -> torch.Tensor:
    """``[P]`` sum over the whole vocabulary of the squared probabilities. Two collectives, however many chunks there are."""
    num, wide = hidden.shape[0], _wide(hidden)
    top, sums = wide.new_full((num,), float("-inf")), wide.new_zeros((num, 2))
    for c in _chunks(num, shard.rows, hidden.device.type):
        z = _logits(hidden[c], shard, None if raw is None else raw[c])
        top[c] = z.amax(-1)
        e = (z - top[c, None]).exp_()
        sums[c, 0] = e.sum(-1)
        sums[c, 1] = e.square_().sum(-1)
    if shard.group is not None and num:
        highest = _largest(top, shard.group)
        scale = (top - highest).exp()
        sums = sums * torch.stack([scale, scale.square()], 1)
        dist.all_reduce(sums, group=shard.group)
    return sums[:, 1] / sums[:, 0].square()


class _TokenStats(torch.autograd.Function):
    """See :func:`token_stats`.

    With z the logits, p = softmax(z), H its entropy, g_k and g_H the incoming gradients:
    dz = sum_k g_k (onehot(id_k) - p) - g_H p (log p + H). Each rank has what that takes for its own columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        raw: torch.Tensor | None,
        ids: torch.Tensor | None,
        want_entropy: bool,
        shard: VocabShard,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        # Else a loss of log-probs alone would pay for the entropy's gradient of zeros.
        ctx.set_materialize_grads(False)
        num = hidden.shape[0]
        local, here = (None, None) if ids is None else _own_ids(ids, shard)
        sums = _Sums.empty(hidden, 0 if ids is None else ids.shape[1], want_entropy)
        for c in _chunks(num, shard.rows, hidden.device.type):
            z = _logits(hidden[c], shard, None if raw is None else raw[c])
            sums.add(c, z, None if local is None or here is None else (local[c], here[c]))
        sums = sums.over(shard.group)
        log_total = sums.total.log()
        log_probs = None if ids is None else (sums.picked - sums.top[:, None]) - log_total[:, None]
        entropy = None if sums.moment is None else log_total - sums.moment / sums.total
        ctx.save_for_backward(hidden, weight, raw, local, here, sums.top, log_total, entropy)
        ctx.shard = shard
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:  # type: ignore[override]
        hidden, weight, raw, local, here, top, log_total, entropy = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None, None
        total_grad = None
        if grad_log_probs is not None:
            total_grad = grad_log_probs.sum(-1, keepdim=True)
            grad_log_probs = torch.where(here, grad_log_probs, 0.0)
        num, rows = hidden.shape[0], shard.rows
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        w = weight[:rows]
        chunks = _chunks(num, rows, hidden.device.type)
        if ctx.needs_input_grad[1]:
            # Parts of several chunks add up in the wide dtype.
            grad_weight = torch.zeros_like(weight, dtype=_wide(weight).dtype if len(chunks) > 1 else weight.dtype)
        for c in chunks:
            z = _logits(hidden[c], shard, None if raw is None else raw[c])
            grad = _logit_grad(
                z,
                (top[c, None], log_total[c, None]),
                None if grad_log_probs is None or total_grad is None else (local[c], grad_log_probs[c], total_grad[c]),
                None if grad_entropy is None else (entropy[c, None], grad_entropy[c, None]),
            )
            if shard.temperature != 1.0:
                grad.div_(shard.temperature)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[c] = grad @ w
            if grad_weight is not None:
                grad_weight[:rows] += grad.T @ hidden[c].to(weight.dtype)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


@dataclass
class _Sums:
    """What a rank knows of its logits, token by token; :meth:`over` makes it what all ranks know together.

    Args:
        top: ``[P]`` the largest logit; -inf in a shard of nothing but filling.
        total: ``[P]`` sum of exp(z - top).
        moment: ``[P]`` sum of exp(z - top) * (z - top); None where no entropy is asked for.
        picked: ``[P, K]`` logits of the ids that lie here, else 0.
    """

    top: torch.Tensor
    total: torch.Tensor
    moment: torch.Tensor | None
    picked: torch.Tensor

    @classmethod
    def empty(cls, hidden: torch.Tensor, num_ids: int, entropy: bool) -> _Sums:
        num, wide = hidden.shape[0], _wide(hidden)
        return cls(
            wide.new_full((num,), float("-inf")),
            wide.new_zeros(num),
            wide.new_zeros(num) if entropy else None,
            wide.new_zeros((num, num_ids)),
        )

    def add(self, c: slice, z: torch.Tensor, own_ids: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Take in the logits ``z`` ``[C, s]`` of a chunk, which may be someone else's tensor: it is only read."""
        top = z.amax(-1)
        shifted = z - top[:, None]
        self.top[c] = top
        if self.moment is None:
            self.total[c] = shifted.exp_().sum(-1)
        else:
            e = shifted.exp()
            self.total[c] = e.sum(-1)
            self.moment[c] = torch.einsum("cv,cv->c", e, shifted)
        if own_ids is not None:
            local, here = own_ids
            self.picked[c] = torch.where(here, z.gather(-1, local), 0.0)

    def over(self, group: dist.ProcessGroup | None) -> _Sums:
        """The same of all ranks' logits. Two collectives, however many chunks there were."""
        if group is None or not self.top.numel():
            return self
        top = _largest(self.top, group)
        scale = (self.top - top).exp()
        # sum e^(z - top) (z - top) from the same with another top; a shard without tokens has nothing to add.
        shift = torch.where(self.total > 0, self.top - top, 0.0)
        parts = [(self.total * scale)[:, None], self.picked]
        if self.moment is not None:
            parts.append(((self.moment + shift * self.total) * scale)[:, None])
        summed = torch.cat(parts, 1)
        dist.all_reduce(summed, group=group)
        num_ids = self.picked.shape[1]
        return _Sums(
            top,
            summed[:, 0],
            None if self.moment is None else summed[:, num_ids + 1],
            summed[:, 1 : num_ids + 1],
        )


def _largest(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Element by element over the ranks."""
    values = values.clone()
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def _side_by_side(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[P, k]`` of each rank -> ``[P, ranks * k]``."""
    everyone = values.new_empty((group.size() * values.shape[0], values.shape[1]))
    dist.all_gather_into_tensor(everyone, values.contiguous(), group=group)
    return everyone.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1)


def _chunks(num: int, rows: int, device_type: str) -> list[slice]:
    """Slices of the P tokens; none where the shard has no token."""
    step = chunk_rows(rows, device_type)
    return [slice(s, s + step) for s in range(0, num, step)] if rows else []


def _wide(like: torch.Tensor) -> torch.Tensor:
    """An empty tensor of the dtype in which sums are made, on the device of ``like``."""
    return like.new_empty(0, dtype=torch.float64 if like.dtype == torch.float64 else torch.float32)


def _logits(hidden: torch.Tensor, shard: VocabShard, raw: torch.Tensor | None) -> torch.Tensor:
    """``[C, s]`` logits in the wide dtype. They may share memory with ``raw``: never to be written to."""
    if raw is None:
        raw = raw_logits(hidden, shard)
    z = raw.to(_wide(hidden).dtype)
    return z if shard.temperature == 1.0 else z / shard.temperature


def _own_ids(ids: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of this shard for ``ids`` ``[P, K]``, whether they lie here); row 0 for those that do not."""
    local = ids - shard.start
    here = (local >= 0) & (local < shard.rows)
    return torch.where(here, local, 0), here


def _logit_grad(
    z: torch.Tensor,
    log_sum: tuple[torch.Tensor, torch.Tensor],
    by_log_prob: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    by_entropy: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Gradient by the logits ``z`` ``[C, s]`` of a chunk, a new tensor.

    Args:
        log_sum: ``[C, 1]`` largest logit, and the log of the sum of exponentials shifted by it. Taken off one after the
            other: their sum is as coarse as the logits are large.
        by_log_prob: rows of the ids here ``[C, K]``, gradients of their log-probs (0 where an id lies elsewhere), and
            ``[C, 1]`` the sum of the gradients of all ids, wherever they lie.
        by_entropy: entropies ``[C, 1]`` and their gradients.
    """
    log_p = (z - log_sum[0]).sub_(log_sum[1])
    if by_entropy is None:
        assert by_log_prob is not None, "a gradient of something"
        grad = log_p.exp_().mul_(-by_log_prob[2])
    else:
        p = log_p.exp()
        grad = log_p.add_(by_entropy[0]).mul_(by_entropy[1])
        if by_log_prob is not None:
            grad.add_(by_log_prob[2])
        grad.mul_(p).neg_()
    if by_log_prob is not None:
        grad.scatter_add_(-1, by_log_prob[0], by_log_prob[1])
    return grad
