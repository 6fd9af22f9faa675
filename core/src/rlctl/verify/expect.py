"""What the reference says of one model: computed once, compared with many topologies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rlctl.hf_quiet import quiet_transformers
from rlctl.records import ModelType
from rlctl.verify import compare
from rlctl.verify.cases import (
    ALL_AGGREGATIONS,
    GRPO,
    SFT,
    VALUE,
    RunPlan,
    batches_of,
    rule_of,
    with_history,
)
from rlctl.verify.compare import FLOAT32_TOLERANCES, OVERALL, Deltas, Tensors
from rlctl.verify.reference import Reference, Run, Scores
from rlctl.verify.reference_losses import Objective, Sample
from rlctl.verify.reference_updates import Rule

ADAMW_GROWTH = 4.0
"""The gradients of later steps start from weights that already differ by what AdamW made of the first one's error."""
SHAKEN_MARGIN = 2.0
"""Loss and grad norm after AdamW: so many times what they move when gradients are off by their tolerance at random."""
COARSE_MARGIN = 4.0
"""A tolerance in low precision: so many times what the reference itself moves when it is computed in that precision."""


FLOAT32_SURE, COARSE_SURE = 1e-4, 0.1
"""How far ahead of the next one an expert's router logit must be for its choice to be compared."""
COARSEST: Mapping[str, float] = {
    "log_probs": 1.0,
    "entropy": 1.0,
    "values": 0.5,
    "experts": 0.3,
    "loss": 0.2,
    "grad_norm": 0.3,
    "loss_adamw": 0.2,
    "grad_norm_adamw": 0.3,
    "gradients": 0.75,
    "weights": 0.75,
    "weights_adamw": 4.0,
}
"""Tolerances beyond these would not notice a factor of two, or a rank that is left out."""


@dataclass(frozen=True)
class Expected:
    """The reference's numbers for one model.

    Args:
        directory: the model's, which both sides load.
        batches: the rows of each step, policies included.
        scores: of the first batch, before training.
        losses: (objective, aggregation) -> (loss, sum of its absolute terms), of the first batch before training.
        runs: by name: the rule that both sides follow, and what came of it.
        tolerances: by quantity.
        sure: routing margin above which a choice counts.
        too_coarse: quantities that this precision cannot compare, with the reason.
    """

    directory: Path
    family: str
    dtype: str
    batches: list[list[Sample]]
    scores: list[Scores]
    losses: Mapping[tuple[str, str], tuple[float, float]]
    runs: Mapping[str, tuple[Rule, Run]]
    tolerances: Mapping[str, float]
    tied: frozenset[str]
    num_experts: int = 0
    sure: float = FLOAT32_SURE
    too_coarse: Mapping[str, str] = field(default_factory=dict)


OBJECTIVES: Mapping[str, Objective] = {"sft": SFT, "grpo": GRPO, "value": VALUE}


def expect(
    directory: Path,
    plans: Sequence[RunPlan],
    *,
    device: str,
    dtype: str,
    num_ranks: int,
    scratch: Path,
    model_type: ModelType = ModelType.LANGUAGE_MODEL,
    report: Callable[[], None] = lambda: None,
) -> Expected:
    """Run the reference.

    Args:
        model_type: the head that the directory has, and that the plans are for.
        dtype: of the computation under test. The reference is computed in float32 whatever it is; in a lower precision a
            second one tells how far rounding alone goes, and tolerances follow from that.
        num_ranks: the most ranks that a topology will have; there are rows enough for each.
        scratch: directory for the tensors.
        report: told of each row of work.
    """
    with quiet_transformers():
        exact = Reference(directory, device, report=report, head=str(model_type))
        plain = batches_of(num_ranks, exact.vocab_size)
        first = [exact.scores(samples, GRPO.temperature) for samples in plain]
        batches = [with_history(s, f, 7 + i) for i, (s, f) in enumerate(zip(plain, first, strict=True))]
        rules = {p.name: rule_of(p.rule, *exact.first_gradient(batches[0], p.objective)) for p in plans}
        coarse: Reference | None = None
        tolerances = dict(FLOAT32_TOLERANCES)
        if dtype != "float32":
            coarse = Reference(directory, device, getattr(torch, dtype), report, head=str(model_type))
            tolerances |= {"gradients": _coarse_gradients(exact, coarse, batches[0], plans, scratch)}
        allowed = ADAMW_GROWTH * tolerances["gradients"]
        both = []
        for name, model in (("exact", exact), ("coarse", coarse)):
            if model is not None:
                both.append(_run(model, plans, rules, batches, allowed, scratch / name))
        scores, losses, runs = both[0]
        tolerances |= _after_adamw(exact, plans, rules, batches, runs, tolerances)
        if coarse is not None:
            tolerances = _widened(tolerances, both[0], both[1], directory, plans, exact.num_experts)
    return Expected(
        directory=directory,
        family=str(exact.model.config.model_type),
        dtype=dtype,
        batches=batches,
        scores=scores,
        losses=losses,
        runs={name: (rules[name], run) for name, run in runs.items()},
        tolerances=tolerances,
        tied=exact.tied_names,
        num_experts=exact.num_experts,
        sure=FLOAT32_SURE if coarse is None else COARSE_SURE,
        too_coarse={} if coarse is None else _too_coarse(tolerances),
    )


_Numbers = tuple[list[Scores], dict[tuple[str, str], tuple[float, float]], dict[str, Run]]


def _run(
    model: Reference,
    plans: Sequence[RunPlan],
    rules: Mapping[str, Rule],
    batches: Sequence[Sequence[Sample]],
    gradient_tolerance: float,
    scratch: Path,
) -> _Numbers:
    model.reset()
    scores = model.scores(batches[0], SFT.temperature)
    losses: dict[tuple[str, str], tuple[float, float]] = {}
    for loss in dict.fromkeys(p.loss for p in plans):
        found = model.losses(batches[0], OBJECTIVES[loss], ALL_AGGREGATIONS)
        losses |= {(loss, aggregation): value for aggregation, value in found.items()}
    allowed = (gradient_tolerance, OVERALL * gradient_tolerance)
    runs = {p.name: model.run(batches, p.objective, rules[p.name], allowed, scratch / p.name) for p in plans}
    return scores, losses, runs


def _after_adamw(
    model: Reference,
    plans: Sequence[RunPlan],
    rules: Mapping[str, Rule],
    batches: Sequence[Sequence[Sample]],
    runs: Mapping[str, Run],
    tolerances: Mapping[str, float],
) -> dict[str, float]:
    """Tolerances of loss and grad norm once AdamW has made steps of gradients that were off by their tolerance."""
    deltas = Deltas()
    for plan in (p for p in plans if p.rule == "adamw"):
        allowed = (tolerances["gradients"], OVERALL * tolerances["gradients"])
        for seed in range(2):
            shaken = model.shaken(batches, plan.objective, rules[plan.name], allowed, seed)
            for found, wanted in list(zip(shaken, runs[plan.name].steps, strict=True))[1:]:
                deltas.note("loss_adamw", abs(found.loss - wanted.loss) / wanted.scale)
                deltas.note("grad_norm_adamw", compare.relative(found.grad_norm, wanted.grad_norm))
    return {q: max(tolerances[q], SHAKEN_MARGIN * d.value) for q, d in deltas.found.items()}


def _coarse_gradients(
    exact: Reference, coarse: Reference, samples: Sequence[Sample], plans: Sequence[RunPlan], scratch: Path
) -> float:
    """How far the reference's own gradients move in low precision, with a margin."""
    deltas = Deltas()
    for plan in plans:
        places = []
        for name, model in (("exact", exact), ("coarse", coarse)):
            model.first_gradient(samples, plan.objective)
            places.append(scratch / "gradients" / name / plan.name)
            model.save_gradient(places[-1])
        with Tensors(places[0]) as wanted, Tensors(places[1]) as found:
            compare.compare_two_gradients(deltas, found, wanted)
    return max(FLOAT32_TOLERANCES["gradients"], COARSE_MARGIN * deltas.found["gradients"].value)


def _widened(
    tolerances: Mapping[str, float],
    exact: _Numbers,
    coarse: _Numbers,
    directory: Path,
    plans: Sequence[RunPlan],
    num_experts: int,
) -> dict[str, float]:
    """Tolerances that the reference in low precision would meet with a margin."""
    deltas = Deltas()
    for when, a, b in [("before", coarse[0], exact[0])] + [
        ("after", coarse[2][p.name].scores, exact[2][p.name].scores) for p in plans
    ]:
        for name in b[0].numbers:
            compare.compare_scores(deltas, name, [s.numbers[name] for s in a], [s.numbers[name] for s in b], when)
        chosen = [s.experts for s in a if s.experts is not None]
        wanted = [(s.experts, s.margin) for s in b if s.experts is not None and s.margin is not None]
        if wanted:
            compare.compare_experts(deltas, chosen, wanted, num_experts, COARSE_SURE, when)
    for key, (loss, scale) in exact[1].items():
        deltas.note("loss", abs(coarse[1][key][0] - loss) / scale)
    for plan in plans:
        found, truth = coarse[2][plan.name], exact[2][plan.name]
        for number, (a, b) in enumerate(zip(found.steps, truth.steps, strict=True)):
            later = "_adamw" if plan.rule == "adamw" and number else ""
            deltas.note(f"loss{later}", abs(a.loss - b.loss) / b.scale)
            deltas.note(f"grad_norm{later}", compare.relative(a.grad_norm, b.grad_norm))
        with Tensors(directory) as start, Tensors(found.weights) as mine, Tensors(truth.weights) as theirs:
            export = ((n, mine[n]) for n in mine.names)
            if plan.rule != "adamw" or truth.bound is None:
                compare.compare_weights(deltas, export, start, theirs, plan.name)
            else:
                with Tensors(truth.bound) as bound:
                    compare.compare_bounded(deltas, export, theirs, bound, plan.name)
    widened = {q: max(tolerances[q], COARSE_MARGIN * d.value) for q, d in deltas.found.items()}
    # The same step twice in one precision: reductions in another order are all that may differ.
    least = {"experts": 0.02, "expert_tokens": 2.0, "checkpoint": 1e-3}
    return {**tolerances, **widened, **{q: max(widened.get(q, 0.0), n) for q, n in least.items()}}


def _too_coarse(tolerances: Mapping[str, float]) -> dict[str, str]:
    """Quantities whose tolerance would let a wrong result pass, with the reason; they are left out."""
    return {
        quantity: f"rounding alone moves it by {tolerances[quantity] / COARSE_MARGIN:.2g}, so a comparison would prove nothing"
        for quantity, limit in COARSEST.items()
        if tolerances[quantity] > limit
    }


def scores_of(samples: Sequence[Sample], values: torch.Tensor) -> list[torch.Tensor]:
    """``[N, ...]`` of a packed batch -> one tensor a row."""
    return list(values.split([len(s.ids) for s in samples]))
