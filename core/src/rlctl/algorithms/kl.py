"""KL(policy || reference) at each token: estimators from the policy's samples (Schulman 2020, "Approximating KL Divergence"), and
the whole sum over the vocabulary. N tokens, V vocabulary."""

from __future__ import annotations

import torch

ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
ESTIMATORS = ("k1", "k2", "k3", "abs")
FULL = "full"
STRAIGHT_THROUGH = "+"


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: str) -> torch.Tensor:
    """Per-token KL estimate ``[N]``, in nats, with d = log p - log q:

    k1 = d (unbiased), k2 = d^2 / 2 (biased, low variance), k3 = exp(-d) - 1 + d (unbiased, non-negative), abs = |d|. A ``+``
    behind the name keeps the value and takes the gradient of k2.

    k1's *gradient* as a loss has expectation zero (it is the score function's): as a KL loss it regularises nothing;
    k2's gradient is the true KL gradient in expectation. k3's d is bounded to 20 nats, so that one broken token cannot make an
    infinity.

    Raises:
        ValueError: an unknown kind.
    """
    if kind.endswith(STRAIGHT_THROUGH):
        value = kl_estimate(log_probs, ref_log_probs, kind.removesuffix(STRAIGHT_THROUGH)).detach()
        gradient = kl_estimate(log_probs, ref_log_probs, "k2")
        # The difference is exactly zero: it adds the gradient and no rounding.
        return value + (gradient - gradient.detach())
    kind = ALIASES.get(kind, kind)
    d = log_probs - ref_log_probs
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        bounded = (-d).clamp(-20.0, 20.0)
        # expm1: near d = 0, where most tokens are, exp(-d) - 1 would lose its digits.
        return bounded.expm1() - bounded
    if kind == "abs":
        return d.abs()
    raise ValueError(
        f"unknown KL estimator {kind!r}; known: {', '.join(ESTIMATORS)} (kl, mse, low_var_kl), each also with +"
    )


def full_kl(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """``[N]`` the KL itself, ``sum_v p(v) (log p(v) - log q(v))``, in nats; an impossible token of p counts nothing.

    Args:
        log_probs: ``[N, V]`` log p of every token of the vocabulary, with gradient.
        ref_log_probs: ``[N, V]`` log q.
    """
    p = log_probs.exp()
    there = p > 0
    # Masked before the difference as well as after it: 0 * inf is NaN in the value, and inf - inf in the gradient.
    ratio = torch.where(there, log_probs, 0.0) - torch.where(there, ref_log_probs, 0.0)
    return torch.where(there, p * ratio, 0.0).sum(-1)
