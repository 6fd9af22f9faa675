"""The coefficient of the KL in the reward: fixed, or moved towards a target KL (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)."""

from __future__ import annotations

ERROR_MAX = 0.2
"""Bound on the relative error of one update, both ways."""
FACTOR_MIN = 0.1
"""Least factor of one update: a coefficient of 0 or below would pay for the KL, or stay for good."""
ROWS_MAX = 5
"""A batch of this many horizons, far below its target, would take all of the coefficient away in one update."""


def next_kl_coef(coef: float, current_kl: float, num_rows: int, *, target: float, horizon: int) -> float:
    """``coef (1 + e n / horizon)`` with ``e = clip(KL / target - 1, -0.2, 0.2)``: more weight while the KL is above its target.
    The factor is at least 0.1, so that the coefficient stays above 0 whatever the batch.

    The paper moves by ``1 + 0.1 e`` each batch; here the step is proportional to the rows of the batch, so that a horizon in
    rows means the same for every batch size. Near the target it falls silent: at ``KL == target`` the coefficient stays.

    Args:
        coef: of the batch that ``current_kl`` was measured on.
        current_kl: its mean KL, in nats.
        num_rows: n, its rows.
        target: nats, above 0.
        horizon: rows in one batch of which a KL far off moves the coefficient by a fifth.
    """
    error = min(max(current_kl / target - 1.0, -ERROR_MAX), ERROR_MAX)
    return coef * max(1.0 + error * num_rows / horizon, FACTOR_MIN)
