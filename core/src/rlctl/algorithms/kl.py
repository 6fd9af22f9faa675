"""Estimators of KL(policy || reference) from samples of the policy (Schulman 2020, "Approximating KL Divergence")."""

from __future__ import annotations

import torch

ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: str) -> torch.Tensor:
    """Per-token KL estimate ``[N]``, in nats, with d = log p - log q:

    k1 = d (unbiased), k2 = d^2 / 2 (biased, low variance), k3 = exp(-d) - 1 + d (unbiased, non-negative).

    k1's *gradient* as a loss has expectation zero (it is the score function's): as a KL loss it regularises nothing;
    k2's gradient is the true KL gradient in expectation.

    Raises:
        ValueError: an unknown kind.
    """
    kind = ALIASES.get(kind, kind)
    d = log_probs - ref_log_probs
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        bounded = (-d).clamp(-20.0, 20.0)
        return bounded.exp() - 1.0 - bounded
    raise ValueError(f"unknown KL estimator {kind!r}; known: k1, k2, k3 (kl, mse, low_var_kl)")
