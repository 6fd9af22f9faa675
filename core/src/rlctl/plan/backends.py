"""Which backends could do what is planned, best first, and why each other one is out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlctl.capabilities import UNBUILT, check_topology, find_capability, known_backends
from rlctl.constraints import ModelFacts
from rlctl.errors import CapabilityError
from rlctl.evidence import EvidenceBook
from rlctl.plan.layout import factorise
from rlctl.plugins import PluginSet
from rlctl.records import Axis, BackendKind, BackendSpec, EvidenceLevel, ModelType, Support
from rlctl.registry import CUDA_LIKE, place

_USABLE = (Support.SUPPORTED, Support.CONDITIONAL)
_ELSEWHERE = "does not run on "
_OWNER = {"sp": "tp", "vpp": "pp"}
"""Axes that belong to another one: where that is refused, nothing more need be said of them."""
_TIERS = {"installed": 0, "released": 1, "planned": 2, "broken": 3, "not_built": 4}


@dataclass(frozen=True)
class Needs:
    """What one kind of engine has to do.

    Args:
        axes: the sizes that the configuration asks for, by axis.
        heads: model types that are trained (a critic needs ``value_model``).
        model_family: for evidence; None where the model is not known.
        lora: adapters are trained.
    """

    kind: BackendKind
    world_size: int
    axes: dict[str, int]
    device: str
    vendor: str | None
    heads: tuple[ModelType, ...] = (ModelType.LANGUAGE_MODEL,)
    facts: ModelFacts = field(default_factory=ModelFacts)
    model_family: str | None = None
    lora: bool = False


@dataclass(frozen=True)
class Choice:
    """One backend.

    Args:
        state: ``installed``, ``broken``, ``released``, ``planned`` or ``not_built``.
        fits: it could do it, once it is there.
        reasons: why it is out; empty when it fits.
        evidence: level of the best record of this very combination of axes that holds here; ``declared`` without one.
        elsewhere: a record that does not hold here, and why not; empty mostly.
        install: the command that brings it, or what stands in its way; empty when it is there.
    """

    name: str
    kind: BackendKind
    dist: str
    state: str
    fits: bool
    reasons: tuple[str, ...]
    evidence: str
    elsewhere: str
    install: str


def rank_backends(needs: Needs, plugins: PluginSet, book: EvidenceBook) -> list[Choice]:
    """Every backend of the kind: those that fit by state and evidence, then the others in the catalogue's order.

    One that fits and is installed, but not usable here, stands among those that fit, before any without a plugin.
    """
    known = [(spec, dist, state) for spec, dist, state in known_backends(plugins) if spec.kind is needs.kind]
    specs = [spec for spec, _, _ in known]
    merged: dict[tuple[str, str], list[tuple[int, int, Choice]]] = {}
    for spec, dist, state in known:
        choice, level = _judge(spec, dist, state, needs, specs, plugins, book)
        merged.setdefault((spec.name, spec.summary if choice.fits else ""), []).append((_TIERS[state], -level, choice))
    # Two dists may answer one name on different devices: the one that fits speaks for it, then the one of this device.
    best: dict[str, tuple[int, int, Choice]] = {}
    for found in merged.values():
        for entry in found:
            old = best.get(entry[2].name)
            if old is None or _speaks(entry[2]) > _speaks(old[2]):
                best[entry[2].name] = entry
    order = list(best.values())
    fitting = sorted((e for e in order if _would_fit(e[2])), key=lambda e: e[:2])
    return [choice for _, _, choice in (*fitting, *(e for e in order if not _would_fit(e[2])))]


def _would_fit(choice: Choice) -> bool:
    """It fits, or would once it is mended."""
    return choice.fits or (choice.state == "broken" and len(choice.reasons) == 1)


def _speaks(choice: Choice) -> int:
    if choice.fits:
        return 2
    return 0 if any(reason.startswith(_ELSEWHERE) for reason in choice.reasons) else 1


def _judge(
    spec: BackendSpec,
    dist: str,
    state: str,
    needs: Needs,
    specs: Sequence[BackendSpec],
    plugins: PluginSet,
    book: EvidenceBook,
) -> tuple[Choice, int]:
    reasons = list(dict.fromkeys(_reasons(spec, needs, specs)))
    if state == "broken":
        causes = [c for r in plugins.backends() if r.spec.name == spec.name and r.dist == dist for c in r.problems]
        reasons.insert(0, f"installed, but not usable here: {causes[0] if causes else 'see rlctl doctor'}")
    evidence, elsewhere, level = "", "", 0
    if not reasons:
        axes = factorise(needs.kind, needs.world_size, needs.axes).axes()
        book = EvidenceBook() if state in UNBUILT else book
        found = book.for_topology(spec.name, axes, str(needs.heads[0]), needs.device, needs.vendor, needs.model_family)
        holds = not found.stale and not found.failed
        evidence, level = (str(found.level), found.level.rank) if holds else (str(EvidenceLevel.DECLARED), 0)
        if found.failed:
            elsewhere = "a comparison failed here: rlctl capabilities --backend " + spec.name
        elif found.stale and found.proof is not None:
            elsewhere = f"{str(found.proof.record.level).replace('_', ' ')}, {found.reasons[0]}"
    install = _install(spec, dist, state)
    choice = Choice(spec.name, spec.kind, dist, state, not reasons, tuple(reasons), evidence, elsewhere, install)
    return choice, level


def _install(spec: BackendSpec, dist: str, state: str) -> str:
    if state == "installed":
        return ""
    if state == "broken":
        return f"rlctl doctor {spec.name}"
    if state == "not_built":
        return f"no rlctl plugin for {spec.name} is built"
    if state == "planned":
        return f"its plugin, {dist}, is not released yet"
    return spec.install_hint


def _reasons(spec: BackendSpec, needs: Needs, specs: Sequence[BackendSpec]) -> list[str]:
    """Why a backend cannot do it."""
    where = place(needs.device, needs.vendor)
    if not any(d == needs.device and (v in (None, needs.vendor) or d in CUDA_LIKE) for d, v in spec.devices):
        answers = ", ".join(dict.fromkeys(place(*d) for d in spec.devices))
        return [f"{_ELSEWHERE}{where}: it runs on {answers}"]
    out: list[str] = ["trains no adapters (model.lora)"] if needs.lora and not spec.lora else []
    for head in needs.heads:
        if head not in spec.model_types:
            role = "a critic" if head is ModelType.VALUE_MODEL else "a language model"
            out.append(f"needs {role}: {spec.name} has no {head}{_only(_with_head(specs, head, needs), spec)}")
    head = needs.heads[0] if needs.heads[0] in spec.model_types else spec.model_types[0]
    refused: set[str] = set()
    for name, size in sorted(needs.axes.items(), key=lambda item: item[0] in _OWNER):
        if size <= (0 if name == "sp" else 1):
            continue
        cell = find_capability(spec, Axis(name), head, needs.device, needs.vendor)
        if cell is None or cell.support not in _USABLE:
            if _OWNER.get(name) in refused:
                continue
            refused.add(name)
            why = cell.reason if cell is not None and cell.reason else "its plugin declares nothing of this axis"
            shown = f"{name}={'true' if name == 'sp' else size}"
            out.append(f"needs {shown}: {why.partition('; take ')[0]}{_only(_with_axis(specs, name, needs), spec)}")
    if refused:
        return out
    try:
        topology = factorise(needs.kind, needs.world_size, needs.axes)
    except CapabilityError as error:
        return [*out, error.what]
    fit = check_topology(spec, topology, needs.device, needs.vendor, head, needs.facts)
    return out + [str(problem) for problem in fit.problems]


def _with_axis(specs: Sequence[BackendSpec], axis: str, needs: Needs) -> list[str]:
    """Backends that have an axis on the device."""
    return [
        s.name
        for s in specs
        for head in s.model_types[:1]
        if (cell := find_capability(s, Axis(axis), head, needs.device, needs.vendor)) is not None
        and cell.support in _USABLE
    ]


def _with_head(specs: Sequence[BackendSpec], head: ModelType, needs: Needs) -> list[str]:
    return [s.name for s in specs if head in s.model_types and any(d == needs.device for d, _ in s.devices)]


def _only(names: Sequence[str], spec: BackendSpec) -> str:
    """``; only megatron has it``, while those that have it can be counted on one hand."""
    others = [n for n in dict.fromkeys(names) if n != spec.name]
    if not others:
        return "; no backend that is known has it here"
    if len(others) > 4:
        return ""
    return f"; only {' and '.join(others) if len(others) < 3 else ', '.join(others)} {'has' if len(others) == 1 else 'have'} it"
