"""From a request to a report: the reference of each model once, then every topology, one worker group a world size."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from rlctl.capabilities import require_topology
from rlctl.constraints import facts_of
from rlctl.errors import CapabilityError, ConfigError, EngineError, RlctlError
from rlctl.plugins import BackendRecord, PluginSet
from rlctl.records import ModelType
from rlctl.topology import Topology
from rlctl.verify import tiny
from rlctl.verify.cases import MIN_RANKS, RUNS, RunPlan, without_sgd
from rlctl.verify.expect import Expected, expect
from rlctl.verify.measure import Measured, SgdRefusedError, Target, measure
from rlctl.verify.models import without_dropout
from rlctl.verify.ranks import Ranks
from rlctl.verify.report import Case, Report, record_case
from rlctl.verify.request import Request
from rlctl.verify.selection import TINY, Choice, LeftOut
from rlctl.verify.topologies import words


class Watcher:
    """Told how a verification goes on. This one is silent."""

    def start(self, num_cases: int) -> None:
        """So many cases will run."""

    def begin(self, what: str) -> None:
        """A case, or a reference, begins."""

    def beat(self) -> None:
        """Something of it is done."""

    def end(self, case: Case) -> None:
        """A case has ended."""


@dataclass(frozen=True)
class _Job:
    topology: Topology
    model_type: ModelType
    model: str
    sizes: tiny.TinyModel | None
    directory: Path | None


class Verifier:
    """Runs requests. A context manager: references, tiny models and worker groups live until its end.

    Args:
        notice: gets what a backend has to say once.
    """

    def __init__(
        self,
        plugins: PluginSet,
        watcher: Watcher | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self._plugins = plugins
        self._watcher = watcher or Watcher()
        self._notice = notice
        self._messages: list[str] = []
        self._expected: dict[tuple[object, ...], Expected] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="rlctl_verify_")
        self._ranks: Ranks | None = None
        self._num_cases = 0
        self._without_sgd: set[str] = set()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ranks is not None:
            if error is None:
                self._ranks.close()
            else:
                self._ranks.kill()
        self._scratch.cleanup()

    def run(self, request: Request) -> Report:
        """Everything that was asked for.

        Raises:
            CapabilityError: nothing of it can run.
            RlctlError: a model cannot be read.
        """
        started = time.monotonic()
        _require_reference()
        self._messages = []
        jobs, left_out = self._jobs(request)
        self._watcher.start(len(jobs))
        if self._ranks is None or self._ranks.device != request.device:
            self._ranks = Ranks(self._plugins, request.device, timeout_s=request.timeout_s, notice=self._notice)
        _set_threads(request)
        cases: list[Case] = []
        for job in jobs:
            cases.append(self._case(request, job, self._ranks))
            self._watcher.end(cases[-1])
        return Report(tuple(cases), tuple(left_out), tuple(self._messages), time.monotonic() - started)

    # ---- what to run ------------------------------------------------------------------------------------------
    def _jobs(self, request: Request) -> tuple[list[_Job], list[LeftOut]]:
        jobs: list[_Job] = []
        left_out = list(request.left_out)
        refused: list[tuple[Choice, CapabilityError]] = []
        for choice in request.choices:
            try:
                jobs.append(_job(request, choice))
            except CapabilityError as error:
                refused.append((choice, error))
                reason = error.details[0] if error.details else error.what
                left_out.append(LeftOut(words(choice.topology), choice.model, reason, str(choice.model_type)))
        # A model that was asked for by name runs with one head at least.
        ran = {(j.topology, j.model) for j in jobs}
        for choice, error in refused:
            if not jobs or (not request.every and (choice.topology, choice.model) not in ran):
                raise error
        return jobs, left_out

    # ---- running ----------------------------------------------------------------------------------------------
    def _expect(self, request: Request, job: _Job, plans: Sequence[RunPlan]) -> Expected:
        num_ranks = max(MIN_RANKS, *(t.world_size for t in request.topologies))
        source = job.sizes.slug if job.sizes is not None else str(job.directory)
        key = (job.model_type, source, request.device, request.dtype, num_ranks, *(p.name for p in plans))
        if key not in self._expected:
            self._watcher.begin(f"reference of {_head_words(job)}")
            scratch = Path(self._scratch.name)
            if job.sizes is not None:
                directory = tiny.write_tiny(job.sizes, scratch / "models")
            else:
                assert job.directory is not None
                directory, changed = without_dropout(job.directory, scratch / "models")
                self._messages += [f"{job.model}: {changed} set to 0, for both sides"] if changed else []
            self._expected[key] = expect(
                directory,
                plans,
                device=request.device.type,
                dtype=request.dtype,
                num_ranks=num_ranks,
                model_type=job.model_type,
                scratch=scratch / "reference" / str(len(self._expected)),
                report=self._watcher.beat,
            )
        return self._expected[key]

    def _case(self, request: Request, job: _Job, ranks: Ranks) -> Case:
        expected = self._expect(request, job, self._plans(request, job))
        axes = job.topology.axes()
        self._watcher.begin(f"{words(job.topology)}, {_head_words(job)}")
        began = time.monotonic()
        target = Target(request.backend.spec.name, str(job.model_type), axes, request.settings, request.master)
        measured, error = self._measure(request, job, target, expected, ranks)
        if isinstance(error, SgdRefusedError):
            self._without_sgd.add(target.backend)
            expected = self._expect(request, job, self._plans(request, job))
            measured, error = self._measure(request, job, target, expected, ranks)
        if target.backend in self._without_sgd:
            measured.skipped["sgd"] = (
                "the engine refuses it; AdamW steps with an eps of 1 stand in, whose update is smooth"
            )
        measured.skipped |= _missing_heads(request.backend)
        for quantity, why in expected.too_coarse.items():
            if measured.deltas.found.pop(quantity, None) is not None:
                measured.skipped[quantity] = why
        case = Case(
            backend=request.backend.spec.name,
            topology=axes,
            world_size=job.topology.world_size,
            model=job.model,
            model_family=expected.family,
            model_type=str(job.model_type),
            device=request.device.type,
            dtype=request.dtype,
            deltas=measured.deltas.found,
            tolerances=expected.tolerances,
            failures=tuple(measured.deltas.failures(expected.tolerances)),
            skipped=measured.skipped,
            error=None if error is None else error.to_json(),
            micro_batches=measured.micro_batches,
            notes=measured.notes,
            seconds=time.monotonic() - began,
        )
        # A backend that says what it does not do has shown nothing about what it does.
        refused = isinstance(error, CapabilityError | ConfigError) and not case.deltas
        return self._record(request, case) if request.record and not refused else case

    def _plans(self, request: Request, job: _Job) -> Sequence[RunPlan]:
        plans = RUNS[job.model_type]
        return without_sgd(plans) if request.backend.spec.name in self._without_sgd else plans

    def _measure(
        self, request: Request, job: _Job, target: Target, expected: Expected, ranks: Ranks
    ) -> tuple[Measured, RlctlError | None]:
        """One case; an engine that cannot follow another one in its process gets processes of its own."""
        for fresh in (False, True):
            measured = Measured()
            starts = ranks.starts
            self._num_cases += 1
            scratch = Path(self._scratch.name) / f"case-{self._num_cases}"
            try:
                group = ranks.group(job.topology.world_size, fresh=fresh)
                measure(group, target, self._plans(request, job), expected, scratch, measured, self._watcher.beat)
                return measured, None
            except SgdRefusedError as error:
                return measured, error
            except Exception as error:  # plugin boundary: an engine in this very process may raise anything
                # With deltas at hand it is a finding; without any, in a used group, perhaps only a leftover.
                if fresh or measured.deltas.found or ranks.starts > starts or job.topology.world_size == 1:
                    return measured, _mendable(error)
        raise AssertionError("the second round returns")

    def _record(self, request: Request, case: Case) -> Case:
        try:
            path, messages = record_case(case, request.backend, request.device)
        except OSError as error:
            self._messages.append(f"the evidence of {case.model} could not be kept: {error}")
            return case
        self._messages += messages
        return replace(case, evidence=path)


def _mendable(error: Exception) -> RlctlError:
    """The error itself, or one that carries its traceback."""
    if isinstance(error, RlctlError):
        return error
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return EngineError(f"the engine failed: {type(error).__name__}: {error}", details=lines)


def _head_words(job: _Job) -> str:
    return job.model if job.model_type is ModelType.LANGUAGE_MODEL else f"{job.model} {job.model_type}"


def _job(request: Request, choice: Choice) -> _Job:
    spec, device = request.backend.spec, request.device
    topology, model_type, model = choice.topology, choice.model_type, choice.model
    if model.startswith(TINY):
        family = model.removeprefix(TINY)
        sizes = tiny.fit_tiny(family, spec, topology, device.type, device.vendor, model_type)
        return _Job(topology, model_type, model, sizes, None)
    directory = Path(model)
    if model_type not in spec.model_types:
        raise CapabilityError(
            f"backend {spec.name!r} has no {model_type}, and {directory} holds one",
            found=f"heads of {spec.name}: {', '.join(spec.model_types)}",
            wanted=f"a backend with {model_type}",
            next="rlctl capabilities",
        )
    facts = facts_of(None, str(directory))
    require_topology(request.backend, topology, device.type, device.vendor, model_type, facts)
    return _Job(topology, model_type, model, None, directory)


def _missing_heads(backend: BackendRecord) -> dict[str, str]:
    """What is not compared because the backend has no such head."""
    spec = backend.spec
    missing = [head for head in ModelType if head not in spec.model_types]
    return {f"losses of a {head}": f"the backend {spec.name} declares no {head}" for head in missing}


def _set_threads(request: Request) -> None:
    """A tiny model is computed faster by one thread than by many that wait for each other."""
    if all(model.startswith(TINY) for model in request.models):
        import torch

        torch.set_num_threads(1)


def _require_reference() -> None:
    """The reference's libraries are there.

    Raises:
        EngineError: they are not.
    """
    try:
        import safetensors
        import torch
        import transformers

        del safetensors, torch, transformers
    except ImportError as error:
        raise EngineError(
            "rlctl verify compares with plain Hugging Face code, which is not installed",
            found=str(error),
            wanted="torch, transformers and safetensors",
            next="pip install 'rlctl-core[verify]'",
        ) from error
