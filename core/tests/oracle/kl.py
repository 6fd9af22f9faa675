"""KL estimators between policy and reference, the straight-through variants, and the coefficient's controllers.

Estimators: J. Schulman, "Approximating KL divergence" (2020), for KL(pi || ref) with tokens sampled from pi.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oracle.basics import Floats, Masks, Number, Rows, mean, scalar, value


def estimate(log_prob: Number, ref_log_prob: float, kind: str, *, k3_bound: float | None = None) -> torch.Tensor:
    """One token's estimate. With d = log pi - log ref:

    k1 = d;  k2 = d^2 / 2;  k3 = e^-d - 1 + d (Schulman; GRPO's eq. 4);  abs = |d|.
    ``k1+``, ``k2+``, ``k3+``, ``abs+``: the value of the estimator, the gradient of k2, whose expectation under pi is
    the gradient of the true KL. verl limits k3 to [-10, 10], without gradient outside: ``k3_bound=10``.
    """
    if kind.endswith("+"):
        with_gradient = estimate(log_prob, ref_log_prob, "k2")
        forward = estimate(log_prob, ref_log_prob, kind.removesuffix("+"), k3_bound=k3_bound)
        return with_gradient - with_gradient.detach() + forward.detach()
    d = scalar(log_prob) - ref_log_prob
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    if kind == "k3":
        k3 = torch.exp(-d) - 1 + d
        if k3_bound is not None and abs(value(k3)) > k3_bound:
            return scalar(math.copysign(k3_bound, value(k3)))
        return k3
    if kind == "abs":
        return torch.abs(d)
    raise ValueError(f"k1, k2, k3 or abs, with or without a trailing +; found {kind!r}")


def per_token(
    log_probs: Rows, ref_log_probs: Floats, masks: Masks, kind: str, *, k3_bound: float | None = None
) -> list[list[torch.Tensor]]:
    """``estimate`` at each unmasked token, 0.0 at the others."""
    out = []
    for row, mask in enumerate(masks):
        terms = []
        for token, kept in enumerate(mask):
            if kept:
                terms.append(estimate(log_probs[row][token], ref_log_probs[row][token], kind, k3_bound=k3_bound))
            else:
                terms.append(scalar(0.0))
        out.append(terms)
    return out


def log_softmax(logits: Sequence[Number]) -> list[torch.Tensor]:
    """log p(v) of one token's logits."""
    highest = max(value(logit) for logit in logits)
    total = scalar(0.0)
    for logit in logits:
        total = total + torch.exp(scalar(logit) - highest)
    return [scalar(logit) - highest - torch.log(total) for logit in logits]


def full(logits: Sequence[Number], ref_logits: Sequence[float]) -> torch.Tensor:
    """One token's exact KL(pi || ref) = sum_v pi(v) (log pi(v) - log ref(v)), from both models' logits."""
    ours, theirs = log_softmax(logits), log_softmax(ref_logits)
    total = scalar(0.0)
    for a, b in zip(ours, theirs, strict=True):
        total = total + torch.exp(a) * (a - b)
    return total


def full_per_token(logits: Sequence[Rows], ref_logits: Sequence[Floats], masks: Masks) -> list[list[torch.Tensor]]:
    """``full`` at each unmasked token; ``logits[row][token][v]``."""
    out = []
    for row, mask in enumerate(masks):
        terms = []
        for token, kept in enumerate(mask):
            terms.append(full(logits[row][token], ref_logits[row][token]) if kept else scalar(0.0))
        out.append(terms)
    return out


def batch_kl(per_token_kl: Floats, masks: Masks) -> float:
    """What a controller is told: the mean over rows of the row's mean over unmasked tokens; empty rows do not count."""
    means = []
    for row, mask in zip(per_token_kl, masks, strict=True):
        kept = [number for number, keep in zip(row, mask, strict=True) if keep]
        if kept:
            means.append(mean(kept))
    return mean(means) if means else 0.0


def penalised_rewards(token_rewards: Floats, per_token_kl: Floats, masks: Masks, coef: float) -> list[list[float]]:
    """KL in the reward (Ouyang et al. 2022, arXiv:2203.02155, eq. 2, per token): r_t - coef KL_t, 0.0 where masked."""
    out = []
    for rewards, kls, mask in zip(token_rewards, per_token_kl, masks, strict=True):
        out.append([r - coef * k if kept else 0.0 for r, k, kept in zip(rewards, kls, mask, strict=True)])
    return out


@dataclass
class FixedController:
    """A coefficient that stays."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> float:
        return self.value


@dataclass
class AdaptiveController:
    """Ziegler et al. 2019 (arXiv:1909.08593): a proportional controller in log space.

    e = clip(KL / target - 1, -0.2, 0.2);  coef <- coef (1 + K e), K = n_steps / horizon. The paper's K = 0.1 a batch;
    implementations write it as rows of the batch over a horizon in rows. ``n_steps``: rows since the last update.
    """

    value: float
    target: float
    horizon: int

    def update(self, current_kl: float, n_steps: int) -> float:
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon
        return self.value
