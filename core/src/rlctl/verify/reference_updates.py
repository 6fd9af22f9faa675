"""The update rules of the reference, spelt out. Plain Python and torch; see :mod:`rlctl.verify.reference`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rule:
    """An update rule: ``sgd`` (w - lr g) or ``adamw`` (arXiv 1711.05101, algorithm 2). ``clip`` 0: no clipping.

    Without weight decay: engines may leave norm weights and biases out of it, and which they leave out is their own matter.
    """

    name: str
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 0.0


@torch.no_grad()
def adamw_step(
    weight: torch.Tensor,
    grad: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    rule: Rule,
    number: int,
    bound: torch.Tensor,
    off: float,
) -> None:
    """One AdamW step in place (``number`` counts from 1); adds to ``bound`` what an error ``off`` of the gradient can do.

    The step is u = m / (sqrt(v) + eps) with bias-corrected moments. When every gradient so far is off by at most d, m is
    off by at most d (it is a weighted mean), and sqrt(v) too (it is a weighted norm), so u is off by at most
    d (1 + |u|) / max(sqrt(v) + eps - d, eps). Where the gradient is smaller than its error, that says nothing; but |u| never
    exceeds sqrt(sum p^2 / q), with p and q the weights of the gradients in m and v (Cauchy and Schwarz), so twice that is a
    bound as well. It is about 2: a gradient whose sign is not sure moves a weight by lr either way.
    """
    first, second = moments
    first.mul_(rule.beta1).add_((1 - rule.beta1) * grad.float())
    second.mul_(rule.beta2).add_((1 - rule.beta2) * grad.float().square())
    m = first.double() / (1 - rule.beta1**number)
    root = (second.double() / (1 - rule.beta2**number)).sqrt() + rule.eps
    u = m / root
    unsure = off * (1 + u.abs()) / (root - off).clamp(min=rule.eps)
    bound += (rule.lr * unsure.clamp(max=2 * _largest_step(rule, number))).float()
    weight.copy_((weight.double() - rule.lr * u).float())


def _largest_step(rule: Rule, number: int) -> float:
    """The largest |m| / sqrt(v) that ``number`` gradients can make."""

    def shares(beta: float) -> list[float]:
        return [(1 - beta) * beta ** (number - i) / (1 - beta**number) for i in range(1, number + 1)]

    return math.sqrt(sum(p * p / q for p, q in zip(shares(rule.beta1), shares(rule.beta2), strict=True)))
