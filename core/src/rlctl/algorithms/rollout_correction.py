"""Importance weights and rejections for rows that another program sampled than the one whose policy is trained.

A rollout engine computes in its own kernels and precision, so that a token's probability there, pi_rollout, is not the
trainer's, pi_old, although the weights are the same. The gradient is then off policy. With rho_t = pi_old / pi_rollout:

- truncated importance sampling (TIS): the loss of token t times sg(min(rho, C)). Ionides, "Truncated importance sampling",
  2008; for language models Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025 (rho of
  the token); Liu et al., "When speed kills stability: demystifying RL collapse from the training-inference mismatch", 2025
  (rho of the row);
- IcePop: the weight is rho within [lower, C] and 0 outside; Ling team, arXiv 2510.18855;
- rejection (masked importance sampling; Liu et al. 2025, arXiv 2512.23075): tokens, or whole rows, whose rho lies outside
  [lower, upper] are not trained, as if they had never been sampled;
- veto: a row with one token that the trainer finds all but impossible (rho below a bound) is not trained, as releases of verl
  have had it.

rho is of the token, or of its row: the product over the row's trained tokens (``sequence``), or that product's root
(``geometric``: exp of the mean log-ratio, which does not grow with the length).

N tokens, R rows. Everything here is a constant: no gradient flows through a weight. Log-ratios are nats, in float64 (a product
over thousands of tokens would lose its digits in float32), bounded to +-20 of a token and again of a row. A bound belongs to
its interval. What stands at tokens that are not trained is never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEVELS = ("token", "sequence", "geometric")
BOUND = 20.0
"""Nats: e^20 is beyond every threshold, and its square still a number."""


@dataclass(frozen=True)
class LogRatios:
    """log(pi_old / pi_rollout) of one batch.

    Args:
        tokens: ``[N]`` float64, 0 where not trained.
        rows: ``[R]`` float64, the sum over the row's trained tokens; 0 for a row without one.
        counts: ``[R]`` trained tokens of each row.
        mask: ``[N]`` bool, the trained tokens.
        row_ids: ``[N]`` the row of each token.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    counts: torch.Tensor
    mask: torch.Tensor
    row_ids: torch.Tensor

    def at(self, level: str) -> torch.Tensor:
        """``[N]`` float64: the log-ratio that counts for each token, bounded; 0 where not trained.

        Raises:
            ValueError: an unknown level.
        """
        if level == "token":
            return self.tokens
        if level == "sequence":
            rows = self.rows.clamp(-BOUND, BOUND)
        elif level == "geometric":
            rows = self.rows / self.counts.clamp(min=1)
        else:
            raise ValueError(f"unknown level {level!r}; known: {', '.join(LEVELS)}")
        return torch.where(self.mask, rows[self.row_ids], 0.0)


def log_ratios(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    row_ids: torch.Tensor,
    num_rows: int,
) -> LogRatios:
    """``log pi_old - log pi_rollout`` of the trained tokens and of their rows.

    Args:
        old_log_probs, rollout_log_probs: ``[N]``, of the sampled tokens; trainer's and rollout's.
        mask: ``[N]`` bool, the trained tokens.
        row_ids: ``[N]`` the row of each token.
        num_rows: R.
    """
    difference = old_log_probs.detach().double() - rollout_log_probs.detach().double()
    # Bounded before the sum: a token that the trainer finds impossible (minus infinity) must not meet its opposite there.
    tokens = torch.where(mask, difference, 0.0).clamp(-BOUND, BOUND)
    rows = tokens.new_zeros(num_rows).index_add_(0, row_ids, tokens)
    counts = tokens.new_zeros(num_rows).index_add_(0, row_ids, mask.to(tokens.dtype))
    return LogRatios(tokens, rows, counts, mask, row_ids)


def importance_weights(ratios: LogRatios, level: str, threshold: float, lower: float | None = None) -> torch.Tensor:
    """``[N]`` float32: ``min(rho, threshold)``; with ``lower`` rho where it lies in [lower, threshold], else 0 (IcePop). 0 where
    not trained.

    Args:
        level: one of :data:`LEVELS`.
        threshold: C > 0.
        lower: lower bound of the interval; None truncates.
    """
    rho = ratios.at(level).exp()
    weights = rho.clamp(max=threshold) if lower is None else torch.where(_within(rho, lower, threshold), rho, 0.0)
    return torch.where(ratios.mask, weights, 0.0).float()


def kept_tokens(ratios: LogRatios, level: str, upper: float, lower: float | None = None) -> torch.Tensor:
    """``[N]`` bool: the trained tokens whose rho (of the level) lies in [lower, upper]; ``lower`` defaults to 1 / upper."""
    return ratios.mask & _within(ratios.at(level).exp(), 1 / upper if lower is None else lower, upper)


def catastrophic_tokens(ratios: LogRatios, threshold: float) -> torch.Tensor:
    """``[N]`` bool: the trained tokens whose own rho is below ``threshold``."""
    return ratios.mask & (ratios.tokens.exp() < threshold)


def rows_of(tokens: torch.Tensor, row_ids: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``[R]`` bool: rows with one of ``tokens`` (``[N]`` bool)."""
    rows = torch.zeros(num_rows, dtype=torch.bool, device=tokens.device)
    rows[row_ids[tokens]] = True
    return rows


def divergences(ratios: LogRatios) -> dict[str, float]:
    """How far pi_rollout is from pi_old, from the rollout's own samples; nothing where no token is trained.

    ``kl`` and ``k3_kl``: KL(pi_rollout || pi_old) a token in nats, by the estimators k1 (mean of -log rho; unbiased, may be
    negative) and k3 (mean of rho - 1 - log rho). ``chi2_token``, ``chi2_seq``: mean of rho^2, less 1: the chi-squared divergence,
    which is the variance of untruncated weights; of tokens and of rows.
    """
    d, rows = ratios.tokens[ratios.mask], ratios.rows[ratios.counts > 0].clamp(-BOUND, BOUND)
    if not len(d):
        return {}
    return {
        "kl": -d.mean().item(),
        "k3_kl": (d.expm1() - d).mean().item(),
        "chi2_token": (2 * d).expm1().mean().item(),
        "chi2_seq": (2 * rows).expm1().mean().item(),
    }


def effective_sample_size(weights: torch.Tensor) -> float:
    """Kish's ``(sum w)^2 / (n sum w^2)``, from 1/n (one weight is everything) to 1 (all equal); 0 where all are 0."""
    squares = weights.double().square().sum().item()
    return weights.double().sum().item() ** 2 / (len(weights) * squares) if squares else 0.0


def _within(rho: torch.Tensor, lower: float, upper: float) -> torch.Tensor:
    return (rho >= lower) & (rho <= upper)
