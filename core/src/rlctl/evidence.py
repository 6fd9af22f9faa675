"""Proofs of what a backend can do: reading them, and saying where they hold.

A record is a JSON object (or a list of them) with the fields of :class:`rlctl.records.EvidenceRecord`. The project's own
suite ships its records inside a plugin, in ``evidence/*.json`` of the package that holds its light module; a user's
machine keeps its own in ``evidence/*.json`` of the user data directory. A record holds for its versions, device, head,
model family and topology: the combination and not the axis. Elsewhere it shows as stale.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlctl.codec import evidence_from_json, evidence_to_json
from rlctl.plugins import PluginEntry
from rlctl.records import Axis, EvidenceLevel, EvidenceRecord
from rlctl.requirements import installed_version
from rlctl.userdirs import user_data_dir

THIS_MACHINE = "this machine"


@dataclass(frozen=True)
class Proof:
    """A record and where it comes from: a dist's name, or ``this machine``."""

    record: EvidenceRecord
    source: str


@dataclass(frozen=True)
class Evidence:
    """What a cell is worth.

    Args:
        level: ``declared`` unless a record raises it, which was made on this kind of device.
        stale: the record does not hold here; ``reasons`` says why.
        proof: the record, or None.
        simulated: records of simulated devices that concern the cell; they never raise the level.
        failed: comparisons that failed here (``extra: {"failed": true}``), newest first. They refute earlier proofs of the
            same combination of axes and model family, wherever those come from.
    """

    level: EvidenceLevel = EvidenceLevel.DECLARED
    stale: bool = False
    reasons: tuple[str, ...] = ()
    proof: Proof | None = None
    simulated: int = 0
    failed: tuple[Proof, ...] = ()

    def to_json(self) -> dict[str, Any]:
        record = None
        if self.proof is not None:
            record = {**evidence_to_json(self.proof.record), "source": self.proof.source}
        return {
            "level": str(self.level),
            "stale": self.stale,
            "reasons": list(self.reasons),
            "simulated": self.simulated,
            "failed": [evidence_to_json(p.record) for p in self.failed],
            "record": record,
        }


@dataclass(frozen=True)
class EvidenceBook:
    """All records that could be read; ``problems`` has a line for each file that could not."""

    proofs: tuple[Proof, ...] = ()
    problems: tuple[str, ...] = ()

    def for_cell(self, backend: str, axis: Axis | None, model_type: str, device: str, vendor: str | None) -> Evidence:
        """The best evidence of one cell; ``axis`` None asks for one process without any parallel axis.

        A record that holds beats a stale one of a higher level; of stale ones, one of the cell's own device beats another's.
        """
        about = [p for p in self.proofs if _concerns(p.record, backend, axis, model_type)]
        return _best(about, device, lambda r: stale_reasons(r, device, vendor))

    def for_topology(
        self,
        backend: str,
        axes: Mapping[str, int],
        model_type: str,
        device: str,
        vendor: str | None,
        model_family: str | None = None,
    ) -> Evidence:
        """The evidence of one combination of axes (sizes larger than one, as ``Topology.axes`` gives them)."""
        about = [p for p in self.proofs if p.record.backend == backend and p.record.model_type == model_type]
        return _best(about, device, lambda r: stale_reasons(r, device, vendor, axes, model_family))

    def failures(self, backend: str) -> list[Proof]:
        """Comparisons of a backend that failed with what is installed now, newest first."""
        mine = [p for p in self.proofs if p.record.backend == backend and p.record.extra.get("failed")]
        holding = [p for p in mine if not p.record.simulated and not stale_reasons(p.record, p.record.device, None)]
        return sorted(holding, key=lambda p: p.record.date, reverse=True)

    def proved_words(self, backend: str) -> str:
        """``parity of 6 topologies (2 on this machine), 40 records stale``: what a backend has proved, in a line."""
        mine = [p for p in self.proofs if p.record.backend == backend and not p.record.simulated]
        mine = [p for p in mine if p.record.level.rank >= EvidenceLevel.PARITY.rank]
        holding = [p for p in mine if not stale_reasons(p.record, p.record.device, None)]

        def combinations(proofs: Iterable[Proof]) -> int:
            return len({(p.record.device, tuple(sorted(p.record.axes.items()))) for p in proofs})

        here = combinations(p for p in holding if p.source == THIS_MACHINE)
        count = combinations(holding)
        text = f"parity of {count} {'topology' if count == 1 else 'topologies'} ({here} on this machine)"
        stale = len(mine) - len(holding)
        return text + (f", {stale} {'record' if stale == 1 else 'records'} stale" if stale else "")


def _concerns(record: EvidenceRecord, backend: str, axis: Axis | None, model_type: str) -> bool:
    if record.backend != backend or record.model_type != model_type:
        return False
    if record.level is EvidenceLevel.IMPORTABLE:
        return True  # what imports does so for every axis
    used = {name for name, size in record.axes.items() if size > (0 if name == Axis.SP else 1)}
    return not used if axis is None else axis.value in used


def _best(proofs: Iterable[Proof], device: str, reasons_of: Any) -> Evidence:
    real: list[tuple[Proof, tuple[str, ...]]] = []
    simulated = 0
    for proof in proofs:
        if proof.record.simulated:
            simulated += 1
        else:
            real.append((proof, reasons_of(proof.record)))
    failed = [p for p, reasons in real if not reasons and p.record.extra.get("failed")]
    failed.sort(key=lambda p: p.record.date, reverse=True)
    real = [(p, r) for p, r in real if not p.record.extra.get("failed") and not any(map(_refutes(p), failed))]
    holding = [p for p, reasons in real if not reasons]
    if holding:
        best = max(holding, key=lambda p: (p.record.level.rank, p.record.date))
        return Evidence(best.record.level, False, (), best, simulated, tuple(failed))
    if real:
        # Other versions on the same device say more than the same versions on another one.
        proof, reasons = max(
            real, key=lambda s: (s[0].record.device == device, s[0].record.level.rank, -len(s[1]), s[0].record.date)
        )
        # What another kind of device computed raises no level of this one; it is shown, as stale.
        level = proof.record.level if proof.record.device == device else EvidenceLevel.DECLARED
        return Evidence(level, True, reasons, proof, simulated, tuple(failed))
    return Evidence(simulated=simulated, failed=tuple(failed))


def _refutes(proof: Proof) -> Callable[[Proof], bool]:
    """Whether a failure is of the same combination as ``proof``, and no older."""
    record = proof.record

    def refutes(failure: Proof) -> bool:
        other = failure.record
        same = (dict(other.axes), other.model_family) == (dict(record.axes), record.model_family)
        # That it imports is another matter than what it computes.
        return same and other.date >= record.date and record.level.rank > EvidenceLevel.IMPORTABLE.rank

    return refutes


def stale_reasons(
    record: EvidenceRecord,
    device: str,
    vendor: str | None,
    axes: Mapping[str, int] | None = None,
    model_family: str | None = None,
) -> tuple[str, ...]:
    """Why a record does not hold here; empty when it does.

    Args:
        axes, model_family: compared where given.
    """
    reasons: list[str] = []
    if record.device != device:
        reasons.append(f"made on {record.device}, not on {device}")
    elif record.vendor is not None and vendor is not None and record.vendor != vendor:
        reasons.append(f"made on {record.vendor}, not on {vendor}")
    for dist, version in record.versions.items():
        now = _installed(dist)
        if now != version:
            reasons.append(f"made with {dist} {version}, {'not installed' if now is None else 'now ' + now}")
    if axes is not None and dict(record.axes) != dict(axes):
        reasons.append(f"made with {axes_words(record.axes)}, not with {axes_words(axes)}")
    if model_family is not None and record.model_family != model_family:
        reasons.append(f"made with a {record.model_family} model, not a {model_family} one")
    return tuple(reasons)


@cache
def _installed(dist: str) -> str | None:
    return installed_version(dist)


def axes_words(axes: Mapping[str, int]) -> str:
    """``dp_shard=2, tp=2``, or ``one process``."""
    return ", ".join(f"{k}={v}" for k, v in axes.items()) or "one process"


def load_evidence(entries: Iterable[PluginEntry]) -> EvidenceBook:
    """Every record that the plugins ship and that this user has. A file that cannot be read is a problem, not an error.

    A plugin may only prove what it declares: a shipped record of another backend is refused.
    """
    proofs: list[Proof] = []
    problems: list[str] = []
    for entry in entries:
        declared = {s.name for s in entry.backends}
        directory = evidence_directory(entry.target) if declared else None
        if directory is not None:
            _read_directory(directory, entry.dist, declared, proofs, problems)
    _read_directory(user_data_dir() / "evidence", THIS_MACHINE, None, proofs, problems)
    return EvidenceBook(tuple(proofs), tuple(problems))


def evidence_directory(target: str) -> Path | None:
    """``evidence/`` in the top-level package of a plugin's target, found without importing it."""
    try:
        spec = importlib.util.find_spec(target.partition(":")[0].partition(".")[0].strip())
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(place) / "evidence").is_dir():
            return Path(place) / "evidence"
    return None


def _read_directory(
    directory: Path, source: str, declared: set[str] | None, proofs: list[Proof], problems: list[str]
) -> None:
    for path in sorted(directory.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            records = [evidence_from_json(d) for d in (data if isinstance(data, list) else [data])]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            problems.append(f"{path}: not an evidence record: {type(error).__name__}: {error}")
            continue
        for record in records:
            if declared is not None and record.backend not in declared:
                problems.append(f"{path}: {source} ships a record of {record.backend}, which it does not declare")
            else:
                proofs.append(Proof(record, source))


def save_evidence(record: EvidenceRecord, name: str) -> Path:
    """Keep a record of this machine as ``evidence/<name>.json`` of the user data directory.

    Raises:
        OSError: the directory cannot be written.
    """
    path = user_data_dir() / "evidence" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(evidence_to_json(record), indent=1), encoding="utf-8")
    beside.replace(path)
    return path
