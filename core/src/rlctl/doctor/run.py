"""Runs the doctor: stage 1 here, stages 2 and 4 in children, stage 3 from metadata."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from difflib import get_close_matches

from rlctl import catalogue, remedy
from rlctl.codec import spec_from_json, spec_to_json
from rlctl.discovery import Candidate
from rlctl.doctor import environment
from rlctl.doctor.report import BackendReport, DoctorError, DoctorReport
from rlctl.errors import UsageError
from rlctl.evidence import save_evidence
from rlctl.plugins import (
    BackendRecord,
    PluginEntry,
    Stage,
    absent_device,
    backend_records,
    declaration_failed,
    stage_one,
    stage_three,
)
from rlctl.probing import Outcome, Task, run_probes
from rlctl.records import BackendSpec, CheckResult, CheckStatus, EvidenceLevel, EvidenceRecord
from rlctl.requirements import installed_version, required_dist
from rlctl.vetting import declare_task, outcome_causes

DEFAULT_TIMEOUT_S = 45.0


def run_doctor(names: Sequence[str] = (), quick: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S) -> DoctorReport:
    """Check this environment.

    Args:
        names: backends, plugins, dists or checks to look at; none for everything.
        quick: stop before stage 4, and import torch in no process.
        timeout_s: limit for each child.

    Raises:
        UsageError: a name that nothing here, and nothing known, answers to.
        DoctorError: no child process can be started.
    """
    start = time.monotonic()
    try:
        report = _Doctor(names, quick, timeout_s).report()
    except OSError as error:
        raise DoctorError(
            "the doctor cannot start its probes",
            found=f"{type(error).__name__}: {error}",
            wanted="a writable temporary directory and the right to start processes",
            next="TMPDIR=/some/writable/directory rlctl doctor",
        ) from error
    return replace(report, seconds=time.monotonic() - start)


class _Doctor:
    def __init__(self, names: Sequence[str], quick: bool, timeout_s: float) -> None:
        self.names, self.quick, self.timeout_s = tuple(names), quick, timeout_s
        self.candidates: dict[tuple[str, str], Candidate] = {}
        self.plugin_checks: list[tuple[str, CheckResult]] = []

    def report(self) -> DoctorReport:
        entries = self._declare_all()
        rows = [row for entry in entries for row in self._rows_before_stage_four(entry)]
        for record in backend_records(entries):
            rows.append(self._row(record, next(e for e in entries if (e.dist, record.spec) in _owned(e))))
        known = {name for row in rows for name in (row.name, row.plugin, row.dist, *row.aliases)}
        known |= {e.dist for e in entries} | {e.name for e in entries}
        missing = self._not_installed(known)
        everything = rows
        if self.names:
            rows = [r for r in rows if any(r.answers(n) for n in self.names)]
        rows, runtime = self._register(rows, entries)
        checks = self._checks(rows, everything, runtime, entries)
        shown = [e for e in entries if not self.names or {e.name, e.dist} & set(self.names)]
        installed = {row.name for row in rows}
        return DoctorReport(
            backends=tuple(sorted((*rows, *missing), key=lambda r: (r.name, r.dist))),
            checks=tuple(checks),
            plugins=tuple(shown),
            installable=tuple(_installable(e) for e in catalogue.installable() if e.spec.name not in installed),
            quick=self.quick,
        )

    # ---- stages 1 to 3 ----------------------------------------------------------------------------------------
    def _declare_all(self) -> list[PluginEntry]:
        candidates, refused = stage_one()
        outcomes = run_probes([declare_task(c, checks=True, quick=self.quick) for c in candidates], self.timeout_s)
        entries = [self._entry(c, o) for c, o in zip(candidates, outcomes, strict=True)]
        return sorted((*refused, *entries), key=lambda e: (e.name, e.dist))

    def _entry(self, candidate: Candidate, outcome: Outcome) -> PluginEntry:
        self.candidates[candidate.name, candidate.dist] = candidate
        causes = outcome_causes(outcome, self.timeout_s)
        if causes:
            mend = (outcome.result or {}).get("next")
            if outcome.timed_out:
                mend = _slow_or_stuck(candidate.name, candidate, self.timeout_s)
            return declaration_failed(candidate, causes, mend)
        assert outcome.result is not None, "no cause and no result"
        specs = tuple(spec_from_json(s) for s in outcome.result["backends"])
        entry = stage_three(candidate, specs, outcome.result["output"])
        for check in outcome.result["checks"]:
            self.plugin_checks.append(
                (candidate.dist, CheckResult(**{**check, "status": CheckStatus(check["status"])}))
            )
        foreign = outcome.result["foreign"]
        if foreign and entry.status is CheckStatus.OK:
            cause = (
                f"its light module imports {', '.join(foreign)} ({outcome.result['seconds']:.1f} s), which every rlctl "
                "command then waits for; it may import the standard library and rlctl only"
            )
            entry = replace(entry, status=CheckStatus.WARN, cause=(cause,), next=remedy.upgrade(candidate))
        return entry

    def _rows_before_stage_four(self, entry: PluginEntry) -> list[BackendReport]:
        """A plugin whose backends are not known shows as one row under its own name."""
        if entry.backends or entry.status is CheckStatus.OK:
            return []
        name, dist, version = entry.name, entry.dist, entry.version
        return [BackendReport(name, None, name, dist, version, entry.stage, entry.status, entry.cause, entry.next)]

    def _row(self, record: BackendRecord, entry: PluginEntry) -> BackendReport:
        status, cause, mend = CheckStatus.OK, (), ""
        if record.problems:
            status, cause, mend = _failed(record.spec, record.problems, record.next)
        elif entry.status is CheckStatus.WARN:
            status, cause, mend = entry.status, entry.cause, entry.next
        spec = record.spec
        return BackendReport(
            spec.name,
            str(spec.kind),
            entry.name,
            record.dist,
            record.version,
            Stage.COMPATIBLE,
            status,
            cause,
            mend,
            spec.aliases,
        )

    # ---- stage 4 ----------------------------------------------------------------------------------------------
    def _register(
        self, rows: list[BackendReport], entries: Sequence[PluginEntry]
    ) -> tuple[list[BackendReport], Outcome | None]:
        if self.quick:
            return rows, None
        specs = {(s.name, str(s.kind), e.dist): s for e in entries for s in e.backends}
        ready = [r for r in rows if r.kind is not None and r.status in (CheckStatus.OK, CheckStatus.WARN)]
        tasks = [self._register_task(r, specs[r.name, str(r.kind), r.dist]) for r in ready]
        runtime = [Task("runtime", "importing torch")] if self._wants("torch", "device", "device extensions") else []
        outcomes = run_probes([*runtime, *tasks], self.timeout_s)
        done = {
            id(row): self._registered(row, specs[row.name, str(row.kind), row.dist], outcome)
            for row, outcome in zip(ready, outcomes[len(runtime) :], strict=True)
        }
        if runtime:
            self._remember(done.values(), specs, outcomes[0])
        return [done.get(id(r), r) for r in rows], outcomes[0] if runtime else None

    def _remember(
        self, rows: Iterable[BackendReport], specs: dict[tuple[str, str, str], BackendSpec], runtime: Outcome
    ) -> None:
        """Keep that a backend imports here as evidence of this machine."""
        result = runtime.result or {}
        found = next(iter(result.get("devices", {})), "cpu")
        for row in rows:
            if row.status not in (CheckStatus.OK, CheckStatus.WARN) or "devices" not in result:
                continue
            spec = specs[row.name, str(row.kind), row.dist]
            # Another dist may own the name on the device that is here: what imports is of the device that it answers.
            device = next((kind for kind in (found, "cpu") if kind in dict(spec.devices)), None)
            if device is None:
                continue
            dists = [required_dist(r) for r in spec.requirements]
            record = EvidenceRecord(
                backend=spec.name,
                model_type=str(spec.model_types[0]),
                device=device,
                vendor=None,
                axes={},
                level=EvidenceLevel.IMPORTABLE,
                model_family="",
                what="rlctl doctor imported its libraries and its engine in a process of its own",
                versions={d: v for d in (row.dist, *dists) if d and (v := installed_version(d)) is not None},
                world_size=1,
                deltas={},
                date=datetime.now(UTC).date().isoformat(),
                simulated=device in result.get("simulated", ()),
            )
            with contextlib.suppress(OSError):  # a home that cannot be written only costs the memory of it
                save_evidence(record, f"importable-{spec.name}-{device}")

    def _register_task(self, row: BackendReport, spec: BackendSpec) -> Task:
        candidate = self.candidates[row.plugin, row.dist]
        arguments = {"candidate": asdict(candidate), "spec": spec_to_json(spec)}
        return Task("register", f"importing {candidate.target} (its light module)", arguments, spec.env)

    def _registered(self, row: BackendReport, spec: BackendSpec, outcome: Outcome) -> BackendReport:
        candidate = self.candidates[row.plugin, row.dist]
        row = replace(row, stage=Stage.REGISTERED)
        causes = outcome_causes(outcome, self.timeout_s)
        if causes:
            mend = (outcome.result or {}).get("next") or remedy.for_import(
                candidate, causes, spec.requirements, spec.remedies
            )
            if outcome.timed_out:
                mend = _slow_or_stuck(row.name, candidate, self.timeout_s)
            status, lines, mend = _failed(spec, tuple(c.line for c in causes), mend)
            return replace(row, status=status, cause=lines, next=mend)
        if outcome.stdout.strip():
            cause = (*row.cause, remedy.chatter(outcome.stdout))
            return replace(row, status=CheckStatus.WARN, cause=cause, next=row.next or remedy.upgrade(candidate))
        return row

    # ---- names and checks -------------------------------------------------------------------------------------
    def _not_installed(self, known: set[str]) -> list[BackendReport]:
        rows: list[BackendReport] = []
        checks = {*environment.NAMES, *(c.name for _, c in self.plugin_checks)}
        for name in self.names:
            if name in known or name in checks:
                continue
            entry = catalogue.find(name) or next((e for e in catalogue.entries() if e.dist == name), None)
            if entry is None:
                near = get_close_matches(name, [*known, *checks, *(e.spec.name for e in catalogue.entries())], n=1)
                raise UsageError(
                    f"the doctor knows no backend, plugin or check called {name!r}",
                    found=name,
                    wanted="one of " + ", ".join(sorted(known | checks)),
                    next=f"rlctl doctor {near[0]}" if near else "rlctl doctor",
                )
            cause = (f"{entry.dist or entry.spec.name} is not installed", *([entry.note] if entry.note else []))
            rows.append(
                BackendReport(
                    entry.spec.name,
                    str(entry.spec.kind),
                    "",
                    entry.dist or "",
                    None,
                    Stage.DISCOVERED,
                    CheckStatus.FAIL,
                    cause,
                    entry.install,
                )
            )
        return rows

    def _wants(self, *checks: str) -> bool:
        return not self.names or bool(set(self.names) & set(checks))

    def _checks(
        self,
        rows: Sequence[BackendReport],
        everything: Sequence[BackendReport],
        runtime: Outcome | None,
        entries: Sequence[PluginEntry],
    ) -> list[CheckResult]:
        # Where checks alone are named they are about all backends.
        results = environment.run_checks(rows or everything, runtime, self.timeout_s, self.quick, entries)
        # Of a backend that is named, what it has proved is said too.
        about = {"evidence"} if any(r.kind for r in rows) else set()
        chosen = [c for c in results if self._wants(c.name) or c.name in about]
        plugins = {row.dist for row in rows} if self.names else None
        return chosen + [
            c for dist, c in self.plugin_checks if plugins is None or dist in plugins or c.name in self.names
        ]


def _failed(spec: BackendSpec, causes: tuple[str, ...], mend: str) -> tuple[CheckStatus, tuple[str, ...], str]:
    """Status, cause and remedy of a backend that does not work: one whose devices this machine has not is passed over."""
    away = absent_device(spec)
    return (CheckStatus.SKIP, (*causes, away), mend) if away else (CheckStatus.FAIL, causes, mend)


def _owned(entry: PluginEntry) -> list[tuple[str, BackendSpec]]:
    return [(entry.dist, s) for s in entry.backends]


def _slow_or_stuck(name: str, candidate: Candidate, timeout_s: float) -> str:
    longer = int(max(timeout_s * 4, 60))
    return f"rlctl doctor {name} --timeout {longer} tells slow from stuck; if it is stuck: {remedy.upgrade(candidate)}"


def _installable(entry: catalogue.CatalogueEntry) -> dict[str, str]:
    return {
        "name": entry.spec.name,
        "kind": str(entry.spec.kind),
        "dist": entry.dist or "",
        "state": str(entry.state),
        "next": entry.install,
    }


def default_timeout() -> float:
    """``RLCTL_DOCTOR_TIMEOUT`` in seconds, else 45."""
    try:
        return float(os.environ["RLCTL_DOCTOR_TIMEOUT"])
    except (KeyError, ValueError):
        return DEFAULT_TIMEOUT_S
