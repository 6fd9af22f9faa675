"""Which tokens drive the entropy down: "The Entropy Mechanism of RL for Reasoning Language Models" (arXiv 2505.22617).

The paper chooses tokens by the covariance of log-probs and advantages over the batch of an update (eq. 9). Here that is the
whole mini-batch of one optimizer step, before it is split: the choice does not depend on micro-batches or ranks. The log-probs
are those of the policy before the update. They are the current ones in the first optimizer step of a batch, as in the
paper; in later steps of the same batch the paper's have moved on, and these have not.
"""

from __future__ import annotations

import torch


def covariances(old_log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``(logp - mean(logp)) (A - mean(A))`` of the tokens in the mask ``[T]`` float64, in their order; means over all of them.

    Args:
        old_log_probs, advantages, mask: ``[N]``.
    """
    log_probs, values = old_log_probs.double()[mask], advantages.double()[mask]
    return (log_probs - log_probs.mean()) * (values - values.mean())


def chosen_at(places: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``[N]`` bool, True at the tokens ``places``, which count the tokens in the mask."""
    out = torch.zeros_like(mask)
    out[mask.nonzero()[:, 0][places]] = True
    return out


def number_chosen(share: float, num_tokens: int) -> int:
    """A share of the tokens, rounded down, but at least one where there is one."""
    return min(max(int(share * num_tokens), 1), num_tokens)
