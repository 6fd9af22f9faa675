"""The plain readers: log-softmax over the whole vocabulary at the scored positions, and values there.

The first is the shortest thing that fulfils :class:`rlctl.logits.LogitsReader`, good enough for small vocabularies and the
measure for readers that chunk or split the vocabulary: those give the same numbers without its ``[P, V]`` tensor.

Shapes: N tokens of the micro-batch, P of them scored, V vocabulary, K alternatives.
"""

from __future__ import annotations

import torch

from rlctl.batch import PackedBatch
from rlctl.logits import to_logits_scale


class DenseReader:
    """A reader over logits that are at hand.

    Args:
        logits: ``[N, V]``, a causal model's output over the packed tokens: row t predicts token t + 1.
        batch: the micro-batch; ``loss_mask`` says which tokens are scored, never the first of a row.
    """

    def __init__(self, logits: torch.Tensor, batch: PackedBatch) -> None:
        self._num_items = batch.num_items
        self._index = batch.items["loss_mask"].bool().nonzero().flatten().to(logits.device)
        self._ids = batch.items["input_ids"].to(logits.device)
        temperature = float(batch.meta.get("temperature", 1.0))
        # No position scored: the empty tensor still hangs on the graph, so every gradient is there and zero.
        self._log_p = torch.log_softmax(to_logits_scale(logits[self._index - 1], temperature), dim=-1)

    def _at_items(self, values: torch.Tensor) -> torch.Tensor:
        """``[P, ...]`` -> ``[N, ...]``, zero where nothing is scored."""
        return values.new_zeros((self._num_items, *values.shape[1:])).index_copy(0, self._index, values)

    def log_prob(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """``[N]`` log p(ids[t] | tokens before t)."""
        ids = self._ids if ids is None else ids.to(self._ids.device)
        return self.log_prob_at(ids[:, None])[:, 0]

    def entropy(self) -> torch.Tensor:
        """``[N]`` entropy in nats."""
        p = self._log_p.exp()
        # An impossible token has p = 0 and log p = -inf; masked before the product, so that its gradient is 0 too.
        return self._at_items(-(p * torch.where(p > 0, self._log_p, 0.0)).sum(-1))

    def log_prob_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, ``[N]`` each."""
        return self.log_prob(), self.entropy()

    def log_prob_at(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` ``[N, K]`` -> ``[N, K]``."""
        return self._at_items(self._log_p.gather(-1, ids.to(self._index.device)[self._index]))

    def sum_p2(self) -> torch.Tensor:
        """``[N]`` sum of the squared probabilities, no gradient."""
        return self._at_items((2.0 * self._log_p.detach()).exp().sum(-1))

    def topk(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs, ids), ``[N, k]`` each, no gradient."""
        values, ids = self._log_p.detach().topk(k, dim=-1)
        return self._at_items(values), self._at_items(ids)


class DenseValueReader:
    """A reader over the numbers of a value head that are at hand.

    Args:
        outputs: ``[N]``, the head's output over the packed tokens: row t has seen token t.
        batch: the micro-batch; ``loss_mask`` says which tokens are scored, never the first of a row.
    """

    def __init__(self, outputs: torch.Tensor, batch: PackedBatch) -> None:
        self._index = batch.items["loss_mask"].bool().nonzero().flatten().to(outputs.device)
        # No position scored: the empty tensor still hangs on the graph, so every gradient is there and zero.
        self._values = outputs.float()[self._index - 1]
        self._num_items = batch.num_items

    def values(self) -> torch.Tensor:
        """``[N]`` the value of the state before each scored token, zero elsewhere."""
        return self._values.new_zeros(self._num_items).index_copy(0, self._index, self._values)
