"""Which engine answers (model_type, backend, device, vendor), and stage 4: its construction.

The order: (device, vendor), then the device for every vendor, then, on cuda-like devices, (device, nvidia).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from rlctl import remedy
from rlctl.causes import cause_chain
from rlctl.declare import guarded, load_object
from rlctl.discovery import Candidate
from rlctl.errors import BackendUnavailableError, RlctlError
from rlctl.plugins import BackendRecord, PluginSet
from rlctl.records import BackendKind, ModelType

if TYPE_CHECKING:
    from rlctl.engine import Engine

Notice = Callable[[str], None]

CUDA_LIKE = frozenset({"cuda"})
"""Device types on which a vendor without an engine of its own is served by the one of nvidia (torch speaks its API)."""

_FLAG = {BackendKind.TRAIN: "--backend", BackendKind.ROLLOUT: "--rollout"}
_ROLE = {BackendKind.TRAIN: "training", BackendKind.ROLLOUT: "rollout"}


def require_backend(
    name: str, kind: BackendKind | str, plugins: PluginSet, notice: Notice | None = None
) -> tuple[BackendRecord, ...]:
    """The usable records of a name or alias, on whatever device. Imports no torch: for a check before anything else.

    Raises:
        BackendUnavailableError: none is usable; lists what is registered, what failed and why, what could be installed.
    """
    kind = BackendKind(kind)
    records = [r for r in plugins.backends() if r.spec.kind is kind]
    named = [r for r in records if r.spec.name == name]
    if not named:
        named = [r for r in records if name in r.spec.aliases]
        names = sorted({r.spec.name for r in named})
        if len(names) > 1:
            raise BackendUnavailableError(
                f"{name!r} is short for more than one {_ROLE[kind]} backend",
                found=" and ".join(f"{r.spec.name} ({r.label})" for r in named),
                wanted="one of the full names",
                next=f"{_FLAG[kind]} {names[0]}",
            )
        if named and notice is not None:
            notice(f"{name} is an alias of {names[0]}")
    usable = tuple(r for r in named if not r.problems)
    if usable:
        return usable
    raise _unavailable(name, kind, plugins, named)


def resolve_backend(
    plugins: PluginSet,
    name: str,
    kind: BackendKind | str,
    model_type: ModelType | str,
    device: str,
    vendor: str | None = None,
    notice: Notice | None = None,
) -> BackendRecord:
    """The record that answers the key.

    Args:
        name: backend name or alias; for an alias ``notice`` gets one line.
        device, vendor: as :func:`rlctl.device.detect_device` says.

    Raises:
        BackendUnavailableError: no such backend, or it has no engine for this head or device.
    """
    kind, model_type = BackendKind(kind), ModelType(model_type)
    records = require_backend(name, kind, plugins, notice)
    heads = [r for r in records if model_type in r.spec.model_types]
    if not heads:
        raise BackendUnavailableError(
            f"backend {name!r} has no engine for a {model_type}",
            found="it answers " + ", ".join(sorted({str(m) for r in records for m in r.spec.model_types})),
            wanted=str(model_type),
            next=_other_backend(plugins, kind, model_type, device, vendor),
        )
    for wanted in fallback_order(device, vendor):
        for record in heads:
            if wanted in record.spec.devices:
                if wanted[1] not in (None, vendor) and notice is not None:
                    notice(
                        f"{name} has no engine of its own for {place(device, vendor)}; taking the one for {place(*wanted)}"
                    )
                return record
    if (owner := _broken_owner(plugins, name, kind, device, vendor)) is not None:
        raise owner
    raise BackendUnavailableError(
        f"backend {name!r} has no engine for {place(device, vendor)}",
        found="it answers " + ", ".join(place(*d) for r in heads for d in r.spec.devices),
        wanted=place(device, vendor),
        next=_other_backend(plugins, kind, model_type, device, vendor),
    )


def require_device(name: str, kind: BackendKind | str, plugins: PluginSet, device: str, vendor: str | None) -> None:
    """Refuse a backend whose owner on this device is installed and cannot be used, where no other one answers it. Imports no
    torch: for a check before anything else, where the device was named.

    Raises:
        BackendUnavailableError: with what keeps the owner from being used.
    """
    kind, places = BackendKind(kind), set(fallback_order(device, vendor))
    named = [r for r in plugins.backends() if r.spec.kind is kind and name in (r.spec.name, *r.spec.aliases)]
    if any(not r.problems and places & set(r.spec.devices) for r in named):
        return
    if (owner := _broken_owner(plugins, name, kind, device, vendor)) is not None:
        raise owner


def _broken_owner(
    plugins: PluginSet, name: str, kind: BackendKind, device: str, vendor: str | None
) -> BackendUnavailableError | None:
    """Why the record that answers a device is not used; None where none does."""
    for record in plugins.backends():
        named = record.spec.kind is kind and name in (record.spec.name, *record.spec.aliases)
        if named and record.problems and set(fallback_order(device, vendor)) & set(record.spec.devices):
            return BackendUnavailableError(
                f"backend {name!r} on {place(device, vendor)} is {record.label}, which cannot be used here",
                details=list(record.problems[1:]),
                found=record.problems[0],
                wanted="what its plugin requires" if record.spec.requirements else "no second owner of the name",
                next=record.next or f"rlctl doctor {name}",
            )
    return None


def fallback_order(device: str, vendor: str | None) -> tuple[tuple[str, str | None], ...]:
    """The (device, vendor) pairs that are tried, first to last."""
    order: list[tuple[str, str | None]] = [(device, vendor), (device, None)]
    if device in CUDA_LIKE:
        order.append((device, "nvidia"))
    return tuple(dict.fromkeys(order))


def place(device: str, vendor: str | None) -> str:
    """Words for a (device, vendor) pair."""
    return f"{device}/{vendor}" if vendor else device


def create_engine(
    plugins: PluginSet,
    record: BackendRecord,
    *,
    role: str,
    settings: Mapping[str, Any],
    notice: Notice | None = None,
) -> Engine:
    """Stage 4 in this process: prepare it, import the engine, add other plugins' wrappers.

    Args:
        role: actor, ref, rollout ...: wrappers may ask for it.
        settings: the backend's own validated section, for ``rlctl_prepare_process``.
        notice: gets a line for each wrapper that could not be added; without it a warning is logged.

    Raises:
        BackendUnavailableError: its libraries do not import or its engine cannot be made; carries the whole chain.
        EngineError: the engine does not implement the contract.
    """
    spec = record.spec
    for key, value in spec.env.items():
        os.environ.setdefault(key, value)

    def provider() -> object:
        plugins.prepare_process(spec.name, settings, record.dist)
        return load_object(spec.engine)()

    built = guarded(provider)
    if isinstance(built, RlctlError):
        raise built  # the plugin's own error knows what to do next
    if isinstance(built, BaseException):
        raise registration_failed(record, built) from built
    from rlctl.engine import Engine

    wrappers: list[tuple[str, object]] = []
    for dist, (name, target) in plugins.engine_wrappers(spec.name, role):
        wrapper = guarded(lambda t=target: load_object(t)())
        if isinstance(wrapper, BaseException):
            _say(notice, f"wrapper {name!r} of {dist} is left out: {cause_chain(wrapper)[-1].line}")
        else:
            wrappers.append((name, wrapper))
    return Engine(built, spec.kind, spec.name, wrappers)


def registration_failed(record: BackendRecord, error: BaseException) -> BackendUnavailableError:
    """The error of a backend whose libraries do not import, with every link of the chain."""
    causes = cause_chain(error)
    candidate = Candidate(record.spec.name, record.dist, record.version, record.spec.engine)
    return BackendUnavailableError(
        f"backend {record.spec.name!r} of {record.label} does not load",
        details=[f"because {c.line}" if i else c.line for i, c in enumerate(causes)],
        found=causes[-1].line,
        wanted=f"an importable {record.spec.engine}",
        next=remedy.for_import(candidate, causes, record.spec.requirements, record.spec.remedies),
    )


def _say(notice: Notice | None, text: str) -> None:
    if notice is not None:
        notice(text)
    else:
        import logging

        logging.getLogger("rlctl.registry").warning(text)


def _other_backend(
    plugins: PluginSet, kind: BackendKind, model_type: ModelType, device: str, vendor: str | None
) -> str:
    fits = [
        r.spec.name
        for r in plugins.backends()
        if r.spec.kind is kind
        and not r.problems
        and model_type in r.spec.model_types
        and set(fallback_order(device, vendor)) & set(r.spec.devices)
    ]
    if fits:
        return f"{_FLAG[kind]} {fits[0]}"
    return "rlctl capabilities shows which backend answers which device and head"


def short_name(name: str) -> str:
    """A name as a message quotes it: somebody may have put a whole text in its place."""
    return name if len(name) <= 60 else name[:57] + "..."


def _unavailable(
    name: str, kind: BackendKind, plugins: PluginSet, named: Sequence[BackendRecord]
) -> BackendUnavailableError:
    from rlctl import catalogue
    from rlctl.catalogue import PluginState

    usable = [r for r in plugins.backends() if not r.problems]
    registered = sorted({r.spec.name for r in usable if r.spec.kind is kind})
    failed = plugins.failures()
    known, other = catalogue.find(name, kind), catalogue.find(name)
    lines = [
        "registered: " + (", ".join(f"{r.spec.name} ({r.label})" for r in usable if r.spec.kind is kind) or "none")
    ]
    lines += [f"failed: {e.name} ({e.label}) {e.stage}: {' <- '.join(e.cause)}" for e in failed]
    others = [e for e in catalogue.installable(kind) if e.spec.name not in (*registered, name)]
    for words, state in (("installable", PluginState.RELEASED), ("not released yet", PluginState.PLANNED)):
        listed = [f"{e.spec.name} ({e.install})" for e in others if e.state is state]
        lines += [f"{words}: {', '.join(listed)}"] if listed else []
    what, next_step = f"no {_ROLE[kind]} backend is called {short_name(name)!r}", ""
    blamed = [e for e in failed if e.name == name or any(name in (s.name, *s.aliases) for s in e.backends)]
    if named:
        what = f"the {_ROLE[kind]} backend {name!r} of {named[0].label} cannot be used here: {'; '.join(named[0].problems)}"
        next_step = named[0].next
    elif blamed or (known is not None and any(e.dist == known.dist for e in failed)):
        entry = blamed[0] if blamed else next(e for e in failed if known is not None and e.dist == known.dist)
        what, next_step = (
            f"the {_ROLE[kind]} backend {name!r} is installed ({entry.label}) but does not load",
            entry.next,
        )
    elif known is not None and any(e.dist == known.dist and e.status == "skip" for e in plugins.entries):
        what, next_step = f"the {_ROLE[kind]} backend {name!r} is switched off", "unset RLCTL_DISABLE_PLUGINS"
    elif known is not None:
        what, next_step = f"the {_ROLE[kind]} backend {name!r} is not installed", known.install
        lines += [known.note] if known.note else []
    elif any(name in (r.spec.name, *r.spec.aliases) for r in usable):
        has = next(r.spec.kind for r in usable if name in (r.spec.name, *r.spec.aliases))
        what, next_step = f"{name!r} is a {_ROLE[has]} backend, not a {_ROLE[kind]} one", f"{_FLAG[has]} {name}"
    elif other is not None:
        what = f"{name!r} is a {_ROLE[other.spec.kind]} backend, not a {_ROLE[kind]} one, and it is not installed"
        next_step = other.install
        lines += [other.note] if other.note else []
    else:
        near = get_close_matches(name, [*registered, *_names(others)], n=1)
        next_step = f"{_FLAG[kind]} {near[0]}" if near else "rlctl capabilities lists every known backend"
        lines += [f"did you mean {near[0]}?"] if near else []
    return BackendUnavailableError(
        what, details=lines, found=short_name(name), wanted=_wanted(registered, kind), next=next_step
    )


def _names(entries: Iterable[Any]) -> list[str]:
    return [e.spec.name for e in entries]


def _wanted(registered: Sequence[str], kind: BackendKind) -> str:
    return (
        "one that is installed: " + ", ".join(registered)
        if registered
        else f"an installed plugin with a {_ROLE[kind]} backend"
    )
