"""Sampling: counter-based random numbers, temperature, top-k, top-p, and the log-prob of what was drawn.

Shapes: R rows, V vocabulary.

A row's draw at step t depends on (seed, row, t) alone. Its tokens are therefore the same whatever shares its batch, and
whichever rows were finished before.
"""

from __future__ import annotations

import numpy as np
import torch

from rlctl.generation import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_BELOW_ONE = 1.0 - 2.0**-40
_CANDIDATES = (64, 1024)
"""Largest logits that top-p looks at, before it takes all."""


def _mix(z: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection of 64-bit words that avalanches."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seed: int, rows: np.ndarray, start: int, count: int) -> np.ndarray:
    """Numbers strictly inside (0, 1) for steps ``start .. start + count``: float64 ``[R, count]``.

    48 bits of resolution, half a step away from both ends, so that ``u * total < total`` survives rounding.
    """
    with np.errstate(over="ignore"):
        base = _mix(np.array([(seed * _GOLDEN + 1) & _MASK], dtype=np.uint64))
        stream = _mix(base ^ _mix(rows.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(0x5851F42D4C957F2D)))
        steps = (np.arange(start, start + count, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        words = _mix(stream[:, None] + steps[None, :])
    return ((words >> np.uint64(16)).astype(np.float64) + 0.5) / float(1 << 48)


def _keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Everything below the k-th largest logit becomes -inf; ties with it stay."""
    if k >= logits.shape[-1]:
        return logits
    threshold = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < threshold, float("-inf"))


def _nucleus_threshold(
    sorted_logits: torch.Tensor, log_total: torch.Tensor, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(smallest logit of the nucleus ``[R, 1]``, whether the given candidates hold it ``[R]``)."""
    before = (sorted_logits - log_total).exp().cumsum(-1)
    count = (before < top_p).sum(-1, keepdim=True)
    covered = count[:, 0] < sorted_logits.shape[-1]
    return sorted_logits.gather(-1, count.clamp(max=sorted_logits.shape[-1] - 1)), covered


def _keep_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches ``top_p`` (Holtzman et al., arXiv 1904.09751).

    The last token of the set is the one that crosses ``top_p``; ties with it stay.
    """
    log_total = logits.logsumexp(-1, keepdim=True)
    threshold = torch.full_like(log_total, float("-inf"))
    # Most nuclei are small. Only rows whose candidates do not reach top_p are looked at again, with more of them.
    rows = torch.arange(logits.shape[0], device=logits.device)
    for count in (*_CANDIDATES, logits.shape[-1]):
        candidates = logits[rows].topk(min(count, logits.shape[-1]), dim=-1).values
        threshold[rows], covered = _nucleus_threshold(candidates, log_total[rows], top_p)
        rows = rows[~covered]
        if not rows.numel():
            break
    return logits.masked_fill(logits < threshold, float("-inf"))


def draw(logits: torch.Tensor, params: SamplingParams, u: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    Args:
        logits: ``[R, V]``, any float dtype; not changed.
        params: filters are applied in the order temperature, top-k, top-p.
        u: float64 ``[R]`` inside (0, 1); unused when greedy.

    Returns:
        (ids int64 ``[R]``, natural log-probs float32 ``[R]``): under the distribution drawn from; when greedy, under
        temperature 1 without filters.
    """
    x = logits.float()
    if params.temperature == 0.0:
        top, ids = x.max(-1)
        return ids, top - x.logsumexp(-1)
    if params.temperature != 1.0:
        x = x / params.temperature
    if params.top_k > 0:
        x = _keep_top_k(x, params.top_k)
    if params.top_p < 1.0:
        x = _keep_top_p(x, params.top_p)
    assert u is not None
    x = x - x.amax(-1, keepdim=True)
    ids, total = _invert(x, u[:, None])
    log_probs = x.gather(-1, ids) - total.log().float()
    return ids[:, 0], log_probs[:, 0]


def _invert(x: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse transform on the unnormalised weights ``exp(x)``: (ids ``[R, 1]``, total weight float64 ``[R, 1]``).

    Two levels: first the block of the vocabulary, then the token in it. Sums and scans are in float64, but of one number
    a block and of one block, so a large vocabulary loses none of its tail and is still read only once.
    """
    rows, vocab = x.shape
    width = 1 << max(3, (vocab.bit_length() + 1) // 2)
    blocks = -(-vocab // width)
    weights = x.new_zeros(rows, blocks * width)
    torch.exp(x, out=weights[:, :vocab])
    weights = weights.view(rows, blocks, width)
    sums = weights.sum(-1).double()
    scan = sums.cumsum(-1)
    total = scan[:, -1:]
    # "right" skips what has no weight: a block, and below a token, is only ever taken when it makes its scan grow.
    block = torch.searchsorted(scan, u * total, right=True).clamp_(max=blocks - 1)
    inside = sums.gather(-1, block)
    share = ((u * total - (scan.gather(-1, block) - inside)) / inside).clamp_(0.0, _BELOW_ONE)
    scan = weights[torch.arange(rows, device=x.device), block[:, 0]].cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(scan, share * scan[:, -1:], right=True).clamp_(max=width - 1)
    # Only NaN could point beyond the vocabulary; its log-prob then says what is wrong.
    return (block * width + token).clamp_(max=vocab - 1), total
