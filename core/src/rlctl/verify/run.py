"""From a request to a report: the reference of each model once, then every topology, one worker group a world size."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rlctl.capabilities import require_topology
from rlctl.errors import CapabilityError, EngineError, RlctlError
from rlctl.plugins import BackendRecord, PluginSet
from rlctl.records import ModelType
from rlctl.topology import Topology
from rlctl.verify import tiny
from rlctl.verify.cases import RUNS, WITHOUT_RUNS
from rlctl.verify.expect import Expected, expect
from rlctl.verify.measure import Measured, Target, measure
from rlctl.verify.models import without_dropout
from rlctl.verify.ranks import Ranks
from rlctl.verify.report import Case, LeftOut, Report, record_case
from rlctl.verify.request import TINY, Request
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
    """Runs a request.

    Args:
        notice: gets what a backend has to say once.
    """

    def __init__(
        self,
        request: Request,
        plugins: PluginSet,
        watcher: Watcher | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self._request = request
        self._plugins = plugins
        self._watcher = watcher or Watcher()
        self._notice = notice
        self._messages: list[str] = []
        self._expected: dict[str, Expected] = {}

    def run(self) -> Report:
        """Everything that was asked for.

        Raises:
            CapabilityError: nothing of it can run.
            RlctlError: a model cannot be read.
        """
        started = time.monotonic()
        _require_reference()
        jobs, left_out = self._jobs()
        self._watcher.start(len(jobs))
        cases: list[Case] = []
        with tempfile.TemporaryDirectory(prefix="rlctl_verify_") as scratch:
            ranks = Ranks(self._plugins, self._request.device, timeout_s=self._request.timeout_s, notice=self._notice)
            try:
                for number, job in enumerate(jobs):
                    cases.append(self._case(job, ranks, Path(scratch), number))
                    self._watcher.end(cases[-1])
            except BaseException:
                ranks.kill()
                raise
            ranks.close()
        return Report(tuple(cases), tuple(left_out), tuple(self._messages), time.monotonic() - started)

    # ---- what to run ------------------------------------------------------------------------------------------
    def _jobs(self) -> tuple[list[_Job], list[LeftOut]]:
        request = self._request
        jobs: list[_Job] = []
        left_out: list[LeftOut] = []
        refused: CapabilityError | None = None
        heads = [m for m in request.backend.spec.model_types if m in RUNS]
        for topology, model_type, model in itertools.product(request.topologies, heads, request.models):
            try:
                jobs.append(self._job(topology, model_type, model))
            except CapabilityError as error:
                refused = refused or error
                reason = error.details[0] if error.details else error.what
                left_out.append(LeftOut(words(topology), model, reason))
        if refused is not None and (not jobs or not request.every):
            raise refused
        return jobs, left_out

    def _job(self, topology: Topology, model_type: ModelType, model: str) -> _Job:
        spec, device = self._request.backend.spec, self._request.device
        if model.startswith(TINY):
            family = model.removeprefix(TINY)
            sizes = tiny.fit_tiny(family, spec, topology, device.type, device.vendor, model_type)
            return _Job(topology, model_type, model, sizes, None)
        directory = Path(model)
        facts = tiny.read_facts(directory)
        require_topology(self._request.backend, topology, device.type, device.vendor, model_type, facts)
        return _Job(topology, model_type, model, None, directory)

    # ---- running ----------------------------------------------------------------------------------------------
    def _expect(self, job: _Job, scratch: Path) -> Expected:
        key = f"{job.model_type} {job.sizes.slug if job.sizes is not None else job.directory}"
        if key not in self._expected:
            self._watcher.begin(f"reference of {job.model}")
            if job.sizes is not None:
                directory = tiny.write_tiny(job.sizes, scratch / "models")
            else:
                assert job.directory is not None
                directory, changed = without_dropout(job.directory, scratch / "models")
                self._messages += [f"{job.model}: {changed} set to 0, for both sides"] if changed else []
            self._expected[key] = expect(
                directory,
                RUNS[job.model_type],
                device=self._request.device.type,
                dtype=self._request.dtype,
                num_ranks=max(t.world_size for t in self._request.topologies),
                scratch=scratch / "reference" / str(len(self._expected)),
                report=self._watcher.beat,
            )
        return self._expected[key]

    def _case(self, job: _Job, ranks: Ranks, scratch: Path, number: int) -> Case:
        request = self._request
        expected = self._expect(job, scratch)
        axes = job.topology.axes()
        self._watcher.begin(f"{words(job.topology)}, {job.model}")
        began = time.monotonic()
        target = Target(request.backend.spec.name, str(job.model_type), axes, request.settings, request.master)
        measured, error = self._measure(job, target, expected, ranks, scratch / f"case-{number}")
        measured.skipped |= _heads_without_runs(request.backend)
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
        if request.record:
            case = self._record(case)
        return case

    def _measure(
        self, job: _Job, target: Target, expected: Expected, ranks: Ranks, scratch: Path
    ) -> tuple[Measured, RlctlError | None]:
        """One case; an engine that cannot follow another one in its process gets processes of its own."""
        for fresh in (False, True):
            measured = Measured()
            starts = ranks.starts
            try:
                group = ranks.group(job.topology.world_size, fresh=fresh)
                measure(
                    group, target, RUNS[job.model_type], expected, scratch / str(fresh), measured, self._watcher.beat
                )
                return measured, None
            except RlctlError as error:
                # With deltas at hand it is a finding; without any, in a used group, perhaps only a leftover.
                if fresh or measured.deltas.found or ranks.starts > starts or job.topology.world_size == 1:
                    return measured, error
        raise AssertionError("the second round returns")

    def _record(self, case: Case) -> Case:
        try:
            path, messages = record_case(case, self._request.backend, self._request.device)
        except OSError as error:
            self._messages.append(f"the evidence of {case.model} could not be kept: {error}")
            return case
        self._messages += messages
        return replace(case, evidence=path)


def _heads_without_runs(backend: BackendRecord) -> dict[str, str]:
    """What is not compared because of the heads that a backend has or has not."""
    spec = backend.spec
    reasons = {f"losses of a {head}": why for head, why in WITHOUT_RUNS.items() if head in spec.model_types}
    missing = [head for head in WITHOUT_RUNS if head not in spec.model_types]
    return reasons | {f"losses of a {head}": f"the backend {spec.name} declares no {head}" for head in missing}


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
