"""Policy losses of a whole sequence: gspo, geo_mean.

They return one term a token, so chosen that the seq-mean-token-mean of the terms is the paper's loss. With another
aggregation the numbers are defined by these terms, but are no longer the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from oracle.basics import Floats, Masks, Rows, scalar, value
from oracle.policy_losses import Terms, clipped_term


def _kept(mask: Sequence[bool]) -> list[int]:
    return [token for token, kept in enumerate(mask) if kept]


def gspo(
    log_probs: Rows,
    old_log_probs: Floats,
    advantages: Floats,
    masks: Masks,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    log_ratio_cap: float | None = 10.0,
) -> Terms:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071), eqs. 5 to 7, in the token form GSPO-token, eqs. 13 and 14.

    s_i = exp(mean over the row's unmasked tokens of log pi - log pi_old);  s_it = sg(s_i) pi_t / sg(pi_t), whose value
    is s_i and whose gradient flows through token t alone;  -min(s_it A, clip(s_it, 1 - clip_low, 1 + clip_high) A).
    For one advantage a row its seq-mean-token-mean has the value and gradient of the sequence form (eq. 5).
    ``log_ratio_cap``: log s_it is at most this (verl's 10), without gradient above; it matters for A < 0 only.
    """
    out = []
    for row, mask in enumerate(masks):
        kept = _kept(mask)
        terms = [scalar(0.0) for _ in mask]
        if kept:
            log_s = math.fsum(value(log_probs[row][t]) - old_log_probs[row][t] for t in kept) / len(kept)
            for token in kept:
                new = scalar(log_probs[row][token])
                log_s_token = log_s + new - new.detach()
                if log_ratio_cap is not None and log_s > log_ratio_cap:
                    log_s_token = scalar(log_ratio_cap)
                terms[token] = clipped_term(torch.exp(log_s_token), advantages[row][token], 1 - clip_low, 1 + clip_high)
        out.append(terms)
    return out


def geo_mean(
    log_probs: Rows,
    old_log_probs: Floats,
    advantages: Floats,
    masks: Masks,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Terms:
    """GMPO, "Geometric-Mean Policy Optimization" (Zhao et al. 2025, arXiv:2507.20673).

    Per token the log ratio d_t is clipped on the side that PPO would clip: A > 0: min(d_t, clip_high), A < 0:
    max(d_t, -clip_low); the bounds are of the log ratio, so ratios lie in (e^-low, e^high). The row's loss is
    -A exp(mean of the clipped d_t), and each unmasked token's term is that loss: the gradient at a token goes through
    all the row's terms. The advantage is that of the row: where tokens differ, their mean (verl), and its sign also
    decides the side. A = 0 gives 0.
    """
    out = []
    for row, mask in enumerate(masks):
        kept = _kept(mask)
        terms = [scalar(0.0) for _ in mask]
        if kept:
            advantage = math.fsum(advantages[row][t] for t in kept) / len(kept)
            total = scalar(0.0)
            for token in kept:
                d = scalar(log_probs[row][token]) - old_log_probs[row][token]
                if advantage > 0 and value(d) > clip_high:
                    d = scalar(clip_high)
                if advantage < 0 and value(d) < -clip_low:
                    d = scalar(-clip_low)
                total = total + d
            loss = -advantage * torch.exp(total / len(kept))
            for token in kept:
                terms[token] = loss
        out.append(terms)
    return out
