"""What the ``dpo`` and ``rm`` sections make of the rows of a batch: their losses, by the pure functions beside.

P pairs; 2 P rows in the order chosen, rejected, chosen, ...
"""

from __future__ import annotations

from functools import partial

import torch

from rlctl.algorithms.preference.base import PairLosses, log_ratio_gap
from rlctl.algorithms.preference.bradley_terry import bradley_terry
from rlctl.algorithms.preference.hinge import hinge
from rlctl.algorithms.preference.ipo import ipo
from rlctl.algorithms.preference.sigmoid import sigmoid
from rlctl.algorithms.preference.simpo import simpo
from rlctl.config.schema_preference import DPOConfig, RMConfig


def dpo_losses(
    log_probs: torch.Tensor, config: DPOConfig, lengths: torch.Tensor, reference: torch.Tensor | None
) -> PairLosses:
    """The losses of pairs of responses.

    Args:
        log_probs: ``[2 P]`` sums over the tokens of each response.
        lengths: ``[2 P]`` numbers of those tokens.
        reference: ``[2 P]`` as ``log_probs``, of the reference; None: 0.
    """
    ours = log_probs
    theirs = torch.zeros_like(log_probs) if reference is None else reference.to(log_probs)
    if config.average_log_probs or config.loss_type == "simpo":
        ours, theirs = ours / lengths, theirs / lengths
    chosen, rejected = ours[0::2], ours[1::2]
    smoothing = config.label_smoothing
    if config.loss_type == "simpo":
        loss = simpo(chosen, rejected, beta=config.beta, gamma=config.simpo_gamma, label_smoothing=smoothing)
    else:
        gap = log_ratio_gap(chosen, rejected, theirs[0::2], theirs[1::2])
        kinds = {
            "sigmoid": partial(sigmoid, label_smoothing=smoothing),
            "ipo": ipo,
            "hinge": hinge,
        }
        loss = kinds[config.loss_type](gap, beta=config.beta)
    if config.nll_coef:
        loss = loss - config.nll_coef * (log_probs / lengths)[0::2]
    rewards = config.beta * (ours - theirs).detach()
    return PairLosses(loss, rewards[0::2], rewards[1::2])


def reward_losses(scores: torch.Tensor, config: RMConfig, margin: torch.Tensor | None) -> PairLosses:
    """The losses of pairs of scores ``[2 P]``; ``margin`` ``[P]``, None: 0."""
    chosen, rejected = scores[0::2], scores[1::2]
    loss = bradley_terry(chosen, rejected, margin, center=config.center_rewards_coefficient)
    return PairLosses(loss, chosen.detach(), rejected.detach())
