"""Weights and rejections for rows that were sampled by a policy other than the one whose gradient is taken.

Equations as verl's docs/algo/rollout_corr_math.md states them (sections 3.3 and 3.4); truncated importance sampling is
Ionides 2008, for language models Yao et al. 2025. rho_t = exp(log pi_train - log pi_rollout), over unmasked tokens of
the row. Weights are constants: no gradient flows through them. A threshold is inclusive: a ratio equal to it is kept.
verl clamps log ratios (and their sum over a row) to [-20, 20] first; here they are not clamped. The difference is a
weight of 2e-9 where it is smaller still, or nothing where the weight is truncated below e^20.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from oracle.basics import Floats, Masks

LEVELS = ("token", "sequence", "geometric")


def _log_ratios(train: Sequence[float], rollout: Sequence[float], mask: Sequence[bool]) -> list[float]:
    return [a - b for a, b, kept in zip(train, rollout, mask, strict=True) if kept]


def ratios(train_log_probs: Floats, rollout_log_probs: Floats, masks: Masks, level: str) -> list[list[float]]:
    """The importance ratio of each unmasked token, 0.0 at masked ones.

    token: rho_t;  sequence: the product of rho over the row;  geometric: its root, exp(mean of log rho). The last two
    are the same at all of a row's tokens.
    """
    if level not in LEVELS:
        raise ValueError(f"one of {', '.join(LEVELS)}; found {level!r}")
    out = []
    for train, rollout, mask in zip(train_log_probs, rollout_log_probs, masks, strict=True):
        logs = _log_ratios(train, rollout, mask)
        of_row = []
        for token, kept in enumerate(mask):
            if not kept:
                of_row.append(0.0)
            elif level == "token":
                of_row.append(math.exp(train[token] - rollout[token]))
            elif level == "sequence":
                of_row.append(math.exp(math.fsum(logs)))
            else:
                of_row.append(math.exp(math.fsum(logs) / len(logs)))
        out.append(of_row)
    return out


def truncated_weights(
    train_log_probs: Floats, rollout_log_probs: Floats, masks: Masks, *, level: str, threshold: float
) -> list[list[float]]:
    """min(ratio, threshold) at each unmasked token, 0.0 at masked ones; ``level`` as in ``ratios``."""
    found = ratios(train_log_probs, rollout_log_probs, masks, level)
    return [[min(number, threshold) for number in row] for row in found]


def rejection_masks(
    train_log_probs: Floats,
    rollout_log_probs: Floats,
    masks: Masks,
    *,
    level: str,
    upper: float,
    lower: float | None = None,
) -> list[list[bool]]:
    """The masks without what lies outside [lower, upper]: a token by its own ratio, or a whole row by the row's.

    ``lower`` defaults to 1 / upper.
    """
    lower = 1 / upper if lower is None else lower
    found = ratios(train_log_probs, rollout_log_probs, masks, level)
    out = []
    for row, mask in zip(found, masks, strict=True):
        out.append([kept and lower <= number <= upper for number, kept in zip(row, mask, strict=True)])
    return out
