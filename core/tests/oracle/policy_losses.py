"""Policy losses whose term at a token depends on that token only: vanilla, cispo, sapo, gpg, dppo_tv, dppo_kl.

All take per-token log-probs of the policy (float64 torch scalars for a gradient), old log-probs, advantages and masks,
and return one loss a token before aggregation, 0.0 at masked tokens. "sg" in a formula is detached: no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from oracle.basics import Floats, Masks, Number, Rows, ratio, scalar, value

Terms = list[list[torch.Tensor]]


def _each(
    log_probs: Rows,
    old_log_probs: Floats,
    advantages: Floats,
    masks: Masks,
    term: Callable[[Number, float, float], torch.Tensor],
) -> Terms:
    """``term(log_prob, old_log_prob, advantage)`` at each unmasked token, 0.0 at the others."""
    out = []
    for row, mask in enumerate(masks):
        terms = []
        for token, kept in enumerate(mask):
            if kept:
                terms.append(term(log_probs[row][token], old_log_probs[row][token], advantages[row][token]))
            else:
                terms.append(scalar(0.0))
        out.append(terms)
    return out


def clipped_term(r: torch.Tensor, advantage: float, low: float, high: float) -> torch.Tensor:
    """-min(r A, clip(r, low, high) A). Where the clipped side is the smaller one it is a constant: no gradient."""
    clipped = min(max(value(r), low), high)
    if clipped * advantage < value(r) * advantage:
        return scalar(-clipped * advantage)
    return -r * advantage


def vanilla(
    log_probs: Rows,
    old_log_probs: Floats,
    advantages: Floats,
    masks: Masks,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    log_ratio_bound: float | None = None,
) -> Terms:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), dual clip (Ye et al. 2020,
    arXiv:1912.09729), and apart lower and upper bounds (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8).

    A >= 0: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).
    A < 0:  the same, but at most -dual_clip A (the paper's max(min(...), c A), c > 1); None: no dual clip.
    """

    def term(new: Number, old: float, advantage: float) -> torch.Tensor:
        loss = clipped_term(ratio(new, old, log_ratio_bound), advantage, 1 - clip_low, 1 + clip_high)
        if dual_clip is not None and advantage < 0 and value(loss) > -dual_clip * advantage:
            return scalar(-dual_clip * advantage)
        return loss

    return _each(log_probs, old_log_probs, advantages, masks, term)


def cispo(
    log_probs: Rows,
    old_log_probs: Floats,
    advantages: Floats,
    masks: Masks,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    log_ratio_bound: float | None = None,
) -> Terms:
    """CISPO, "MiniMax-M1" (2025, arXiv:2506.13585), eqs. 4 and 5: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi.

    Every token keeps a gradient; only its weight is clipped. The paper uses no lower bound (clip_low = 1 gives that).
    """

    def term(new: Number, old: float, advantage: float) -> torch.Tensor:
        weight = min(max(value(ratio(new, old, log_ratio_bound)), 1 - clip_low), 1 + clip_high)
        return -weight * advantage * scalar(new)

    return _each(log_probs, old_log_probs, advantages, masks, term)


def sapo(
    log_probs: Rows,
    old_log_probs: Floats,
    advantages: Floats,
    masks: Masks,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    log_ratio_bound: float | None = None,
) -> Terms:
    """SAPO, "Soft Adaptive Policy Optimization" (Gao et al. 2025, arXiv:2511.20347).

    -A * sigmoid(tau (r - 1)) * 4 / tau with tau = tau_pos if A > 0 else tau_neg. At r = 1 the gradient is that of
    -A r; the value is -2 A / tau.
    """

    def term(new: Number, old: float, advantage: float) -> torch.Tensor:
        tau = tau_pos if advantage > 0 else tau_neg
        gate = torch.sigmoid(tau * (ratio(new, old, log_ratio_bound) - 1)) * 4 / tau
        return -advantage * gate

    return _each(log_probs, old_log_probs, advantages, masks, term)


def gpg(log_probs: Rows, advantages: Floats, masks: Masks) -> Terms:
    """GPG (Chu et al. 2025, arXiv:2504.02546): -A log pi, no ratio and no clip. (REINFORCE's loss.)"""
    return _each(log_probs, advantages, advantages, masks, lambda new, _, advantage: -advantage * scalar(new))


def binary_tv(old: float, new: float) -> float:
    """TV between Bernoulli(old) and Bernoulli(new), of the sampled token against all others: |old - new|."""
    return abs(old - new)


def binary_kl(old: float, new: float) -> float:
    """KL(Bernoulli(old) || Bernoulli(new)); 0 log 0 = 0, and infinite where ``new`` excludes what ``old`` does not."""
    total = 0.0
    for p, q in ((old, new), (1 - old, 1 - new)):
        if p > 0:
            total += p * math.log(p / q) if q > 0 else math.inf
    return total


def _dppo(
    log_probs: Rows,
    old_log_probs: Floats,
    advantages: Floats,
    masks: Masks,
    divergence: Callable[[float, float], float],
    low: float,
    high: float,
    ratio_cap: float | None,
    log_ratio_bound: float | None,
) -> Terms:
    def term(new: Number, old: float, advantage: float) -> torch.Tensor:
        p_old, p_new = math.exp(old), math.exp(value(new))
        distance = divergence(p_old, p_new)
        pushed_up_and_above = advantage > 0 and p_new > p_old and distance > high
        pushed_down_and_below = advantage <= 0 and p_new < p_old and distance > low
        if pushed_up_and_above or pushed_down_and_below:
            return scalar(0.0)
        weight = value(ratio(new, old, log_ratio_bound))
        if ratio_cap is not None:
            weight = min(weight, ratio_cap)
        return -weight * advantage * scalar(new)

    return _each(log_probs, old_log_probs, advantages, masks, term)


def dppo_tv(
    log_probs: Rows,
    old_log_probs: Floats,
    advantages: Floats,
    masks: Masks,
    *,
    threshold_low: float,
    threshold_high: float,
    ratio_cap: float | None = 20.0,
    log_ratio_bound: float | None = None,
) -> Terms:
    """DPPO-Binary-TV, "Rethinking the Trust Region in LLM RL" (Qi et al. 2026, arXiv:2602.04879).

    A token is dropped (value and gradient 0) if its binary TV |pi - pi_old| exceeds the threshold *and* the advantage
    pushes further away: A > 0 with pi > pi_old (``threshold_high``), or A < 0 with pi < pi_old (``threshold_low``). The
    others give -A sg(min(r, ratio_cap)) log pi, which has the gradient of the paper's -A r below the cap; the value is
    verl's convention, the cap (20) too. The old policy is the one that sampled, if the rollout's log-probs are used.
    """
    return _dppo(
        log_probs,
        old_log_probs,
        advantages,
        masks,
        binary_tv,
        threshold_low,
        threshold_high,
        ratio_cap,
        log_ratio_bound,
    )


def dppo_kl(
    log_probs: Rows,
    old_log_probs: Floats,
    advantages: Floats,
    masks: Masks,
    *,
    threshold_low: float,
    threshold_high: float,
    ratio_cap: float | None = 20.0,
    log_ratio_bound: float | None = None,
) -> Terms:
    """DPPO-Binary-KL: ``dppo_tv`` with KL(Bernoulli(pi_old) || Bernoulli(pi)) as the divergence (same paper)."""
    return _dppo(
        log_probs,
        old_log_probs,
        advantages,
        masks,
        binary_kl,
        threshold_low,
        threshold_high,
        ratio_cap,
        log_ratio_bound,
    )
