"""One topology under test: the engine as trainers use it, over a worker group, against what the reference says."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlctl.config.schema import ModelConfig
from rlctl.errors import ConfigError
from rlctl.runtime.group import WorkerGroup
from rlctl.runtime.records import BuildSpec
from rlctl.runtime.remote import RemoteEngine
from rlctl.verify import compare
from rlctl.verify.cases import ALL_AGGREGATIONS, SFT, RunPlan, loss_of, optimizer_of, packed
from rlctl.verify.compare import Deltas, Tensors
from rlctl.verify.expect import OBJECTIVES, Expected, scores_of
from rlctl.verify.reference import Run, Scores
from rlctl.verify.reference_losses import Sample
from rlctl.verify.reference_updates import Rule

_BUCKET_BYTES = 64 * 2**20
_ROLE = "actor"
"""Verified under the name that training uses, so that wrappers which other plugins contribute to it take part."""


@dataclass(frozen=True)
class Target:
    """What is under test.

    Args:
        backend, axes: name of the backend and sizes of the axes larger than one.
        settings: the backend's ``engine`` section, complete.
        master: dtype of the master weights.
    """

    backend: str
    model_type: str
    axes: Mapping[str, int]
    settings: Mapping[str, Any]
    master: str = "float32"


@dataclass
class Measured:
    """What was seen.

    Args:
        skipped: what could not be compared, with the reason.
        micro_batches: largest number of micro-batches of a step, by run.
        notes: of the engine.
    """

    deltas: Deltas = field(default_factory=Deltas)
    skipped: dict[str, str] = field(default_factory=dict)
    micro_batches: dict[str, int] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def measure(
    group: WorkerGroup,
    target: Target,
    plans: Sequence[RunPlan],
    expected: Expected,
    scratch: Path,
    measured: Measured,
    report: Callable[[], None] = lambda: None,
) -> None:
    """Run every plan on ``group`` and note the deltas in ``measured``, which keeps what was seen before an error.

    Args:
        scratch: an empty directory that every rank sees.
        report: told when a run has ended.

    Raises:
        SgdRefusedError: the engine refuses its settings for an SGD run.
        RlctlError: the engine refuses, a rank fails, or the replicas disagree.
    """
    for number, plan in enumerate(plans):
        rule, run = expected.runs[plan.name]
        state = scratch / plan.name
        with _closing(_build(group, target, expected.directory, rule)) as engine:
            if number == 0:
                measured.notes |= dict(engine.info.notes)
                _before_training(engine, target, plans, expected, measured)
            ended = _train(engine, plan, rule, run, expected, state, measured)
            weights = dict(exported(engine)) if plan.rule == "adamw" else {}
        if plan.rule == "adamw":
            # A new one: in one that has stepped, what a checkpoint lacks may still lie about.
            with _closing(_build(group, target, expected.directory, rule)) as engine:
                _load_into_new(engine, plan, expected, state, ended, weights, measured.deltas)
            shutil.rmtree(state, ignore_errors=True)
        report()


@contextmanager
def _closing(engine: RemoteEngine) -> Iterator[RemoteEngine]:
    """``engine``, shut down at the end."""
    try:
        yield engine
    finally:
        engine.shutdown()


class SgdRefusedError(ConfigError):
    """The engine has no plain SGD: its runs need another rule (see :func:`rlctl.verify.cases.without_sgd`)."""


def _build(group: WorkerGroup, target: Target, directory: Path, rule: Rule) -> RemoteEngine:
    try:
        return RemoteEngine.build(group, _spec(target, directory, rule))
    except ConfigError as error:
        if rule.name != "sgd":
            raise
        raise SgdRefusedError(
            error.what, found=error.found, wanted=error.wanted, next=error.next, details=error.details
        ) from error


def _spec(target: Target, directory: Path, rule: Rule) -> BuildSpec:
    model = ModelConfig(path=str(directory), dtype=target.master)  # type: ignore[arg-type]
    return BuildSpec(
        role=_ROLE,
        kind="train",
        backend=target.backend,
        model={**model.model_dump(), "seed": 0},
        engine=dict(target.settings),
        axes=dict(target.axes),
        optimizer=optimizer_of(rule),
        model_type=target.model_type,
    )


def _before_training(
    engine: RemoteEngine, target: Target, plans: Sequence[RunPlan], expected: Expected, measured: Measured
) -> None:
    """The export of a fresh engine, its scores, and its losses under every weighting of tokens."""
    deltas = measured.deltas
    with Tensors(expected.directory) as file:
        compare.compare_export(deltas, exported(engine), file, getattr(torch, target.master), expected.tied)
    _score(
        engine, plans[0], expected.batches[0], expected.scores, SFT.temperature, expected, measured, "before training"
    )
    for plan in {p.loss: p for p in plans}.values():
        objective = OBJECTIVES[plan.loss]
        batch = packed(expected.batches[0], objective)
        for aggregation in ALL_AGGREGATIONS:
            found, _ = engine.eval_loss(batch, loss_of(objective), plan.plan, aggregation, objective.norm_length)
            wanted, scale = expected.losses[plan.loss, aggregation]
            deltas.note("loss", abs(found - wanted) / scale, f"{plan.loss}, {aggregation}, before training")


def _score(
    engine: RemoteEngine,
    plan: RunPlan,
    samples: Sequence[Sample],
    wanted: Sequence[Scores],
    temperature: float,
    expected: Expected,
    measured: Measured,
    when: str,
) -> None:
    batch = packed(samples, SFT).with_meta(temperature=temperature)
    numbers = list(wanted[0].numbers)
    want = list(numbers)
    if expected.num_experts > 0 and wanted[0].experts is None:
        measured.skipped["experts"] = "compared where the model has the head of a language model"
    routed = expected.num_experts > 0 and wanted[0].experts is not None
    if routed and "experts" in engine.info.notes:
        want.append("experts")
    elif routed:
        measured.skipped["experts"] = f"not exposed: the engine of {engine.name} does not report its expert choices"
    found = engine.infer_batch(batch, plan.plan, tuple(want))
    rows = {name: scores_of(samples, values) for name, values in found.items()}
    for name in numbers:
        compare.compare_scores(measured.deltas, name, rows[name], [s.numbers[name] for s in wanted], when)
    if "experts" in rows:
        choices = [(s.experts, s.margin) for s in wanted if s.experts is not None and s.margin is not None]
        compare.compare_experts(measured.deltas, rows["experts"], choices, expected.num_experts, expected.sure, when)


def _train(
    engine: RemoteEngine,
    plan: RunPlan,
    rule: Rule,
    run: Run,
    expected: Expected,
    state: Path,
    measured: Measured,
) -> tuple[float, float]:
    """The steps of one run, and what came of them: the last one's loss and gradient norm.

    Args:
        state: where AdamW's run leaves a checkpoint of what was before the last step.
    """
    deltas = measured.deltas
    ended = (0.0, 0.0)
    for number, wanted in enumerate(run.steps):
        if plan.rule == "adamw" and number == len(run.steps) - 1:
            state.mkdir(parents=True)
            engine.save_state(state)
        loss, grad_norm, num_micro_batches = _step(engine, plan, expected.batches[number])
        ended = loss, grad_norm
        measured.micro_batches[plan.name] = max(measured.micro_batches.get(plan.name, 0), num_micro_batches)
        when = f"{plan.name}, step {number + 1}"
        later = "_adamw" if plan.rule == "adamw" and number else ""
        deltas.note(f"loss{later}", abs(loss - wanted.loss) / wanted.scale, when)
        deltas.note(f"grad_norm{later}", compare.relative(grad_norm, wanted.grad_norm), when)
        if number == 0 and plan.rule != "adamw":
            eps = None if rule.name == "sgd" else rule.eps
            with Tensors(expected.directory) as start, Tensors(run.gradient) as gradient:
                compare.compare_gradients(
                    deltas, exported(engine), start, gradient, rule.lr, plan.name, eps, expected.tied
                )
    with Tensors(expected.directory) as start, Tensors(run.weights) as weights:
        if plan.rule != "adamw":
            compare.compare_weights(deltas, exported(engine), start, weights, plan.name, expected.tied)
        else:
            assert run.bound is not None, "the reference follows the same rule"
            with Tensors(run.bound) as bound:
                compare.compare_bounded(deltas, exported(engine), weights, bound, plan.name, expected.tied)
    if plan.rule != "adamw":
        _score(
            engine, plan, expected.batches[0], run.scores, plan.objective.temperature, expected, measured,
            f"after {plan.name}",
        )  # fmt: skip
    return ended


def _step(engine: RemoteEngine, plan: RunPlan, samples: Sequence[Sample]) -> tuple[float, float, int]:
    """(loss, gradient norm, number of micro-batches) of one step."""
    objective = plan.objective
    out = engine.train_batch(
        packed(samples, objective), loss_of(objective), plan.plan, objective.aggregation, objective.norm_length
    )
    return out.loss, out.step.grad_norm, out.num_micro_batches


def _load_into_new(
    engine: RemoteEngine,
    plan: RunPlan,
    expected: Expected,
    state: Path,
    ended: tuple[float, float],
    weights: Mapping[str, torch.Tensor],
    deltas: Deltas,
) -> None:
    """The saved state in an engine that has made no step: the step that followed it must come out as it did.

    Args:
        ended, weights: loss, gradient norm and export after that step.
    """
    engine.load_state(state)
    loss, grad_norm, _ = _step(engine, plan, expected.batches[-1])
    deltas.note("checkpoint", compare.relative(loss, ended[0]), "loss")
    deltas.note("checkpoint", compare.relative(grad_norm, ended[1]), "grad norm")
    for name, tensor in exported(engine):
        scale = max(compare.largest(weights[name]), 1e-12)
        deltas.note("checkpoint", compare.largest(tensor.double() - weights[name].double()) / scale, name)


def exported(engine: RemoteEngine) -> Iterator[tuple[str, torch.Tensor]]:
    """The engine's export, as the ranks hand it to the controller: copies, a bucket at a time."""
    group = engine.group
    group.call("export_open", engine.role, None, False)
    while bucket := group.call("export_next", engine.role, _BUCKET_BYTES)[0]:
        for name, tensor in bucket.items():
            # An engine in this process hands out its live weights.
            yield name, tensor.detach().cpu().clone()
    group.call("export_close", engine.role)
