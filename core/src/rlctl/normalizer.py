"""One normaliser: the weight of every item, from global counts known before the first backward.

A loss is ``sum_t item_weight[t] * loss[t]``, so gradients do not change with micro-batch, accumulation or parallel
axes: only the counts over the whole mini-batch enter. N_m is the number of items with ``loss_mask`` in row m, B the
number of rows that have at least one such item, L the norm length.

==========================  ============================  ===========================================
loss_agg_mode               weight of a masked item       paper / use
==========================  ============================  ===========================================
token-mean                  1 / sum_m N_m                 DAPO (arXiv 2503.14476), eq. 8
token-sum                   1                             plain sum
seq-mean-token-sum          1 / B
seq-mean-token-mean         1 / (B * N_m)                 GRPO (DeepSeekMath, arXiv 2402.03300), eq. 3
seq-mean-token-sum-norm     1 / (B * L)                   Dr. GRPO (arXiv 2503.20783), constant length
==========================  ============================  ===========================================

Row weights multiply: a row of weight 0 counts neither in B nor in N; one of weight w counts w times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rlctl.batch import PackedBatch
from rlctl.normalizer_modes import LossAggMode

Reduce = Callable[[Sequence[float], str], list[float]]


def item_weights(
    batch: PackedBatch, mode: LossAggMode | str, *, reduce: Reduce | None = None, norm_length: int | None = None
) -> torch.Tensor:
    """``[N]`` float32 weights of a local mini-batch under global counts.

    Args:
        batch: has item field ``loss_mask`` (bool) and optionally row field ``row_weight`` (float).
        reduce: sums a list of numbers over data parallel ranks (the engine's ``rlctl_reduce``); None for one rank.
        norm_length: L of ``seq-mean-token-sum-norm``, usually ``max_response_length``.
    """
    mode = LossAggMode(mode)
    mask = batch.items["loss_mask"].bool()
    row_weight = batch.rows.get("row_weight", torch.ones(batch.num_rows)).double()
    per_row = _count(mask, batch.cu_seqlens).double()
    has_items = (per_row > 0).double()
    counts = [float((per_row * row_weight).sum()), float((has_items * row_weight).sum())]
    num_tokens, num_rows = reduce(counts, "sum") if reduce is not None else counts
    if mode is LossAggMode.TOKEN_MEAN:
        row_scale = row_weight / max(num_tokens, 1e-12)
    elif mode is LossAggMode.TOKEN_SUM:
        row_scale = row_weight
    else:
        row_scale = row_weight / max(num_rows, 1e-12)
        if mode is LossAggMode.SEQ_MEAN_TOKEN_MEAN:
            row_scale = row_scale / per_row.clamp(min=1)
        elif mode is LossAggMode.SEQ_MEAN_TOKEN_SUM_NORM:
            assert norm_length, "seq-mean-token-sum-norm needs norm_length"
            row_scale = row_scale / norm_length
    weights = batch.spread(row_scale.float())
    # In numpy: a tenth of the time of torch's mixed product or fill. The scales are finite, so 0 times one is 0.
    values = weights.numpy()
    values *= mask.numpy()
    return weights


def _count(mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """``[R]`` how many items of each row are in ``mask`` ``[N]``."""
    if len(mask) == 0:
        return torch.zeros(len(cu_seqlens) - 1)
    starts = cu_seqlens[:-1].clamp(max=len(mask) - 1).numpy()
    counts = torch.from_numpy(np.add.reduceat(mask.numpy().view(np.uint8), starts, dtype=np.int32))
    # Of a row without items reduceat gives the item at its start.
    return counts.where(cu_seqlens.diff() > 0, 0)
