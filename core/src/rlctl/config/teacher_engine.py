"""A teacher on a rollout engine: what that engine must be able to do, and what it cannot be asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.config.document import Document, Loc, dotted
from rlctl.config.problems import Problem
from rlctl.config.schema_runtime import MAIN_POOL
from rlctl.records import BackendKind, BackendSpec

if TYPE_CHECKING:
    from rlctl.plugins import PluginSet

NEEDS_TOKENS_OF_THE_STUDENT = "reverse_kl_topk"
"""The loss whose tokens are the student's: a rollout engine gives log-probs of its own top-k and of the text alone."""


def teacher_problems(document: Document, spec: BackendSpec, plugins: PluginSet) -> list[Problem]:
    """What is wrong with a teacher on the backend of ``spec``; nothing with a training backend."""
    if spec.kind is BackendKind.TRAIN:
        return []
    out: list[Problem] = []
    backend: Loc = ("teacher", "backend")
    if not spec.scores:
        able = sorted({r.spec.name for r in plugins.backends() if r.spec.scores})
        out.append(
            _problem(
                document,
                backend,
                f"the rollout backend {spec.name} does not score given tokens, which is all that a teacher does",
                wanted=f"a training backend, or a rollout backend that scores: {', '.join(able) or 'none is installed'}",
                hint="leave teacher.backend out for the actor's",
            )
        )
    mode: Loc = ("distillation", "loss_mode")
    if document.get(mode) == NEEDS_TOKENS_OF_THE_STUDENT:
        out.append(
            _problem(
                document,
                mode,
                f"{NEEDS_TOKENS_OF_THE_STUDENT} asks the teacher for tokens of the student's choice, and a rollout engine "
                f"({spec.name}) answers for its own top-k and the text alone",
                wanted="another loss_mode, or a teacher on a training backend",
                hint="forward_kl_topk and jsd_topk take the teacher's tokens",
            )
        )
    if not isinstance(document.get(("teacher", "train")), dict):
        out += _weightless(document, spec)
    return out + (_crowded(document, spec) if spec.one_engine else [])


def _weightless(document: Document, spec: BackendSpec) -> list[Problem]:
    """Random weights are drawn by training engines alone."""
    models = document.get(("teacher", "models"))
    places: list[Loc] = [("teacher", "model")]
    places += [("teacher", "models", name) for name in models] if isinstance(models, dict) else []
    return [
        _problem(
            document,
            place,
            f"a teacher on the rollout backend {spec.name} reads its weights from files",
            found="random weights",
            wanted=f"{dotted(place)}.path, or teacher.train",
        )
        for place in places
        if document.get((*place, "config")) is not None or document.get((*place, "init")) == "random"
    ]


def _crowded(document: Document, spec: BackendSpec) -> list[Problem]:
    """More engines in a process than the backend can have there."""
    models = document.get(("teacher", "models"))
    if isinstance(models, dict) and len(models) > 1:
        return [
            _problem(
                document,
                ("teacher", "models"),
                f"a process has one engine of {spec.name}, and each teacher needs one",
                found=f"{len(models)} teachers in one pool",
                wanted="one teacher, or another backend",
            )
        ]
    pool = document.get(("teacher", "pool")) or document.get(("actor", "pool"), MAIN_POOL)
    rollout = document.get(("rollout", "backend"))
    if rollout in (spec.name, *spec.aliases) and pool == document.get(("rollout", "pool"), MAIN_POOL):
        return [
            _problem(
                document,
                ("teacher", "backend"),
                f"a process has one engine of {spec.name}, and the rollout has it",
                found=f"both in pool {pool}",
                wanted="a pool of the teacher's own",
                hint="runtime.pools.judge.nproc=1 and teacher.pool=judge",
            )
        ]
    return []


def _problem(document: Document, loc: Loc, what: str, found: str = "", wanted: str = "", hint: str = "") -> Problem:
    return Problem(dotted(loc), str(document.origin(loc)), what, found=found, wanted=wanted, hint=hint)
