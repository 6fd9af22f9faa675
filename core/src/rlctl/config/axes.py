"""The ``parallel`` sections against a backend's capability records and their constraints, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlctl.capabilities import UNDECLARED, AxisProblem, check_topology, find_capability
from rlctl.config.document import Document, Loc, dotted
from rlctl.config.problems import Problem, from_error
from rlctl.config.schema_runtime import MAIN_POOL
from rlctl.constraints import facts_of
from rlctl.errors import CapabilityError
from rlctl.records import Axis, BackendKind, BackendSpec, ModelType, Support
from rlctl.topology import Topology, resolve, resolve_rollout

_USABLE = (Support.SUPPORTED, Support.CONDITIONAL)


def axis_problems(
    document: Document, role: str, spec: BackendSpec, device: str | None, notice: Callable[[str], None]
) -> list[Problem]:
    """Axes that the backend refuses, sizes that do not fit the number of processes, and constraints that do not hold.

    Args:
        device: the device, or None where only the machine knows it: then what no device of the backend does is refused.
        notice: gets what an axis comes to (``sp`` is off while ``tp`` is 1).
    """
    sizes = document.get((role, "parallel"))
    if not isinstance(sizes, dict):
        return []
    axes = _well_formed(sizes)
    places: list[tuple[str, str | None]] = [p for p in spec.devices if device in (None, p[0])] or [
        (device or "cpu", None)
    ]
    refused = _refused(document, role, spec, axes, places, device)
    if refused:
        return refused
    topology = _topology(document, role, spec, axes)
    if isinstance(topology, CapabilityError):
        named = CapabilityError(
            f"{role}.parallel: {topology.what}",
            found=topology.found,
            wanted=topology.wanted,
            next=topology.next,
            details=topology.details,
        )
        return [from_error((role, "parallel"), document, named)]
    if topology is None:
        return []
    return _constraints(document, role, spec, topology, places, notice)


def head_of(document: Document, role: str) -> ModelType:
    """The head of a role's model."""
    scores = role == "critic" or (role == "actor" and document.get(("trainer", "type")) == "rm")
    return ModelType.VALUE_MODEL if scores else ModelType.LANGUAGE_MODEL


def condition_problems(document: Document, role: str, spec: BackendSpec, device: str | None) -> list[Problem]:
    """Axes larger than one that a backend has on a condition which no rule here can judge, with the condition."""
    sizes = document.get((role, "parallel"))
    places = [p for p in spec.devices if device in (None, p[0])]
    problems: list[Problem] = []
    for name, size in (_well_formed(sizes) if isinstance(sizes, dict) else {}).items():
        cells = [find_capability(spec, Axis(name), head_of(document, role), *place) for place in places]
        found = [c for c in cells if c is not None and c.support is Support.CONDITIONAL and c.constraint is None]
        if size > 1 and found and len(found) == len(cells):
            loc: Loc = (role, "parallel", name)
            what = f"{spec.name} has {name} on a condition"
            problems.append(Problem(dotted(loc), str(document.origin(loc)), what, str(size), "1", found[0].reason))
    return problems


def _well_formed(sizes: dict[str, Any]) -> dict[str, int]:
    """The sizes of known axes that are more than their default; wrong types are the schema's matter."""
    out: dict[str, int] = {}
    for axis in Axis:
        value = sizes.get(axis.value)
        if axis is Axis.SP and value is True:
            out[axis.value] = 1
        elif axis is not Axis.SP and isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31:
            out[axis.value] = value
    return out


def _refused(
    document: Document,
    role: str,
    spec: BackendSpec,
    axes: dict[str, int],
    places: Sequence[tuple[str, str | None]],
    device: str | None,
) -> list[Problem]:
    problems: list[Problem] = []
    for name, size in axes.items():
        if size == 1 and name != Axis.SP:
            continue
        cells = [find_capability(spec, Axis(name), head_of(document, role), *place) for place in places]
        if any(cell is not None and cell.support in _USABLE for cell in cells):
            continue
        loc: Loc = (role, "parallel", name)
        reason = next((cell.reason for cell in cells if cell is not None and cell.reason), UNDECLARED)
        off = "false" if name == Axis.SP else "1"
        problems.append(
            Problem(
                dotted(loc),
                str(document.origin(loc)),
                f"{spec.name} has no {name}" + (f" on {device}" if device else ""),
                found="true" if name == Axis.SP else str(size),
                wanted=off,
                hint=f"{reason}. Set {dotted(loc)} to {off}, or see rlctl capabilities",
            )
        )
    return problems


def _topology(
    document: Document, role: str, spec: BackendSpec, axes: dict[str, int]
) -> Topology | CapabilityError | None:
    """The topology of a role over its pool; ranks that a rollout engine's axes leave are replicas."""
    nproc = _pool_size(document, role)
    if isinstance(nproc, bool) or not isinstance(nproc, int) or not 1 <= nproc < 2**31:
        return None
    try:
        return resolve(nproc, axes) if spec.kind is BackendKind.TRAIN else resolve_rollout(nproc, axes)
    except CapabilityError as error:
        return error


def layout_problem(document: Document, role: str, spec: BackendSpec) -> Problem | None:
    """What is wrong with sizes of ``role`` that are not the actor's, for a backend with one layout a process."""
    found: list[Topology] = []
    for name in ("actor", role):
        sizes = document.get((name, "parallel"), {})
        topology = _topology(document, name, spec, _well_formed(sizes)) if isinstance(sizes, dict) else None
        if not isinstance(topology, Topology):
            return None  # said already
        found.append(topology)
    changed = [axis.value for axis in Axis if getattr(found[0], axis.value) != getattr(found[1], axis.value)]
    if not changed:
        return None
    loc: Loc = (role, "parallel")

    def words(topology: Topology) -> str:
        return ", ".join(f"{k}={v}" for k, v in topology.axes().items()) or "one rank"

    return Problem(
        dotted(loc),
        str(document.origin((*loc, changed[0]))),
        f"{spec.name} keeps one layout of ranks in a process, and {role} shares the actor's processes",
        found=f"{words(found[1])} beside the actor's {words(found[0])}",
        wanted="the actor's sizes",
        hint=f"leave {dotted(loc)} out, or give it a pool of its own: runtime.pools.{role}.nproc and {role}.pool={role}",
    )


def _pool_size(document: Document, role: str) -> object:
    """Ranks of the pool where a role lives; what is wrong with the pool's name is the schema's matter."""
    follows = role in ("ref", "critic", "teacher")
    pool = document.get((role, "pool")) or (document.get(("actor", "pool")) if follows else None) or MAIN_POOL
    place: Loc = ("runtime", "nproc") if pool == MAIN_POOL else ("runtime", "pools", str(pool), "nproc")
    return document.get(place, 1)


def _constraints(
    document: Document,
    role: str,
    spec: BackendSpec,
    topology: Topology,
    places: Sequence[tuple[str, str | None]],
    notice: Callable[[str], None],
) -> list[Problem]:
    own: Loc = (role, "model")
    model: Loc = own if isinstance(document.get(own), dict) else ("model",)
    facts = facts_of(document.get((*model, "config")), document.get((*model, "path")))
    fits = [check_topology(spec, topology, *place, head_of(document, role), facts=facts) for place in places]
    good = [fit for fit in fits if not fit.problems]
    if good:
        for note in dict.fromkeys(note for fit in good[:1] for note in fit.notes):
            notice(f"{role}.parallel: {note}")
        return []
    return [_broken(document, role, spec, problem) for problem in fits[0].problems]


def _broken(document: Document, role: str, spec: BackendSpec, problem: AxisProblem) -> Problem:
    loc: Loc = (role, "parallel", problem.axis)
    if role == "rollout" and problem.axis == Axis.DP_REPLICATE and document.get(loc, 1) == 1:
        # Nobody wrote it: it is what the pool's ranks come to.
        words = f"{spec.name} does not run as {problem.size} replicas: {problem.reason}"
        hint = "give it a pool of its own: runtime.pools.gen.nproc=1 and rollout.pool=gen"
        return Problem(dotted(loc), str(document.origin(("runtime", "nproc"))), words, hint=hint)
    nearest = " or ".join(problem.nearest)
    hint = f"nearest that fits: {nearest}" if nearest else f"change {dotted((role, 'parallel'))}"
    return Problem(
        dotted(loc), str(document.origin(loc)), f"{spec.name}: {problem.reason}", found=problem.size, hint=hint
    )
