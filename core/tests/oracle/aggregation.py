"""From per-token losses to one loss: a weight a token, so that the loss is the weighted sum.

A row without unmasked tokens contributes 0 and is not counted among the sequences. A batch without any has weight 0
everywhere, so its loss is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oracle.basics import Masks, Number, scalar

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def weights(masks: Masks, mode: str, *, norm: float | None = None) -> list[list[float]]:
    """The weight of each token's loss; N tokens in all, S rows that have tokens, n_i tokens in row i (all unmasked):

    token-mean               1 / N            DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 12)
    token-sum                1
    seq-mean-token-sum       1 / S            REINFORCE: a row's log-prob is the sum over its tokens
    seq-mean-token-mean      1 / (S n_i)      GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 3)
    seq-mean-token-sum-norm  1 / (S norm)     Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): one constant
                                              ``norm`` instead of the row's length, e.g. max_response_length

    For the last, releases of verl differ in whether they divide by S; taken: they do, as the name and the paper say.
    """
    counts = [sum(mask) for mask in masks]
    tokens = sum(counts)
    sequences = sum(1 for count in counts if count > 0)
    if mode == "seq-mean-token-sum-norm" and (norm is None or norm <= 0):
        raise ValueError(f"seq-mean-token-sum-norm needs a positive norm, found {norm}")
    out = []
    for mask, count in zip(masks, counts, strict=True):
        weight = 0.0
        if count > 0:
            if mode == "token-mean":
                weight = 1 / tokens
            elif mode == "token-sum":
                weight = 1.0
            elif mode == "seq-mean-token-sum":
                weight = 1 / sequences
            elif mode == "seq-mean-token-mean":
                weight = 1 / (sequences * count)
            elif mode == "seq-mean-token-sum-norm":
                assert norm is not None
                weight = 1 / (sequences * norm)
            else:
                raise ValueError(f"one of {', '.join(MODES)}; found {mode!r}")
        out.append([weight if kept else 0.0 for kept in mask])
    return out


def weighted_sum(terms: Sequence[Sequence[Number]], token_weights: Sequence[Sequence[float]]) -> torch.Tensor:
    """sum_t w_t loss_t, skipping tokens of weight 0 (so that a NaN under a mask does not spread)."""
    total = scalar(0.0)
    for row, row_weights in zip(terms, token_weights, strict=True):
        for term, weight in zip(row, row_weights, strict=True):
            if weight != 0:
                total = total + scalar(term) * weight
    return total


def aggregate(terms: Sequence[Sequence[Number]], masks: Masks, mode: str, *, norm: float | None = None) -> torch.Tensor:
    return weighted_sum(terms, weights(masks, mode, norm=norm))
