"""What a loss sees on megatron's last stage: per-token numbers from vocabulary shards, or from a value head.

Everything is computed for the scored tokens only, and handed out for all N. With context parallelism a rank computes the
numbers of the tokens that it predicts and hands out those of all cp ranks: every rank of a replica computes the same loss
from the same ``[N]`` tensors. Each method is then a collective of tp and cp, to be called alike on all of those ranks.

Shapes: N tokens of the micro-batch, P scored, p of them predicted on this rank, f tokens of this rank, K ids a token,
D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.nn import functional as F

from rlctl.errors import BatchError
from rlctl_megatron import compat
from rlctl_megatron.layout import Laid
from rlctl_megatron.token_stats import VocabShard, raw_logits, squared_probs, token_stats, top_tokens


def predicting(
    hidden: torch.Tensor, laid: Laid, tp_group: dist.ProcessGroup | None, sp: bool, vocab_parallel: bool
) -> torch.Tensor:
    """``[p, D]`` the hidden states that predict this rank's scored tokens, alike on every tp rank.

    Args:
        hidden: ``[f, 1, D]`` of the last stage after its norm; with ``sp`` this rank's ``[f / tp, 1, D]``.
        tp_group: None where tp is 1.
        vocab_parallel: what follows is split over tp, so that each rank sends back a part of the gradient and the parts are
            summed. False for a head that every rank computes whole: a sum would count its gradient tp times.
    """
    hidden = hidden[:, 0]
    if tp_group is None:
        return hidden.index_select(0, laid.predictors)
    if sp:
        whole = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=vocab_parallel, group=tp_group)
        return whole.index_select(0, laid.predictors)
    # The scored tokens first: fewer numbers to sum.
    picked = hidden.index_select(0, laid.predictors)
    return compat.copy_to_tensor_ranks(picked, tp_group) if vocab_parallel and picked.numel() else picked


def assemble(values: torch.Tensor, index: torch.Tensor, total: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Per-token numbers of every cp rank, whole on every rank.

    The gradient is this rank's own part of the incoming one, not a sum over ranks: each of them computes the same loss.

    Args:
        values: ``[p, ...]`` of this rank.
        index: ``[p]`` places among the ``total`` = P tokens; over the ranks, every place once.

    Returns:
        ``[P, ...]``.
    """
    return _Assemble.apply(values, index, total, group)


class _Assemble(torch.autograd.Function):
    """See :func:`assemble`. Every place has one number and zeros, so the sum changes no bit of it."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, index: torch.Tensor, total: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        whole = values.new_zeros((total, *values.shape[1:])).index_copy_(0, index, values)
        if total:
            dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None, None


class _ScoredTokens:
    """Between fields of all N tokens and numbers of those that this rank predicts."""

    def __init__(self, laid: Laid, cp_group: dist.ProcessGroup | None) -> None:
        assert (laid.mine is None) == (cp_group is None), "a part of the tokens and the ranks that have the rest"
        self._laid = laid
        self._cp_group = cp_group
        self._own = laid.positions if laid.mine is None else laid.positions[laid.mine]

    def _pick(self, values: torch.Tensor) -> torch.Tensor:
        """``[N, ...]`` -> ``[p, ...]``."""
        return values[self._own]

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """``[p, ...]`` -> ``[N, ...]`` of all cp ranks, with zeros where nothing is scored."""
        laid = self._laid
        if laid.mine is not None and self._cp_group is not None:
            values = assemble(values, laid.mine, laid.positions.numel(), self._cp_group)
        out = values.new_zeros((laid.num_items, *values.shape[1:]))
        return out.index_copy(0, laid.positions, values)


class VocabParallelReader(_ScoredTokens):
    """:class:`rlctl.logits.LogitsReader` over one shard of the vocabulary.

    Args:
        hidden: ``[p, D]`` from :func:`predicting` with ``vocab_parallel=True``.
        laid: the micro-batch as this rank runs it.
        input_ids: ``[N]`` in the batch's own order, on the device.
        shard: this rank's output layer.
        cp_group: None where cp is 1.
        keep_bytes: budget for logits kept for the backward pass; beyond it they are made again.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        laid: Laid,
        input_ids: torch.Tensor,
        shard: VocabShard,
        cp_group: dist.ProcessGroup | None = None,
        keep_bytes: int = 0,
    ) -> None:
        super().__init__(laid, cp_group)
        assert hidden.shape[0] == laid.predictors.numel(), (hidden.shape, laid.predictors.shape)
        self._hidden = hidden
        self._input_ids = input_ids
        self._shard = shard
        self._keep = hidden.shape[0] * shard.rows * shard.weight.element_size() <= keep_bytes
        self._raw: torch.Tensor | None = None

    def log_prob(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """See :meth:`rlctl.logits.LogitsReader.log_prob`."""
        targets = self._pick(self._input_ids) if ids is None else self._known(ids)
        return self._spread(self._stats(targets.long()[:, None], entropy=False)[0][:, 0])

    def entropy(self) -> torch.Tensor:
        """See :meth:`rlctl.logits.LogitsReader.entropy`."""
        return self._spread(self._stats(None, entropy=True)[1])

    def log_prob_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`rlctl.logits.LogitsReader.log_prob_and_entropy`."""
        log_probs, entropy = self._stats(self._pick(self._input_ids).long()[:, None], entropy=True)
        return self._spread(log_probs[:, 0]), self._spread(entropy)

    def log_prob_at(self, ids: torch.Tensor) -> torch.Tensor:
        """See :meth:`rlctl.logits.LogitsReader.log_prob_at`.

        Raises:
            BatchError: an id outside the vocabulary at a scored token.
        """
        return self._spread(self._stats(self._known(ids).long(), entropy=False)[0])

    def topk(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`rlctl.logits.LogitsReader.topk`.

        Raises:
            EngineError: the vocabulary has fewer than ``k`` tokens.
        """
        log_probs, ids = top_tokens(self._hidden, self._shard, k, self._kept())
        return self._spread(log_probs), self._spread(ids)

    def sum_p2(self) -> torch.Tensor:
        """See :class:`rlctl.logits.LogitsReader`."""
        return self._spread(squared_probs(self._hidden, self._shard, self._kept()))

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """``[N, ...]`` -> ``[p, ...]``, ids of tokens. An id that no shard has would be given a log-prob all the same.

        All scored tokens are looked at, so that every cp rank refuses and none waits for another.
        """
        scored = ids[self._laid.positions]
        if scored.numel():
            low, high = (int(v) for v in torch.aminmax(scored))
            if low < 0 or high >= self._shard.vocab_size:
                raise BatchError(
                    "log-probs are asked for a token id outside the model's vocabulary",
                    found=low if low < 0 else high,
                    wanted=f"0 to {self._shard.vocab_size - 1}",
                    next="take ids from a model with the same vocabulary",
                )
        return self._pick(ids)

    def _kept(self) -> torch.Tensor | None:
        """Raw logits, shared by every call, when they fit in the budget."""
        if self._raw is None and self._keep:
            self._raw = raw_logits(self._hidden, self._shard)
        return self._raw

    def _stats(self, ids: torch.Tensor | None, entropy: bool) -> tuple[Any, Any]:
        return token_stats(self._hidden, self._shard, ids, entropy, self._kept())


class ValueReader(_ScoredTokens):
    """Values of states: what a value head makes of the hidden state that predicts each scored token.

    Args:
        hidden: ``[p, D]`` from :func:`predicting` with ``vocab_parallel=False``: every tp rank computes the whole head.
        laid: the micro-batch as this rank runs it.
        weight: ``[1, D]``.
        cp_group: None where cp is 1.
    """

    def __init__(
        self, hidden: torch.Tensor, laid: Laid, weight: torch.Tensor, cp_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(laid, cp_group)
        assert hidden.shape[0] == laid.predictors.numel(), (hidden.shape, laid.predictors.shape)
        assert weight.shape == (1, hidden.shape[1]), weight.shape
        self._hidden = hidden
        self._weight = weight

    def values(self) -> torch.Tensor:
        """``[N]`` in float32 (float64 of float64), zero where nothing is scored; aligned like ``log_prob``."""
        wide = torch.float64 if self._hidden.dtype == torch.float64 else torch.float32
        with torch.autocast(self._hidden.device.type, enabled=False):
            return self._spread(F.linear(self._hidden.to(wide), self._weight.to(wide))[:, 0])
