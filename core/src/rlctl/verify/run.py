"""From a request to a report: the reference of each model once, then every topology, one worker group a world size."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlctl.capabilities import require_topology
from rlctl.device import Device
from rlctl.errors import CapabilityError, ConfigError, EngineError, RlctlError
from rlctl.plugins import BackendRecord, PluginSet
from rlctl.records import ModelType
from rlctl.topology import Topology
from rlctl.verify import tiny
from rlctl.verify.cases import RUNS, WITHOUT_RUNS, RunPlan
from rlctl.verify.expect import Expected, expect
from rlctl.verify.measure import Measured, Target, measure
from rlctl.verify.ranks import Ranks
from rlctl.verify.report import Case, LeftOut, Report, record_case
from rlctl.verify.topologies import words


@dataclass(frozen=True)
class Request:
    """What to verify.

    Args:
        topologies: in the order in which they run; sorted by world size they share worker groups.
        models: ``tiny:FAMILY`` or directories.
        settings: the backend's ``engine`` section, complete.
        dtype: of the computation.
        record: keep evidence.
        timeout_s: limit of a rank without progress.
    """

    backend: BackendRecord
    device: Device
    topologies: tuple[Topology, ...]
    models: tuple[str, ...]
    settings: Mapping[str, Any]
    dtype: str = "float32"
    master: str = "float32"
    record: bool = True
    timeout_s: float = 300.0
    model_types: tuple[ModelType, ...] = field(default_factory=lambda: (ModelType.LANGUAGE_MODEL,))


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
        for model_type in request.model_types:
            if model_type not in RUNS:
                left_out.append(LeftOut("every topology", str(model_type), WITHOUT_RUNS[model_type]))
        for topology in request.topologies:
            for model in request.models:
                try:
                    jobs.append(self._job(topology, model))
                except CapabilityError as error:
                    refused = refused or error
                    reason = error.details[0] if error.details else error.what
                    left_out.append(LeftOut(words(topology), model, reason))
        if not jobs and refused is not None:
            raise refused
        return jobs, left_out

    def _job(self, topology: Topology, model: str) -> _Job:
        spec, device = self._request.backend.spec, self._request.device
        kind = ModelType.LANGUAGE_MODEL
        if model.startswith("tiny:"):
            family = model.partition(":")[2]
            return _Job(topology, model, tiny.fit_tiny(family, spec, topology, device.type, device.vendor, kind), None)
        directory = Path(model)
        facts = tiny.read_facts(directory)
        require_topology(self._request.backend, topology, device.type, device.vendor, kind, facts)
        return _Job(topology, model, None, directory)

    # ---- running ----------------------------------------------------------------------------------------------
    def _expect(self, job: _Job, scratch: Path) -> Expected:
        key = job.sizes.slug if job.sizes is not None else str(job.directory)
        if key not in self._expected:
            self._watcher.begin(f"reference of {job.model}")
            directory = job.directory
            if job.sizes is not None:
                directory = tiny.write_tiny(job.sizes, scratch / "models")
            assert directory is not None
            self._expected[key] = expect(
                directory,
                self._plans(),
                device=self._request.device.type,
                dtype=self._request.dtype,
                num_ranks=max(t.world_size for t in self._request.topologies),
                scratch=scratch / "reference" / str(len(self._expected)),
                report=self._watcher.beat,
            )
        return self._expected[key]

    def _plans(self) -> Sequence[RunPlan]:
        return RUNS[ModelType.LANGUAGE_MODEL]

    def _case(self, job: _Job, ranks: Ranks, scratch: Path, number: int) -> Case:
        request = self._request
        expected = self._expect(job, scratch)
        axes = job.topology.axes()
        self._watcher.begin(f"{words(job.topology)}, {job.model}")
        began = time.monotonic()
        target = Target(
            request.backend.spec.name, str(ModelType.LANGUAGE_MODEL), axes, request.settings, request.master
        )
        measured, error = self._measure(job, target, expected, ranks, scratch / f"case-{number}")
        for model_type in request.backend.spec.model_types:
            if model_type in WITHOUT_RUNS:
                measured.skipped["value losses"] = WITHOUT_RUNS[model_type]
        if ModelType.VALUE_MODEL not in request.backend.spec.model_types:
            measured.skipped["value losses"] = f"the backend {request.backend.spec.name} declares no value_model"
        case = Case(
            backend=request.backend.spec.name,
            topology=axes,
            world_size=job.topology.world_size,
            model=job.model,
            model_family=expected.family,
            model_type=str(ModelType.LANGUAGE_MODEL),
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
                measure(group, target, self._plans(), expected, scratch / str(fresh), measured, self._watcher.beat)
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


def complete_settings(config: type[Any], given: Mapping[str, Any], dtype: str, name: str) -> tuple[dict[str, Any], str]:
    """(the complete ``engine`` section, dtype of the master weights) for a computation in ``dtype``.

    A backend whose section has ``param_dtype`` computes in it over float32 master weights; another one computes in the dtype
    of its weights.

    Raises:
        ConfigError: a setting that the backend does not have or does not take.
    """
    from pydantic import ValidationError

    values = dict(given)
    has_own = "param_dtype" in config.model_fields
    if has_own:
        values.setdefault("param_dtype", dtype)
    try:
        section = config.model_validate(values).model_dump(mode="json")
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(
            f"the backend {name!r} does not take these settings",
            details=lines,
            wanted="its own keys: " + ", ".join(config.model_fields),
            next="--engine key=value, once for each",
        ) from error
    return section, "float32" if has_own else dtype
