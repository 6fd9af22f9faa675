"""The critic's loss and how much of the returns it explains."""

from __future__ import annotations

import math

from oracle.basics import Floats, Masks, Rows, sample_variance, scalar, unmasked, value
from oracle.policy_losses import Terms


def value_loss(
    values: Rows, old_values: Floats, returns: Floats, masks: Masks, *, cliprange: float | None = 0.5
) -> Terms:
    """PPO's value loss with clipping, as OpenAI's baselines have it (Schulman et al. 2017 do not write it down).

    Per token 1/2 max((V - R)^2, (clip(V, V_old - cliprange, V_old + cliprange) - R)^2), before aggregation. Where the
    clipped error is the larger one it is a constant: no gradient. None: no clipping.
    """
    out = []
    for row, mask in enumerate(masks):
        terms = []
        for token, kept in enumerate(mask):
            term = scalar(0.0)
            if kept:
                new, old, wanted = scalar(values[row][token]), old_values[row][token], returns[row][token]
                term = (new - wanted) ** 2 / 2
                if cliprange is not None:
                    clipped = min(max(value(new), old - cliprange), old + cliprange)
                    if (clipped - wanted) ** 2 > (value(new) - wanted) ** 2:
                        term = scalar((clipped - wanted) ** 2 / 2)
            terms.append(term)
        out.append(terms)
    return out


def explained_variance(values: Floats, returns: Floats, masks: Masks) -> float:
    """1 - Var(R - V) / Var(R) over the batch's unmasked tokens; sample or population variance makes no difference.

    NaN where Var(R) is 0 or there are fewer than two tokens: nothing to explain. (verl adds 1e-5 to Var(R) instead.)
    """
    wanted = unmasked(returns, masks)
    if len(wanted) < 2 or sample_variance(wanted) == 0:
        return math.nan
    left = [r - v for r, v in zip(wanted, unmasked(values, masks), strict=True)]
    return 1 - sample_variance(left) / sample_variance(wanted)
