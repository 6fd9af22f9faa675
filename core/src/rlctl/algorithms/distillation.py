"""Divergences between a student and its teacher, a token each, for on-policy distillation.

p is the student's distribution at a token, q the teacher's, both at one temperature (what reads the logits divides by it) and
in nats. On policy the tokens are the student's own samples. Shapes: N tokens, K alternatives a token, V vocabulary.

Of a sampled token only log p and log q are needed (:func:`sampled_divergence`, :func:`k1_reward`). The top-k divergences see K
tokens of each distribution and lump the other V - K together as one more outcome, the *tail*, of probability one minus the sum
of the K. Merging outcomes never raises a divergence (data processing; Cover and Thomas, Elements of Information Theory, theorem
2.7.1), so each of them is a lower bound of the whole-vocabulary one, is zero where the two agree, grows with K, and is exact at
K = V. Scaling the K to sum to one instead would let the student move mass out of the K at no cost; that is not offered.

One minus a sum in float32 is noise below about 1e-7: a tail under :data:`TAIL_FLOOR` is taken to be that floor. The gradient is
that of the floored value by the true one, so that a student which has lost the teacher's tail is still led back to it. Where the
tail is a weight this moves the value by at most ``TAIL_FLOOR * |log TAIL_FLOOR|`` = 1.4e-5 nats; where both tails are below it,
as at K = V, by nothing.

Papers: GKD (Agarwal et al., arXiv 2306.13649) for on-policy forward, reverse and Jensen-Shannon divergences; MiniLLM (Gu et
al., arXiv 2306.08543) for the reverse KL and its policy gradient; Schulman 2020, "Approximating KL Divergence", for k1, k2, k3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlctl.algorithms.kl import kl_estimate

SAMPLED_MODES = ("k2", "k3", "abs")
TOPK_MODES = ("forward_kl_topk", "reverse_kl_topk", "jsd_topk")

TAIL_FLOOR = 1e-6
"""Least probability of a tail."""


def k1_reward(log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, *, clip: float | None = None) -> torch.Tensor:
    """Reward ``[N]`` of each sampled token under a policy gradient: ``log q - log p``, without a gradient of its own.

    Its expectation over the student's samples is -KL(p || q), and the score-function gradient of it is that of the reverse KL
    of this token (MiniLLM, section 2.2, without the reward of later tokens). As a *loss*, k1 would be useless: the gradient of
    log p - log q in the student knows nothing of the teacher, and its expectation is zero.

    Args:
        log_probs: ``[N]`` log p of the sampled tokens, of the policy that sampled them.
        teacher_log_probs: ``[N]`` log q of the same tokens.
        clip: largest magnitude of a reward, in nats.
    """
    reward = (teacher_log_probs - log_probs).detach()
    return reward if clip is None else reward.clamp(-clip, clip)


def sampled_divergence(
    log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, kind: str, *, loss_max: float | None = None
) -> torch.Tensor:
    """Loss ``[N]`` of sampled tokens, with d = log p - log q:

    k2 = d^2 / 2, whose gradient is in expectation that of KL(p || q);
    k3 = exp(-d) - 1 + d, unbiased for KL(p || q), but as a loss its gradient is in expectation that of KL(q || p);
    abs = |d|, whose expectation is neither; a bounded gradient for each token.

    Args:
        log_probs: ``[N]`` log p, with gradient.
        teacher_log_probs: ``[N]`` log q.
        loss_max: bound on a token's loss in nats; above it the gradient is zero.

    Raises:
        ValueError: another kind; k1 is a reward and no loss (:func:`k1_reward`).
    """
    if kind in SAMPLED_MODES:
        loss = kl_estimate(log_probs, teacher_log_probs, kind)
    elif kind == "k1":
        raise ValueError("k1 as a loss has a gradient that does not depend on the teacher: take k1_reward")
    else:
        raise ValueError(f"unknown divergence of sampled tokens {kind!r}; known: {', '.join(SAMPLED_MODES)}")
    return loss if loss_max is None else loss.clamp(max=loss_max)


@dataclass(frozen=True)
class TopkDivergence:
    """``loss`` ``[N]`` in nats; ``student_mass`` and ``teacher_mass`` ``[N]``: probability of the K tokens, no gradient."""

    loss: torch.Tensor
    student_mass: torch.Tensor
    teacher_mass: torch.Tensor


def topk_divergence(
    log_probs: torch.Tensor,
    teacher_log_probs: torch.Tensor,
    kind: str,
    *,
    beta: float = 0.5,
    log_prob_min: float | None = None,
    loss_max: float | None = None,
) -> TopkDivergence:
    """A divergence over K tokens and the tail; the sums below run over these K + 1 outcomes.

    ``forward_kl_topk``: KL(q || p) = sum q (log q - log p), on the teacher's K most probable tokens: its weights are q, so the
    outcomes that matter are the teacher's.

    ``reverse_kl_topk``: KL(p || q) = sum p (log p - log q), on the *student's* K most probable tokens: its weights are p, and
    what it has to see is a token that the student likes and the teacher does not. On the teacher's tokens such a token would be
    in the tail, where nothing tells the teacher's dislike of it from its dislike of any other.

    ``jsd_topk``: beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p (GKD, eq. 3 and 4), on the teacher's
    tokens. It is at most log 2, so that one token cannot rule a step.

    Args:
        log_probs: ``[N, K]`` log p of the K tokens, with gradient. A reader takes them from its whole vocabulary.
        teacher_log_probs: ``[N, K]`` log q of the same tokens.
        beta: weight of the teacher in m, between 0 and 1.
        log_prob_min: floor of the log-probs, the tails' too, inside the logarithms (not of the weights): bounds the ratio where
            one side is nearly impossible. Below it the student's log-prob has no gradient.
        loss_max: bound on a token's loss in nats; above it the gradient is zero.

    Raises:
        ValueError: another kind.
    """
    assert log_probs.shape == teacher_log_probs.shape, (log_probs.shape, teacher_log_probs.shape)
    if kind not in TOPK_MODES:
        raise ValueError(f"unknown top-k divergence {kind!r}; known: {', '.join(TOPK_MODES)}")
    teacher_log_probs = teacher_log_probs.detach()
    p, log_p, student_mass = _outcomes(log_probs, log_prob_min)
    q, log_q, teacher_mass = _outcomes(teacher_log_probs, log_prob_min)
    if kind == "forward_kl_topk":
        loss = _kl(q, log_q, log_p)
    elif kind == "reverse_kl_topk":
        loss = _kl(p, log_p, log_q)
    else:
        assert 0.0 < beta < 1.0, beta
        # The log of the mean as it is, not through its logarithms: both may be minus infinity.
        mean = beta * log_q.exp() + (1.0 - beta) * log_p.exp()
        log_m = mean.clamp(min=torch.finfo(mean.dtype).tiny).log()
        loss = beta * _kl(q, log_q, log_m) + (1.0 - beta) * _kl(p, log_p, log_m)
    if loss_max is not None:
        loss = loss.clamp(max=loss_max)
    return TopkDivergence(loss, student_mass.detach(), teacher_mass)


def overlap_ratio(ids: torch.Tensor, other_ids: torch.Tensor) -> torch.Tensor:
    """``[N]`` share of ``other_ids`` ``[N, K]`` that are in ``ids`` ``[N, L]``; the ids of a row are distinct in each."""
    # Sorted together, a common one stands beside itself: no [N, L, K] of comparisons.
    merged = torch.cat([ids, other_ids], dim=-1).sort(dim=-1).values
    return (merged[:, 1:] == merged[:, :-1]).sum(-1).to(torch.float32) / other_ids.shape[-1]


def _outcomes(log_probs: torch.Tensor, log_prob_min: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities and (floored) log-probs ``[N, K + 1]`` of the tokens and the tail, and the mass ``[N]`` of the tokens."""
    probs = log_probs.exp()
    mass = probs.sum(-1)
    tail = 1.0 - mass
    tail = tail + (tail.clamp(min=TAIL_FLOOR) - tail).detach()
    logs = torch.cat([log_probs, tail.log()[:, None]], dim=-1)
    if log_prob_min is not None:
        logs = logs.clamp(min=log_prob_min)
    return torch.cat([probs, tail[:, None]], dim=-1), logs, mass


def _kl(weights: torch.Tensor, log_weights: torch.Tensor, log_others: torch.Tensor) -> torch.Tensor:
    """``[N]`` sum of ``weights * (log_weights - log_others)``, where an outcome of weight zero counts nothing.

    Masked before the difference as well as after it: 0 * inf is NaN in the value, and inf - inf in the gradient.
    """
    there = weights > 0
    ratio = torch.where(there, log_weights, 0.0) - torch.where(there, log_others, 0.0)
    return torch.where(there, weights * ratio, 0.0).sum(-1)
