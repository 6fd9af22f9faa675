"""The losses of the reference, written out from their definitions. Plain Python and torch; see :mod:`rlctl.verify.reference`.

Shapes: T tokens of a row, P of them scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Sample:
    """One row in plain numbers; every list is as long as ``ids`` and speaks of the token at its own index.

    Args:
        scored: whether the token is in the loss; never the first of a row.
        advantages, old, ref: advantage, and log-probs of the policy before the update and of the reference policy.
        returns, old_values: of a critic: what it should say of the state before the token, and what it said before the update.
    """

    ids: list[int]
    scored: list[bool]
    advantages: list[float] = field(default_factory=list)
    old: list[float] = field(default_factory=list)
    ref: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    old_values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Objective:
    """A loss in words: what is summed over tokens, and how tokens are weighted.

    Args:
        kind: ``sft`` (cross-entropy), ``grpo`` (clipped surrogate, KL, entropy bonus) or ``value`` (a critic's clipped
            squared error).
        aggregation: the name of the weighting, see :func:`token_weights`.
        norm_length: the constant length of ``seq-mean-token-sum-norm``.
    """

    kind: str
    aggregation: str
    norm_length: int = 16
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_dual: float = 3.0
    kl_coef: float = 0.1
    entropy_coef: float = 0.05
    value_clip: float = 0.5


def token_weights(samples: Sequence[Sample], objective: Objective) -> list[float]:
    """The weight that each scored token of each row has in the loss.

    ``token-mean``: one over all scored tokens. ``token-sum``: 1. ``seq-mean-token-sum``: one over the rows that score
    anything. ``seq-mean-token-mean``: that, over the row's own tokens. ``seq-mean-token-sum-norm``: that, over a constant.
    """
    counts = [sum(s.scored) for s in samples]
    rows = sum(1 for c in counts if c)
    mode = objective.aggregation
    if mode == "token-mean":
        return [1.0 / sum(counts) for _ in counts]
    if mode == "token-sum":
        return [1.0 for _ in counts]
    if mode == "seq-mean-token-sum":
        return [1.0 / rows for _ in counts]
    if mode == "seq-mean-token-mean":
        return [1.0 / (rows * c) if c else 0.0 for c in counts]
    if mode == "seq-mean-token-sum-norm":
        return [1.0 / (rows * objective.norm_length) for _ in counts]
    raise ValueError(f"unknown aggregation {mode!r}")


def token_losses(sample: Sample, found: Mapping[str, torch.Tensor], objective: Objective) -> torch.Tensor:
    """The loss of each scored token of a row, ``[P]``, from what the model says of those tokens.

    Surrogate: PPO's clip (arXiv 1707.06347, eq. 7) with two bounds, and for negative advantages a bound on the loss (dual
    clip, arXiv 1912.09729, eq. 5). KL: exp(ref - log p) - 1 - (ref - log p), Schulman's third estimator. Value: half the
    larger of two squared errors, of the value and of what it is when it moves by no more than ``value_clip``.

    Args:
        found: ``log_probs`` and ``entropy``, or ``values``, each ``[P]`` float64.
    """
    if objective.kind == "sft":
        return -found["log_probs"]
    device = next(iter(found.values())).device

    def of(values: list[float]) -> torch.Tensor:
        chosen = [v for v, s in zip(values, sample.scored, strict=True) if s]
        return torch.tensor(chosen, dtype=torch.float64, device=device)

    if objective.kind == "value":
        value, goal, before = found["values"], of(sample.returns), of(sample.old_values)
        moved = before + (value - before).clamp(-objective.value_clip, objective.value_clip)
        return torch.maximum((value - goal) ** 2, (moved - goal) ** 2) / 2
    log_p, entropy = found["log_probs"], found["entropy"]
    advantage, old, ref = of(sample.advantages), of(sample.old), of(sample.ref)
    ratio = torch.exp(log_p - old)
    clipped = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    surrogate = torch.where(advantage < 0, torch.maximum(surrogate, objective.clip_dual * advantage), surrogate)
    gap = ref - log_p
    kl = torch.exp(gap) - 1.0 - gap
    return -surrogate + objective.kl_coef * kl - objective.entropy_coef * entropy
