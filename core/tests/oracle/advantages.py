"""Advantages from one outcome reward a row, compared within the row's group. Each is the same at all of a row's tokens.

Every function takes ``rewards`` (one a row), ``masks`` and ``groups`` and returns per-token advantages, 0.0 at masked
tokens. Rows without unmasked tokens count in their group's statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from oracle.basics import Groups, Masks, mean, members, sample_variance, spread, whiten


def _deviation(values: Sequence[float]) -> float:
    """The group's sample standard deviation; 1 for a group of one."""
    return 1.0 if len(values) == 1 else math.sqrt(sample_variance(values))


def _centre(values: Sequence[float]) -> float:
    """The group's mean; 0 for a group of one."""
    return 0.0 if len(values) == 1 else mean(values)


def _normalised(rewards: Sequence[float], groups: Groups, by_std: bool, eps: float) -> list[float]:
    """Per row: (r - mean of its group) / (std of its group + eps), or without the division."""
    out = [0.0] * len(rewards)
    for rows in members(groups).values():
        values = [rewards[row] for row in rows]
        for row in rows:
            out[row] = rewards[row] - _centre(values)
            if by_std:
                out[row] /= _deviation(values) + eps
    return out


def grpo(
    rewards: Sequence[float], masks: Masks, groups: Groups, *, norm_by_std: bool = True, eps: float = 1e-6
) -> list[list[float]]:
    """GRPO, "DeepSeekMath" (Shao et al. 2024, arXiv:2402.03300), section 4.1.2: A_i = (r_i - mean(r)) / std(r).

    The paper does not say which standard deviation; taken: sample (n - 1), plus ``eps``, as verl. A group of one has
    mean 0 and std 1, so its advantage is r / (1 + eps).
    """
    return spread(_normalised(rewards, groups, norm_by_std, eps), masks)


def dr_grpo(rewards: Sequence[float], masks: Masks, groups: Groups) -> list[list[float]]:
    """Dr. GRPO, "Understanding R1-Zero-Like Training" (Liu et al. 2025, arXiv:2503.20783): A_i = r_i - mean(r).

    Its loss goes with the aggregation seq-mean-token-sum-norm. A group of one keeps its reward (mean 0).
    """
    return grpo(rewards, masks, groups, norm_by_std=False)


def grpo_passk(
    rewards: Sequence[float], masks: Masks, groups: Groups, *, norm_by_std: bool = True, eps: float = 1e-6
) -> list[list[float]]:
    """Pass@k with k the group's size, "Optimizing Language Models for Inference Time Objectives using RL" (Tang et al.
    2025, arXiv:2503.19595), its leave-one-out estimator; also PKPO (arXiv:2505.15201) for k = n.

    Leaving a row out changes the maximum of its group only if it is the best row, and then by r_max - r_second: that
    row gets the difference, the others 0. Ties for the best: the difference is 0, so all get 0. With ``norm_by_std``
    divided by the group's sample standard deviation + eps, as in verl. A group of one has no second: refused.
    """
    out = [0.0] * len(rewards)
    for group, rows in members(groups).items():
        if len(rows) < 2:
            raise ValueError(f"group {group!r} has one row; the best is compared with the second best")
        ordered = sorted(rows, key=lambda row: rewards[row], reverse=True)
        best, second = ordered[0], ordered[1]
        out[best] = rewards[best] - rewards[second]
        if norm_by_std:
            out[best] /= _deviation([rewards[row] for row in rows]) + eps
    return spread(out, masks)


def rloo(rewards: Sequence[float], masks: Masks, groups: Groups) -> list[list[float]]:
    """RLOO, "Back to Basics" (Ahmadian et al. 2024, arXiv:2402.14740): r_i minus the mean of the others.

    A group of one has no others: baseline 0, the reward itself is the advantage (verl).
    """
    out = [0.0] * len(rewards)
    for rows in members(groups).values():
        for row in rows:
            others = [rewards[other] for other in rows if other != row]
            out[row] = rewards[row] - (mean(others) if others else 0.0)
    return spread(out, masks)


def reinforce_plus_plus_baseline(
    rewards: Sequence[float], masks: Masks, groups: Groups, *, eps: float = 1e-8
) -> list[list[float]]:
    """REINFORCE++ with baseline (Hu et al. 2025, arXiv:2501.03262): r_i - mean(r of the group), then batch whitening.

    The whitening is over unmasked tokens (long rows weigh more). A group of one keeps its reward (mean 0).
    """
    return whiten(spread(_normalised(rewards, groups, False, 0.0), masks), masks, eps)


def opo(rewards: Sequence[float], masks: Masks, groups: Groups) -> list[list[float]]:
    """OPO, "On-Policy RL with Optimal Reward Baseline" (Hao et al. 2025, arXiv:2505.23585).

    b = sum_i l_i r_i / sum_i l_i over the group; A_i = r_i - b. The length l_i is the number of unmasked tokens. A
    group of one has baseline 0, as in verl (else its advantage would always be 0). A group without any unmasked token
    has no token to give an advantage to.
    """
    out = [0.0] * len(rewards)
    for rows in members(groups).values():
        lengths = {row: sum(masks[row]) for row in rows}
        total = sum(lengths.values())
        baseline = 0.0
        if len(rows) > 1 and total > 0:
            baseline = math.fsum(lengths[row] * rewards[row] for row in rows) / total
        for row in rows:
            out[row] = rewards[row] - baseline
    return spread(out, masks)


def gpg(
    rewards: Sequence[float], masks: Masks, groups: Groups, *, f_norm: float = 1.0, count: str = "advantages"
) -> list[list[float]]:
    """GPG (Chu et al. 2025, arXiv:2504.02546): A_i = alpha (r_i - mean(r)) / F_norm, alpha = N / (N - M).

    N is the number of rows in the batch. In the paper M counts the rows that give no gradient (groups of equal
    rewards), so N - M is the number of rows whose advantage is not zero: ``count="advantages"``, taken here. verl's
    code counts rows whose *reward* is not zero: ``count="rewards"``. Zero is decided in exact rational arithmetic,
    so that rounding of a mean does not make a row count. No such row: alpha = N (everything is 0 anyway, except with
    ``count="rewards"``). A group of one has mean 0.
    """
    plain = _normalised(rewards, groups, False, 0.0)
    counted = 0
    for rows in members(groups).values():
        exact = [Fraction(rewards[row]) for row in rows]
        centre = Fraction(0) if len(rows) == 1 else sum(exact, Fraction(0)) / len(rows)
        for value in exact:
            if count == "advantages":
                counted += value != centre
            elif count == "rewards":
                counted += value != 0
            else:
                raise ValueError(f"count: advantages or rewards, found {count!r}")
    alpha = len(rewards) / max(counted, 1)
    return spread([alpha * value / f_norm for value in plain], masks)


def gdpo(
    components: Sequence[Sequence[float]],
    masks: Masks,
    groups: Groups,
    *,
    weights: Sequence[float] | None = None,
    group_eps: float = 1e-6,
    eps: float = 1e-6,
) -> list[list[float]]:
    """GDPO (Liu et al. 2026, arXiv:2601.05242): each reward is normalised in its group on its own.

    ``components[k][row]``: the k-th reward. S_i = sum_k w_k (r_ki - mean_k) / (std_k + group_eps); weights default to 1.
    A_i = (S_i - mean S) / (std S + eps), mean and std over the batch's rows: eq. 6 takes them over all (prompt, sample)
    pairs. (verl whitens over unmasked tokens instead, where a long row weighs more.) One row alone: 0. A group of one
    has mean 0 and std 1 in each component.
    """
    weights = [1.0] * len(components) if weights is None else weights
    summed = [0.0] * len(groups)
    for weight, rewards in zip(weights, components, strict=True):
        for row, value in enumerate(_normalised(rewards, groups, True, group_eps)):
            summed[row] += weight * value
    if len(summed) < 2:
        return spread([0.0] * len(summed), masks)
    centre, deviation = mean(summed), math.sqrt(sample_variance(summed))
    return spread([(value - centre) / (deviation + eps) for value in summed], masks)
