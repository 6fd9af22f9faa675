"""What is run on both sides: rows, losses, update rules, and how often.

Rows are made as plain numbers. The reference takes them as they are; the path under test gets them packed, with rlctl's own
losses. The table of objectives is by model type, so that a new head brings its losses here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rlctl.algorithms.losses import CrossEntropyLoss, PolicyLoss
from rlctl.algorithms.value_loss import ValueLoss
from rlctl.batch import GROUP, PackedBatch, pack
from rlctl.config.schema import ActorConfig, OptimConfig, PolicyLossConfig
from rlctl.logits import LossFn
from rlctl.microbatch import MicroBatchPlan
from rlctl.normalizer_modes import LossAggMode
from rlctl.records import ModelType
from rlctl.verify.reference import Scores
from rlctl.verify.reference_losses import Objective, Sample
from rlctl.verify.reference_updates import Rule

NUM_STEPS = 3
TOKEN_BUDGET = 26
"""Tokens of a micro-batch a rank. No row is longer, and a rank's rows are about twice as many."""
ROW_BUDGET = 2
MIN_RANKS = 4
"""Rows enough for so many ranks are made in any case, so that small topologies share a reference."""
_SHORTEST, _LONGEST = 3, 24
_NORM_LENGTH = 16

SFT = Objective("sft", "token-mean", _NORM_LENGTH)
GRPO = Objective("grpo", "seq-mean-token-mean", _NORM_LENGTH, temperature=0.8)
VALUE = Objective("value", "token-mean", _NORM_LENGTH)


@dataclass(frozen=True)
class RunPlan:
    """One engine's life: a loss, an update rule, a way to split into micro-batches.

    Args:
        loss: its name in reports: ``sft``, ``grpo``, ``value``.
        rule: ``sgd``, ``smooth`` (what stands in for it) or ``adamw``; see :func:`rule_of`.
    """

    name: str
    loss: str
    objective: Objective
    rule: str
    plan: MicroBatchPlan


RUNS: Mapping[ModelType, tuple[RunPlan, ...]] = {
    ModelType.LANGUAGE_MODEL: (
        RunPlan("sft-sgd", "sft", SFT, "sgd", MicroBatchPlan(max_tokens=TOKEN_BUDGET)),
        RunPlan("grpo-sgd", "grpo", GRPO, "sgd", MicroBatchPlan(max_rows=ROW_BUDGET)),
        RunPlan(
            "grpo-adamw",
            "grpo",
            replace(GRPO, aggregation="seq-mean-token-sum-norm"),
            "adamw",
            MicroBatchPlan(max_tokens=TOKEN_BUDGET),
        ),
    ),
    ModelType.VALUE_MODEL: (
        RunPlan("value-sgd", "value", VALUE, "sgd", MicroBatchPlan(max_tokens=TOKEN_BUDGET)),
        RunPlan(
            "value-adamw",
            "value",
            replace(VALUE, aggregation="seq-mean-token-mean"),
            "adamw",
            MicroBatchPlan(max_rows=ROW_BUDGET),
        ),
    ),
}
"""Runs by model type, for each that there is."""


def without_sgd(plans: Sequence[RunPlan]) -> tuple[RunPlan, ...]:
    """The same runs for an engine that has no SGD."""
    return tuple(
        replace(p, name=p.name.replace("sgd", "smooth"), rule="smooth") if p.rule == "sgd" else p for p in plans
    )


def samples_of(seed: int, num_rows: int, vocab_size: int) -> list[Sample]:
    """Ragged random rows with a random loss mask; the first token of a row is never scored.

    Four rows share a prompt, as the samples of one prompt do. One row (of five or more) scores nothing, one has two tokens.
    """
    rng = random.Random(seed)
    prompt = [rng.randrange(vocab_size) for _ in range(5)]
    samples = []
    for row in range(num_rows):
        length = rng.randint(_SHORTEST, _LONGEST)
        ids = [rng.randrange(vocab_size) for _ in range(length)]
        first = 1
        if row < 4 and num_rows > 4:
            ids, first = prompt + ids[: _LONGEST - len(prompt)], len(prompt)
        if row == 5:
            ids = ids[:2]
        scored = [t >= first and rng.random() < 0.6 for t in range(len(ids))]
        if row == 4:
            scored = [False] * len(ids)
        elif not any(scored):
            scored[-1] = True
        samples.append(Sample(ids, scored, [rng.gauss(0.0, 1.0) for _ in ids]))
    return samples


def with_history(samples: Sequence[Sample], scores: Sequence[Scores], seed: int) -> list[Sample]:
    """``samples`` with what their losses compare the model with, beside what it says at its start (``scores``)."""
    of_values = all("values" in score.numbers for score in scores)
    return with_values(samples, scores, seed) if of_values else with_policies(samples, scores, seed)


def with_values(samples: Sequence[Sample], scores: Sequence[Scores], seed: int) -> list[Sample]:
    """``samples`` with returns and the values of an older critic, some way beside those of the model at its start.

    The model's values lie within the bound of the clip and beyond it on both sides, and its errors are the larger and the
    smaller ones; no pair of errors is so close that rounding could swap them.
    """
    rng = random.Random(seed)
    clip = VALUE.value_clip
    moves = (0.0, 0.2 * clip, -0.3 * clip, 1.8 * clip, -1.8 * clip)
    out = []
    for sample, score in zip(samples, scores, strict=True):
        old, returns = [], []
        for now in score.numbers["values"].tolist():
            move = rng.choice(moves) + rng.uniform(-0.02, 0.02)
            beyond = move - max(-clip, min(clip, move))
            error = rng.gauss(0.0, 0.7)
            while abs(error - beyond / 2) < 0.05:
                error = rng.gauss(0.0, 0.7)
            old.append(now - move)
            returns.append(now - error)
        out.append(replace(sample, returns=returns, old_values=old))
    return out


def with_policies(samples: Sequence[Sample], scores: Sequence[Scores], seed: int) -> list[Sample]:
    """``samples`` with log-probs of an older and of a reference policy, some nats beside those of the model at its start.

    The ratios lie on both sides of every bound of the surrogate, and none so close to one that rounding could take it across.
    """
    rng = random.Random(seed)
    ratios = (0.0, 0.06, -0.1, 0.45, -0.45, 1.5)
    out = []
    for sample, score in zip(samples, scores, strict=True):
        now = score.numbers["log_probs"].tolist()
        old = [p - rng.choice(ratios) - rng.uniform(-0.02, 0.02) for p in now]
        ref = [p + rng.gauss(0.0, 0.3) for p in now]
        out.append(replace(sample, old=old, ref=ref))
    return out


def batches_of(num_ranks: int, vocab_size: int) -> list[list[Sample]]:
    """The rows of each step: many for every rank, fewer, and at last fewer rows than some meshes have ranks."""
    ranks = max(num_ranks, MIN_RANKS)
    sizes = (3 * ranks + 1, 2 * ranks + 1, 3)
    assert len(sizes) == NUM_STEPS
    return [samples_of(100 + i, size, vocab_size) for i, size in enumerate(sizes)]


def packed(samples: Sequence[Sample], objective: Objective) -> PackedBatch:
    """The rows as the path under test takes them."""
    items: dict[str, list[list[float]] | list[list[int]] | list[list[bool]]] = {
        "input_ids": [s.ids for s in samples],
        "loss_mask": [s.scored for s in samples],
    }
    if objective.kind == "grpo":
        items["advantages"] = [s.advantages for s in samples]
        items["old_log_probs"] = [s.old for s in samples]
        items["ref_log_probs"] = [s.ref for s in samples]
    if objective.kind == "value":
        items["returns"] = [s.returns for s in samples]
        items["old_values"] = [s.old_values for s in samples]
    dtypes = {"input_ids": torch.long, "loss_mask": torch.bool}
    dtypes |= {n: torch.float32 for n in items if n not in dtypes}
    # Rows that begin alike are samples of one prompt, for engines that compute it once.
    groups: dict[tuple[int, ...], int] = {}
    rows = {GROUP: [groups.setdefault(tuple(s.ids[:3]), len(groups)) for s in samples]}
    return pack(items, rows, {"temperature": objective.temperature}, dtypes)


def loss_of(objective: Objective) -> LossFn:
    """rlctl's own loss for an objective."""
    if objective.kind == "sft":
        return CrossEntropyLoss()
    if objective.kind == "value":
        return ValueLoss(clip_range=objective.value_clip)
    surrogate = PolicyLossConfig(
        clip_ratio_low=objective.clip_low, clip_ratio_high=objective.clip_high, clip_ratio_c=objective.clip_dual
    )
    return PolicyLoss(
        ActorConfig(
            policy_loss=surrogate,
            entropy_coeff=objective.entropy_coef,
            use_kl_loss=True,
            kl_loss_coef=objective.kl_coef,
            kl_loss_type="k3",
        )
    )


def optimizer_of(rule: Rule) -> dict[str, object]:
    """The ``optim`` section for a rule."""
    assert rule.name in ("adamw", "sgd"), rule.name
    return OptimConfig(
        name="sgd" if rule.name == "sgd" else "adamw",
        lr=rule.lr,
        betas=(rule.beta1, rule.beta2),
        eps=rule.eps,
        weight_decay=0.0,
        clip_grad=rule.clip,
    ).model_dump()


def rule_of(name: str, grad_norm: float, loss: float, weight_norm: float) -> Rule:
    """An update rule for a model whose first gradient has ``grad_norm``.

    SGD moves the weights as a whole by a fiftieth of their size, but expects to change the loss by a quarter of it at most:
    far enough to read the gradient off the step, not so far that the next one starts somewhere else. ``smooth`` is AdamW with
    an eps of 1: it moves a weight by about as much, the first time by lr g / (|g| + 1), which can be turned round, and is as
    little upset by small errors. AdamW clips to half the norm, so that clipping is part of what is compared.
    """
    if name == "adamw":
        return Rule("adamw", lr=1e-3, clip=0.5 * grad_norm)
    lr = min(0.02 * weight_norm / grad_norm, 0.25 * max(abs(loss), 0.1) / grad_norm**2)
    return Rule("sgd", lr=lr) if name == "sgd" else Rule("adamw", lr=lr, eps=1.0)


ALL_AGGREGATIONS = tuple(str(mode) for mode in LossAggMode)
