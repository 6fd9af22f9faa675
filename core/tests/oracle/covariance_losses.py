"""Clip-Cov and KL-Cov, "The Entropy Mechanism of RL for Reasoning Language Models" (Cui et al. 2025, arXiv:2505.22617)."""

from __future__ import annotations

from collections.abc import Collection

import torch

from oracle.basics import Floats, Masks, Rows, floats, mean, ratio, scalar, unmasked, value
from oracle.policy_losses import Terms, clipped_term

Tokens = Collection[tuple[int, int]]
"""Tokens as (row, index in the row)."""


def covariances(log_probs: Rows, advantages: Floats, masks: Masks) -> dict[tuple[int, int], float]:
    """(log pi_t - mean log pi) (A_t - mean A) of each unmasked token; the means are over the batch's."""
    values = floats(log_probs)
    log_prob_mean = mean(unmasked(values, masks) or [0.0])
    advantage_mean = mean(unmasked(advantages, masks) or [0.0])
    found = {}
    for row, mask in enumerate(masks):
        for token, kept in enumerate(mask):
            if kept:
                centred = values[row][token] - log_prob_mean
                found[row, token] = centred * (advantages[row][token] - advantage_mean)
    return found


def clip_cov_candidates(
    log_probs: Rows,
    old_log_probs: Floats,
    advantages: Floats,
    masks: Masks,
    *,
    cov_low: float,
    cov_high: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> set[tuple[int, int]]:
    """The tokens that may be chosen: covariance strictly within (cov_low, cov_high), and not clipped by PPO
    already (verl's addition: they have no gradient to take away)."""
    found = set()
    for (row, token), covariance in covariances(log_probs, advantages, masks).items():
        r = value(ratio(value(log_probs[row][token]), old_log_probs[row][token]))
        clipped = min(max(r, 1 - clip_low), 1 + clip_high)
        advantage = advantages[row][token]
        if cov_low < covariance < cov_high and not clipped * advantage < r * advantage:
            found.add((row, token))
    return found


def clip_cov_number(masks: Masks, share: float) -> int:
    """How many are chosen at random from the candidates: share of the unmasked tokens, rounded down, at least 1."""
    return max(int(share * sum(sum(mask) for mask in masks)), 1)


def clip_cov(
    log_probs: Rows,
    old_log_probs: Floats,
    advantages: Floats,
    masks: Masks,
    chosen: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    log_ratio_bound: float | None = None,
) -> Terms:
    """Clip-Cov: a chosen token gives 0, value and gradient; the others PPO's clipped loss (no dual clip).

    The choice is random in the paper and so is given here. The paper writes the plain -r A for the others; taken:
    with PPO's clip, as verl (clip bounds of infinity give the plain form).
    """
    out = []
    for row, mask in enumerate(masks):
        terms = []
        for token, kept in enumerate(mask):
            if not kept or (row, token) in chosen:
                terms.append(scalar(0.0))
            else:
                r = ratio(log_probs[row][token], old_log_probs[row][token], log_ratio_bound)
                terms.append(clipped_term(r, advantages[row][token], 1 - clip_low, 1 + clip_high))
        out.append(terms)
    return out


def kl_cov_chosen(log_probs: Rows, advantages: Floats, masks: Masks, share: float) -> set[tuple[int, int]]:
    """The share of unmasked tokens with the highest covariance, rounded down, at least 1 (if there is one).

    Equal covariances: the earlier token of the batch. (What a fast version does there is its own affair: ``cases`` has
    no such ties at the edge except by accident of equal advantages and log-probs.)
    """
    found = covariances(log_probs, advantages, masks)
    ordered = sorted(found, key=lambda place: -found[place])
    return set(ordered[: max(int(len(found) * share), 1)])


def kl_cov(
    log_probs: Rows,
    old_log_probs: Floats,
    advantages: Floats,
    masks: Masks,
    *,
    share: float,
    kl_coef: float,
    chosen: Tokens | None = None,
    log_ratio_bound: float | None = None,
) -> Terms:
    """KL-Cov: -r A at every token, plus kl_coef |log pi - log pi_old| at the chosen ones. No clip.

    The paper writes KL(pi_old || pi); the absolute log ratio is the estimate of it that verl uses. ``chosen`` defaults
    to ``kl_cov_chosen``.
    """
    if chosen is None:
        chosen = kl_cov_chosen(log_probs, advantages, masks, share)
    out = []
    for row, mask in enumerate(masks):
        terms = []
        for token, kept in enumerate(mask):
            term = scalar(0.0)
            if kept:
                term = (
                    -ratio(log_probs[row][token], old_log_probs[row][token], log_ratio_bound) * advantages[row][token]
                )
                if (row, token) in chosen:
                    distance = torch.abs(scalar(log_probs[row][token]) - old_log_probs[row][token])
                    term = term + kl_coef * distance
            terms.append(term)
        out.append(terms)
    return out
