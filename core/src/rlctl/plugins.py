"""Find, check and load plugins: stages 1 to 3 of 4. Nothing else knows about entry points.

1. *discovered*: entry-point metadata is read; ``RLCTL_DISABLE_PLUGINS`` acts here, before any import.
2. *declared*: the light module is imported and its hooks verified.
3. *compatible*: its requirements are compared with what is installed.

Stage 4, *registered*, imports a backend's libraries: :func:`rlctl.registry.create_engine` does it for the chosen
backend, ``rlctl doctor`` for every backend in a child each. A plugin that fails stays listed, with its cause and the
command that mends it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import pluggy

from rlctl import remedy, vetting
from rlctl.causes import Cause, cause_chain
from rlctl.declare import Declared, declare, guarded, new_manager, records_of
from rlctl.device import in_sight
from rlctl.discovery import Candidate, claimed_twice, disabled_names, discover, is_disabled
from rlctl.errors import PluginError
from rlctl.records import (
    AlgorithmSpec,
    BackendSpec,
    Check,
    CheckStatus,
    EnvironmentSpec,
    RecipeSpec,
    RewardSpec,
    TrackerSpec,
    WeightTransportSpec,
)
from rlctl.requirements import unmet_requirements

logger = logging.getLogger("rlctl.plugins")

RECORD_HOOKS: Mapping[str, type] = {
    "rlctl_backends": BackendSpec,
    "rlctl_checks": Check,
    "rlctl_trackers": TrackerSpec,
    "rlctl_rewards": RewardSpec,
    "rlctl_environments": EnvironmentSpec,
    "rlctl_algorithms": AlgorithmSpec,
    "rlctl_recipes": RecipeSpec,
    "rlctl_weight_transports": WeightTransportSpec,
}


class Stage(StrEnum):
    """The last stage that was tried; with status ``fail``, the one that failed."""

    DISCOVERED = "discovered"
    DECLARED = "declared"
    COMPATIBLE = "compatible"
    REGISTERED = "registered"


@dataclass(frozen=True)
class PluginEntry:
    """One entry point and how far it came.

    Args:
        name, dist, version, target: as its metadata says.
        stage: see :class:`Stage`.
        status: ``ok``; ``warn`` (usable, but ...); ``fail``; ``skip`` (disabled).
        cause: why it is not ``ok``, outermost first.
        next: the command that mends it.
        backends: what it declared, whether usable or not.
    """

    name: str
    dist: str
    version: str
    target: str
    stage: Stage
    status: CheckStatus
    cause: tuple[str, ...] = ()
    next: str = ""
    backends: tuple[BackendSpec, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.dist} {self.version}".rstrip()


@dataclass(frozen=True)
class BackendRecord:
    """A declared backend. With ``problems`` (unmet requirements, a key claimed twice) it is listed but not used."""

    spec: BackendSpec
    dist: str
    version: str
    problems: tuple[str, ...] = ()
    next: str = ""

    @property
    def label(self) -> str:
        return f"{self.dist} {self.version}".rstrip()


class PluginSet:
    """The plugins of this environment after stage 3. Hooks are called one plugin at a time, so none loses another's.

    Args:
        records: the backends, where another interpreter has found them (:mod:`rlctl.interpreters`); there, what is installed
            here has no say.
    """

    def __init__(
        self,
        entries: Iterable[PluginEntry] = (),
        manager: pluggy.PluginManager | None = None,
        loaded: Sequence[tuple[str, object]] = (),
        records: Sequence[BackendRecord] | None = None,
    ) -> None:
        self.entries = tuple(entries)
        self._manager = manager or new_manager()
        self._loaded = tuple(loaded)
        self._reported: set[tuple[str, str]] = set()
        self._backends = backend_records(self.entries) if records is None else list(records)

    def backends(self) -> list[BackendRecord]:
        """Every declared backend, the unusable ones with their problems."""
        return list(self._backends)

    def failures(self) -> list[PluginEntry]:
        """The plugins that do not work here."""
        return [e for e in self.entries if e.status is CheckStatus.FAIL]

    def warnings(self) -> list[str]:
        """One line for each plugin that does not work, as ``train`` says once before it starts."""
        return [
            f"plugin {e.name!r} of {e.label} is left out ({e.stage}): {e.cause[-1] if e.cause else 'no cause given'}. "
            f"Next: {e.next or f'rlctl doctor {e.name}'}"
            for e in self.failures()
        ]

    def records(self, hook: str) -> list[tuple[str, Any]]:
        """(dist name, record) for every record that the plugins return from a discovery hook."""
        return self._collect(hook, RECORD_HOOKS[hook])

    def engine_wrappers(self, backend: str, role: str) -> list[tuple[str, tuple[str, str]]]:
        """(dist name, (wrapper name, ``module:Class``)) of the wrappers for an engine about to be built."""
        return self._collect("rlctl_engine_wrappers", tuple, backend=backend, role=role)

    def prepare_process(self, backend: str, config: Mapping[str, Any], dist: str | None = None) -> None:
        """Run the owner's ``rlctl_prepare_process`` before the libraries of ``backend`` are imported.

        Args:
            dist: the owner, where two dists answer one backend name on different devices.

        Raises:
            BaseException: whatever the hook raises; :func:`rlctl.registry.create_engine` is the boundary.
        """
        owners = {r.dist for r in self._backends if r.spec.name == backend and dist in (None, r.dist)}
        for owner, plugin in self._loaded:
            if owner in owners:
                others = {p for p in self._manager.get_plugins() if p is not plugin}
                caller = self._manager.subset_hook_caller("rlctl_prepare_process", others)
                caller(backend=backend, config=config)

    def _collect(self, hook: str, kind: type, **arguments: Any) -> list[tuple[str, Any]]:
        pairs: list[tuple[str, Any]] = []
        for dist, plugin in self._loaded:
            result = guarded(lambda p=plugin: records_of(self._manager, p, hook, kind, **arguments))
            if isinstance(result, BaseException):
                if (dist, hook) not in self._reported:
                    self._reported.add((dist, hook))
                    logger.warning("%s of %s failed and is left out: %s", hook, dist, cause_chain(result)[-1].line)
                continue
            pairs += [(dist, record) for record in result]
        return pairs


def load_plugins() -> PluginSet:
    """Run stages 1 to 3. Never raises for a plugin's fault: the entry says what is wrong."""
    manager = new_manager()
    entries: list[PluginEntry] = []
    loaded: list[tuple[str, object]] = []
    candidates, refused = stage_one()
    vetoed = vetting.vet(candidates)
    for candidate in candidates:
        if candidate in vetoed:
            causes = vetting.outcome_causes(vetoed[candidate], vetting.TIMEOUT_S)
            mend = (vetoed[candidate].result or {}).get("next")
            entries.append(declaration_failed(candidate, causes, mend))
            continue
        result = guarded(lambda c=candidate: declare(c, manager))
        if isinstance(result, Declared):
            entries.append(stage_three(candidate, result.backends, result.output))
            loaded.append((candidate.dist, result.plugin))
        else:
            entries.append(declaration_failed(candidate, cause_chain(result), remedy_of(result)))
    return PluginSet(sorted((*refused, *entries), key=lambda e: (e.name, e.dist)), manager, loaded)


def stage_one() -> tuple[list[Candidate], list[PluginEntry]]:
    """Candidates that may be imported, and the entries of those that may not (disabled, or one name claimed twice)."""
    disabled = disabled_names()
    found = discover()
    refused = [
        _entry(
            c, Stage.DISCOVERED, CheckStatus.SKIP, ("disabled by RLCTL_DISABLE_PLUGINS",), "unset RLCTL_DISABLE_PLUGINS"
        )
        for c in found
        if is_disabled(c, disabled)
    ]
    enabled = [c for c in found if not is_disabled(c, disabled)]
    twice = {c for claims in claimed_twice(enabled).values() for c in claims}
    for claims in claimed_twice(enabled).values():
        who = " and ".join(f"{c.label} ({c.target})" for c in claims)
        dists = list(dict.fromkeys(c.dist for c in claims))
        refused += [
            _entry(
                c,
                Stage.DISCOVERED,
                CheckStatus.FAIL,
                (f"the plugin name {c.name!r} is claimed by {who}",),
                " or ".join(f"pip uninstall {d}" for d in dists)
                if len(dists) > 1
                else f"pip install --force-reinstall {dists[0]}",
            )
            for c in claims
        ]
    return [c for c in enabled if c not in twice], refused


def declaration_failed(candidate: Candidate, causes: Sequence[Cause], mend: str | None = None) -> PluginEntry:
    """The entry of a plugin whose light module did not get through stage 2."""
    return _entry(
        candidate,
        Stage.DECLARED,
        CheckStatus.FAIL,
        tuple(c.line for c in causes),
        mend or remedy.for_light_module(candidate, causes),
    )


def stage_three(candidate: Candidate, backends: tuple[BackendSpec, ...], output: str = "") -> PluginEntry:
    """The entry of a declared plugin, its requirements compared with what is installed."""
    problems = [(spec, unmet_requirements(spec.requirements)) for spec in backends]
    lines = tuple(f"backend {spec.name!r}: {u.problem}" for spec, unmet in problems for u in unmet)
    if lines:
        remedies = {name: words for spec in backends for name, words in spec.remedies.items()}
        mend = remedy.for_requirements([u for _, unmet in problems for u in unmet], remedies)
        away = [absent_device(spec) for spec, unmet in problems if unmet]
        # What cannot run here anyway is no fault of this environment.
        status = CheckStatus.SKIP if all(away) else CheckStatus.FAIL
        entry = _entry(candidate, Stage.COMPATIBLE, status, (*lines, *dict.fromkeys(filter(None, away))), mend)
    elif output.strip():
        entry = _entry(
            candidate, Stage.COMPATIBLE, CheckStatus.WARN, (remedy.chatter(output),), remedy.upgrade(candidate)
        )
    else:
        entry = _entry(candidate, Stage.COMPATIBLE, CheckStatus.OK)
    return replace(entry, backends=backends)


def backend_records(entries: Iterable[PluginEntry]) -> list[BackendRecord]:
    """The backends of ``entries`` with what keeps each from being used, double claims included."""
    owned = [(e, s) for e in entries for s in e.backends]
    conflicts = _key_conflicts(owned)
    records: list[BackendRecord] = []
    for entry, spec in owned:
        unmet = unmet_requirements(spec.requirements)
        problems = tuple(u.problem for u in unmet)
        mend = remedy.for_requirements(unmet, spec.remedies) if unmet else ""
        for key, dists in conflicts.items():
            if key[1] == spec.name and entry.dist in dists:
                both = " and ".join(dists)
                problems += (f"(model_type, backend, device, vendor) = {key} is claimed by {both}",)
                mend = " or ".join(f"pip uninstall {d}" for d in dict.fromkeys(dists))
                break
        records.append(BackendRecord(spec, entry.dist, entry.version, problems, mend))
    return records


def absent_device(spec: BackendSpec) -> str:
    """Words for a backend none of whose devices is in sight on this machine; empty for any other."""
    kinds = list(dict.fromkeys(device for device, _ in spec.devices))
    if not kinds or any(in_sight(kind) for kind in kinds):
        return ""
    return f"it runs on {' and '.join(kinds)} only, and this machine shows none (RLCTL_DEVICE={kinds[0]} looks anyway)"


Key = tuple[str, str, str, str | None]


def _key_conflicts(owned: Sequence[tuple[PluginEntry, BackendSpec]]) -> dict[Key, tuple[str, ...]]:
    claims: dict[Key, list[tuple[str, str]]] = {}
    for entry, spec in owned:
        for model_type in spec.model_types:
            for device, vendor in spec.devices:
                claims.setdefault((str(model_type), spec.name, device, vendor), []).append((entry.dist, str(spec.kind)))
    # One dist may answer a name both as a training and as a rollout backend; two dists may not share a key at all.
    return {
        key: tuple(dict.fromkeys(d for d, _ in owners)) if len({d for d, _ in owners}) > 1 else (owners[0][0],) * 2
        for key, owners in claims.items()
        if len({d for d, _ in owners}) > 1 or len(set(owners)) < len(owners)
    }


def remedy_of(error: BaseException) -> str | None:
    """The ``next`` of one of our own errors, which knows better than a rule."""
    return error.next if isinstance(error, PluginError) else None


def _entry(
    candidate: Candidate, stage: Stage, status: CheckStatus, cause: tuple[str, ...] = (), mend: str = ""
) -> PluginEntry:
    return PluginEntry(candidate.name, candidate.dist, candidate.version, candidate.target, stage, status, cause, mend)
