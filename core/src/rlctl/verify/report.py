"""What came of a verification: cases as data, and the evidence that they make or take back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlctl.codec import evidence_from_json
from rlctl.device import Device, is_simulated
from rlctl.evidence import save_evidence
from rlctl.plugins import BackendRecord
from rlctl.records import EvidenceLevel, EvidenceRecord, ModelType
from rlctl.requirements import installed_version, required_dist
from rlctl.userdirs import user_data_dir
from rlctl.verify.compare import QUANTITIES, Delta
from rlctl.verify.selection import LeftOut


@dataclass(frozen=True)
class Case:
    """One backend, topology and model.

    Args:
        topology: sizes of the axes larger than one.
        deltas: largest delta of each quantity that was compared.
        failures: quantities beyond their tolerance.
        skipped: what was not compared, with the reason.
        error: why it ended before everything was compared, as the JSON form of the error.
        notes: of the engine.
        evidence: the record that was written.
    """

    backend: str
    topology: Mapping[str, int]
    world_size: int
    model: str
    model_family: str
    model_type: str
    device: str
    dtype: str
    deltas: Mapping[str, Delta]
    tolerances: Mapping[str, float]
    failures: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None
    micro_batches: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    evidence: str | None = None

    @property
    def passed(self) -> bool:
        """Everything was compared that could be, and nothing is beyond its tolerance."""
        return not self.failures and self.error is None

    def to_json(self) -> dict[str, Any]:
        """As ``rlctl verify --json`` shows it."""
        return {
            "backend": self.backend,
            "topology": dict(self.topology),
            "world_size": self.world_size,
            "model": self.model,
            "model_family": self.model_family,
            "model_type": self.model_type,
            "device": self.device,
            "dtype": self.dtype,
            "passed": self.passed,
            "deltas": {q: self.deltas[q].value for q in QUANTITIES if q in self.deltas},
            "tolerances": {q: self.tolerances[q] for q in QUANTITIES if q in self.deltas},
            "where": {q: self.deltas[q].where for q in QUANTITIES if q in self.deltas and self.deltas[q].where},
            "failures": list(self.failures),
            "skipped": dict(self.skipped),
            "error": self.error,
            "micro_batches": dict(self.micro_batches),
            "notes": dict(self.notes),
            "seconds": round(self.seconds, 2),
            "evidence": self.evidence,
        }


@dataclass(frozen=True)
class Report:
    """All cases. ``messages``: evidence that was taken back, and the like."""

    cases: tuple[Case, ...]
    left_out: tuple[LeftOut, ...] = ()
    messages: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """There are cases, and every one passed."""
        return bool(self.cases) and all(c.passed for c in self.cases)

    def to_json(self) -> dict[str, Any]:
        """As ``rlctl verify --json`` shows it."""
        return {
            "passed": self.passed,
            "cases": [c.to_json() for c in self.cases],
            "left_out": [e.to_json() for e in self.left_out],
            "messages": list(self.messages),
            "seconds": round(self.seconds, 2),
        }


def record_case(case: Case, backend: BackendRecord, device: Device) -> tuple[str, list[str]]:
    """Keep what came of a case as evidence of this machine.

    A case that passed is a proof of level ``parity``. One that failed takes the place of every earlier proof of the same
    combination, at level ``declared`` and marked as failed: what no longer holds must not go on claiming.

    Returns:
        The record's path, and a line for each earlier proof that was taken back.

    Raises:
        OSError: the directory cannot be written.
    """
    messages = [] if case.passed else _take_back(case, device)
    dists = [backend.dist, *(required_dist(r) for r in backend.spec.requirements)]
    extra: dict[str, Any] = {"command": "rlctl verify", "model": case.model, "dtype": case.dtype}
    if case.passed:
        what = f"rlctl verify: {', '.join(case.deltas)} equal to one process of plain Hugging Face code, {case.dtype}"
    else:
        what = f"rlctl verify failed: {failure_text(case)}"
        extra["failed"] = True
    record = EvidenceRecord(
        backend=case.backend,
        model_type=case.model_type,
        device=case.device,
        vendor=device.vendor,
        axes=dict(case.topology),
        level=EvidenceLevel.PARITY if case.passed else EvidenceLevel.DECLARED,
        model_family=case.model_family,
        what=what,
        versions={d: v for d in dict.fromkeys(dists) if d and (v := installed_version(d)) is not None},
        world_size=case.world_size,
        # JSON knows no infinity.
        deltas={q: float(f"{min(d.value, 1e300):.2e}") for q, d in case.deltas.items()},
        date=datetime.now(UTC).date().isoformat(),
        simulated=is_simulated(device),
        extra=extra,
    )
    return str(save_evidence(record, record_name(case))), messages


def record_name(case: Case) -> str:
    """File name of the case's record: the same combination has one, whatever came of it."""
    axes = "-".join(f"{k}{v}" for k, v in case.topology.items()) or "one-process"
    return f"verify-{case.backend}-{case.model_type}-{case.device}-{axes}-{case.model_family}-{case.dtype}"


def _take_back(case: Case, device: Device) -> list[str]:
    """Remove this machine's earlier proofs of a combination that has failed."""
    messages = []
    for path in sorted((user_data_dir() / "evidence").glob("*.json")):
        record = _sole_record(path)
        if record is None or record.level.rank <= EvidenceLevel.IMPORTABLE.rank:
            continue
        mine = (record.backend, record.model_type, record.device, dict(record.axes), record.model_family)
        if mine == (case.backend, case.model_type, case.device, dict(case.topology), case.model_family):
            path.unlink()
            messages.append(f"took back the proof of {record.date} in {path}: the same combination has failed now")
    return messages


def _sole_record(path: Path) -> EvidenceRecord | None:
    """The record of a file that holds one; None for a list of them or what cannot be read: others wrote it."""
    try:
        return evidence_from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def axes_text(case: Case) -> str:
    """``dp_shard=2,usp=2``, or ``one process``."""
    return ",".join(f"{k}={v}" for k, v in case.topology.items()) or "one process"


def model_text(case: Case | LeftOut) -> str:
    """``tiny:qwen3``, and ``tiny:qwen3 value_model`` of one with another head than a language model's."""
    return case.model if case.model_type == ModelType.LANGUAGE_MODEL else f"{case.model} {case.model_type}"


def failure_text(case: Case) -> str:
    """The quantities that failed, and why it ended early if it did."""
    return ", ".join([*case.failures, *([str(case.error["what"])] if case.error is not None else [])])


def summary_line(cases: Sequence[Case]) -> str:
    """``11 of 12 passed; dp_shard=2,usp=2 (tiny:qwen3) failed: gradients, grad_norm``; see :func:`model_text`."""
    failed = [c for c in cases if not c.passed]
    if not cases:
        return "nothing was run"
    text = f"{len(cases) - len(failed)} of {len(cases)} passed"
    for case in failed[:3]:
        text += f"; {axes_text(case)} ({model_text(case)}) failed: {failure_text(case)}"
    return text + (f"; and {len(failed) - 3} more" if len(failed) > 3 else "")
