"""Losses of a chosen against a rejected response: DPO and its relatives, and the reward model's.

Log-probs are per token; the response's is the sum over its unmasked tokens. One loss a pair, before averaging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oracle.basics import Floats, Masks, Number, Rows, scalar, value


@dataclass(frozen=True)
class Pairs:
    """Per pair, float64 scalars. The rewards are beta (log pi - log ref), DPO's implicit ones, without a gradient."""

    losses: list[torch.Tensor]
    chosen_rewards: list[float]
    rejected_rewards: list[float]


def log_sigmoid(number: Number) -> torch.Tensor:
    """log(1 / (1 + e^-x)), written so that nothing overflows."""
    x = scalar(number)
    if value(x) >= 0:
        return -torch.log1p(torch.exp(-x))
    return x - torch.log1p(torch.exp(x))


def response_log_probs(log_probs: Rows, masks: Masks, *, average: bool = False) -> list[torch.Tensor]:
    """Per row the sum over unmasked tokens (0 for none), or with ``average`` their mean."""
    out = []
    for row, mask in enumerate(masks):
        total = scalar(0.0)
        number = 0
        for token, kept in enumerate(mask):
            if kept:
                total = total + scalar(log_probs[row][token])
                number += 1
        out.append(total / number if average and number else total)
    return out


def dpo(
    chosen: Rows,
    rejected: Rows,
    ref_chosen: Floats | None,
    ref_rejected: Floats | None,
    chosen_masks: Masks,
    rejected_masks: Masks,
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    average: bool = False,
) -> Pairs:
    """With h = (log pi(w) - log ref(w)) - (log pi(l) - log ref(l)), w the chosen response, l the rejected one:

    sigmoid: DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7), -log sigmoid(beta h); with ``label_smoothing`` e
             -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h) (conservative DPO, Mitchell 2023).
    ipo:     IPO (Azar et al. 2023, arXiv:2310.12036, eq. 17), (h - 1 / (2 beta))^2.
    hinge:   SLiC (Zhao et al. 2023, arXiv:2305.10425; the form of Liu et al. 2023, arXiv:2309.06657), max(0, 1 - beta h).

    ``ref_chosen`` and ``ref_rejected`` None: reference-free, the reference's log-probs are 0. ``average``: log-probs
    are means over tokens instead of sums, which TRL takes for ipo alone; the papers have sums, the default here.
    """
    ours = [
        response_log_probs(rows, masks, average=average)
        for rows, masks in ((chosen, chosen_masks), (rejected, rejected_masks))
    ]
    theirs = []
    for rows, masks in ((ref_chosen, chosen_masks), (ref_rejected, rejected_masks)):
        if rows is None:
            theirs.append([0.0] * len(masks))
        else:
            theirs.append([value(total) for total in response_log_probs(rows, masks, average=average)])
    losses, chosen_rewards, rejected_rewards = [], [], []
    for pair in range(len(chosen_masks)):
        better = ours[0][pair] - theirs[0][pair]
        worse = ours[1][pair] - theirs[1][pair]
        h = better - worse
        if kind == "sigmoid":
            loss = -(1 - label_smoothing) * log_sigmoid(beta * h) - label_smoothing * log_sigmoid(-beta * h)
        elif kind == "ipo":
            loss = (h - 1 / (2 * beta)) ** 2
        elif kind == "hinge":
            loss = 1 - beta * h if value(beta * h) < 1 else scalar(0.0)
        else:
            raise ValueError(f"sigmoid, ipo or hinge; found {kind!r}")
        losses.append(loss)
        chosen_rewards.append(beta * value(better))
        rejected_rewards.append(beta * value(worse))
    return Pairs(losses, chosen_rewards, rejected_rewards)


def reward_model(
    chosen: Sequence[Number], rejected: Sequence[Number], *, margins: Sequence[float] | None = None
) -> list[torch.Tensor]:
    """Bradley-Terry: -log sigmoid(r(w) - r(l) - m) a pair (Ouyang et al. 2022, arXiv:2203.02155, eq. 1; the margin m
    is Llama 2's, Touvron et al. 2023, arXiv:2307.09288, eq. 2; 0 by default)."""
    margins = [0.0] * len(chosen) if margins is None else margins
    out = []
    for better, worse, margin in zip(chosen, rejected, margins, strict=True):
        out.append(-log_sigmoid(scalar(better) - scalar(worse) - margin))
    return out
