"""What every loss of pairs gives back, and the difference that most of them are a function of. P pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class PairLosses:
    """One loss a pair, before averaging.

    Args:
        loss: ``[P]``, with gradient.
        chosen_rewards, rejected_rewards: ``[P]`` what the model says each response is worth, without gradient: DPO's implicit
            reward (beta times the log-ratio to the reference), or a reward model's score.
    """

    loss: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor


def log_ratio_gap(
    chosen: torch.Tensor, rejected: torch.Tensor, ref_chosen: torch.Tensor, ref_rejected: torch.Tensor
) -> torch.Tensor:
    """``[P]`` h = (log pi(w) - log ref(w)) - (log pi(l) - log ref(l)); w the chosen response, l the rejected one."""
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def smoothed_log_sigmoid(x: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """``[P]`` -(1 - e) log sigmoid(x) - e log sigmoid(-x): the cross-entropy of a label that is wrong with probability e."""
    loss = -(1 - label_smoothing) * F.logsigmoid(x)
    return loss - label_smoothing * F.logsigmoid(-x) if label_smoothing else loss
