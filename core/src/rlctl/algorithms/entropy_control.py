"""The weight of the entropy bonus, moved towards a target entropy.

``additive`` is the adaptive entropy control of Skywork-OR1 (He et al. 2025, arXiv 2505.22312): a weight that rises by a constant after
a step whose entropy was below the target and falls by it after one above, and that acts only while the entropy is not above the
target. ``sac`` is soft actor-critic's temperature (Haarnoja et al. 2018, arXiv 1812.05905, eqs. 17 and 18): gradient descent on
``alpha (H - H_target)``, here in log alpha, which keeps alpha positive.

Entropies are means over the trained tokens of a step, in nats. Numbers, not tensors: one a step.
"""

from __future__ import annotations

import math


def next_additive(coef: float, entropy: float, *, target: float, step: float, largest: float) -> float:
    """``c + step`` for ``H < target``, ``c - step`` for ``H > target``, between 0 and ``largest``.

    The bounds are those of the authors' training scripts. Without the lower one the weight would sink as long as the entropy is
    above its target, and be far below 0 when it is needed.
    """
    if entropy < target:
        coef += step
    elif entropy > target:
        coef -= step
    return min(max(coef, 0.0), largest)


def additive_weight(coef: float, entropy: float | None, *, target: float) -> float:
    """``c`` while ``H <= target``, else 0. An entropy that was not measured yet (None) is not above anything."""
    return coef if entropy is None or entropy <= target else 0.0


def next_sac(alpha: float, entropy: float, *, target: float, step: float, largest: float) -> float:
    """``alpha exp(step (target - H))``, at most ``largest``: one step of gradient descent on ``log(alpha) (H - target)``.

    Args:
        alpha: above 0; what is 0 stays there.
        step: the rate, of log alpha a nat.
    """
    # The exponent is bounded, so that one absurd entropy makes no infinity or zero.
    return min(alpha * math.exp(min(max(step * (target - entropy), -20.0), 20.0)), largest)
