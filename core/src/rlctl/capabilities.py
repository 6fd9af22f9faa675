"""What each backend can do on each axis, with the reason and the evidence; and whether a topology fits.

The records of installed plugins and the catalogue give the cells. ``rlctl capabilities`` shows them; trainers ask
:func:`check_topology` before anything is launched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl import catalogue, constraints
from rlctl.catalogue import PluginState
from rlctl.constraints import ModelFacts
from rlctl.errors import CapabilityError
from rlctl.evidence import Evidence, EvidenceBook
from rlctl.plugins import BackendRecord, PluginSet
from rlctl.records import Axis, BackendSpec, Capability, ModelType, Support
from rlctl.registry import fallback_order
from rlctl.topology import Topology

UNDECLARED = "its plugin declares nothing of this axis"
UNBUILT = (PluginState.PLANNED, PluginState.NOT_BUILT)
"""States without evidence: a record names its backend only, and one of a namesake proves nothing of a plugin to come."""


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix. ``state``: ``installed``, ``broken``, ``released``, ``planned`` or ``not_built``.
    ``routing_test`` covers how a run reaches the backend on a device where nothing was proved."""

    backend: str
    kind: str
    dist: str
    state: str
    model_type: str
    device: str
    vendor: str | None
    axis: Axis
    support: Support
    reason: str
    evidence: Evidence
    routing_test: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "kind": self.kind,
            "dist": self.dist,
            "state": self.state,
            "model_type": self.model_type,
            "device": self.device,
            "vendor": self.vendor,
            "axis": str(self.axis),
            "support": str(self.support),
            "reason": self.reason,
            "evidence": self.evidence.to_json(),
            "routing_test": self.routing_test,
        }


def matrix(plugins: PluginSet, book: EvidenceBook, backends: Sequence[str] = ()) -> list[Cell]:
    """Every cell: installed backends first, then what the catalogue knows of the others.

    Args:
        backends: names or aliases to keep; none for all.

    Raises:
        CapabilityError: a name that is neither installed nor known.
    """
    cells: list[Cell] = []
    names: set[str] = set()
    known: list[str] = []
    for spec, dist, state in known_backends(plugins):
        known += [spec.name, *spec.aliases]
        names |= {spec.name, *spec.aliases} & set(backends)
        if not backends or {spec.name, *spec.aliases} & set(backends):
            cells += _cells(spec, dist, state, book)
    unknown = [b for b in backends if b not in names]
    if unknown:
        from difflib import get_close_matches

        near = get_close_matches(unknown[0], known, n=1)
        raise CapabilityError(
            f"no backend called {unknown[0]!r} is known",
            found=unknown[0],
            wanted="one of " + ", ".join(dict.fromkeys(known)),
            next=f"rlctl capabilities --backend {near[0]}" if near else "rlctl capabilities",
        )
    return cells


def known_backends(plugins: PluginSet) -> Iterable[tuple[BackendSpec, str, str]]:
    """(record, dist, state) of every backend: what is installed first, then the rest of the catalogue."""
    installed: set[tuple[str, str]] = set()
    for record in plugins.backends():
        installed.add((record.spec.name, record.dist))
        yield record.spec, record.dist, "broken" if record.problems else "installed"
    for entry in catalogue.entries():
        if (entry.spec.name, entry.dist) not in installed:
            yield entry.spec, entry.dist or "", str(entry.state)


def _cells(spec: BackendSpec, dist: str, state: str, book: EvidenceBook) -> Iterable[Cell]:
    exists = state not in UNBUILT
    for model_type in spec.model_types:
        for device, vendor in spec.devices:
            for axis in Axis:
                found = find_capability(spec, axis, model_type, device, vendor)
                support, reason = (found.support, found.reason) if found else (Support.UNSUPPORTED, UNDECLARED)
                evidence = Evidence()
                if exists and support in (Support.SUPPORTED, Support.CONDITIONAL):
                    evidence = book.for_cell(spec.name, axis, str(model_type), device, vendor)
                yield Cell(
                    spec.name,
                    str(spec.kind),
                    dist,
                    state,
                    str(model_type),
                    device,
                    vendor,
                    axis,
                    support,
                    reason,
                    evidence,
                    spec.routing_tests.get(device, ""),
                )


def find_capability(
    spec: BackendSpec, axis: Axis, model_type: ModelType | str, device: str, vendor: str | None
) -> Capability | None:
    """The record that speaks of an axis on a device, by the registry's order of fall-backs; None when none does."""
    mine = [c for c in spec.capabilities if c.axis is axis and c.model_type == model_type]
    for place in fallback_order(device, vendor):
        for capability in mine:
            if (capability.device, capability.vendor) == place:
                return capability
    return None


@dataclass(frozen=True)
class AxisProblem:
    """Why one axis of a topology is refused."""

    axis: str
    size: str
    reason: str
    nearest: tuple[str, ...] = ()

    def __str__(self) -> str:
        choices = f" Nearest that fits: {' or '.join(self.nearest)}." if self.nearest else ""
        return f"parallel.{self.axis}={self.size}: {self.reason}.{choices}"


@dataclass(frozen=True)
class Fit:
    """Whether a topology fits a backend: ``problems`` refuse it, ``notes`` announce what an axis comes to."""

    problems: tuple[AxisProblem, ...] = ()
    notes: tuple[str, ...] = ()


def check_topology(
    spec: BackendSpec,
    topology: Topology,
    device: str,
    vendor: str | None = None,
    model_type: ModelType | str = ModelType.LANGUAGE_MODEL,
    facts: ModelFacts | None = None,
) -> Fit:
    """Compare every axis larger than one with the backend's records and their constraints.

    Args:
        facts: of the model, for constraints on heads, layers and experts; those are skipped without it.
    """
    facts = facts or ModelFacts()
    problems: list[AxisProblem] = []
    notes: list[str] = []
    for name, size in topology.axes().items():
        shown = str(bool(size)).lower() if name == Axis.SP else str(size)
        found = find_capability(spec, Axis(name), model_type, device, vendor)
        if found is None or found.support in (Support.UNSUPPORTED, Support.NOT_APPLICABLE):
            problems.append(AxisProblem(name, shown, found.reason if found and found.reason else UNDECLARED))
            continue
        for rule_name, rule in constraints.named(found.constraint):
            broken = constraints.check(rule_name, topology, facts)
            if broken is not None and rule.note:
                notes.append(f"{spec.name}: {broken.words}")
            elif broken is not None:
                problems.append(AxisProblem(name, shown, f"{broken.words} (found {broken.found})", broken.nearest))
    return Fit(tuple(problems), tuple(notes))


def require_topology(
    record: BackendRecord,
    topology: Topology,
    device: str,
    vendor: str | None = None,
    model_type: ModelType | str = ModelType.LANGUAGE_MODEL,
    facts: ModelFacts | None = None,
) -> tuple[str, ...]:
    """:func:`check_topology` that raises; returns the notes.

    Raises:
        CapabilityError: a line for each axis that does not fit.
    """
    fit = check_topology(record.spec, topology, device, vendor, model_type, facts)
    if fit.problems:
        raise CapabilityError(
            f"backend {record.spec.name!r} cannot run this topology on {device}",
            details=[str(p) for p in fit.problems],
            found=", ".join(f"{k}={v}" for k, v in topology.axes().items()),
            wanted="sizes that its capabilities allow",
            next=f"rlctl capabilities --backend {record.spec.name}",
        )
    return fit.notes
