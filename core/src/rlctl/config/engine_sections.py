"""A role's backend and its ``engine`` section: which record a name reaches, and the section against the backend's config model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from rlctl import catalogue
from rlctl.causes import cause_chain
from rlctl.config.check import UnknownKey, check
from rlctl.config.document import Document, Loc, dotted
from rlctl.config.problems import Problem
from rlctl.config.suggest import for_key, nearest
from rlctl.declare import guarded, load_object
from rlctl.errors import RlctlError
from rlctl.records import BackendKind, BackendSpec

if TYPE_CHECKING:
    from rlctl.plugins import BackendRecord, PluginSet

ROLE_KINDS: dict[str, tuple[BackendKind, ...]] = {
    "actor": (BackendKind.TRAIN,),
    "ref": (BackendKind.TRAIN,),
    "critic": (BackendKind.TRAIN,),
    # A training engine that never trains, or a rollout engine that scores given tokens.
    "teacher": (BackendKind.TRAIN, BackendKind.ROLLOUT),
    "rollout": (BackendKind.ROLLOUT,),
}
"""The kinds of backends that a role may have; where a name is of two kinds, the first."""


def find_of_role(plugins: PluginSet, role: str, name: str, device: str | None = None) -> BackendRecord | None:
    """The record that ``name`` reaches for a role."""
    found = (find_backend(plugins, name, kind, device) for kind in ROLE_KINDS[role])
    return next((record for record in found if record is not None), None)


def kind_of_role(plugins: PluginSet, role: str, name: str) -> BackendKind:
    """The kind of backend that ``name`` is for a role: that of one that is there, else of one that is known, else the usual one."""
    record = find_of_role(plugins, role, name)
    if record is not None:
        return record.spec.kind
    kinds = ROLE_KINDS[role]
    return next((kind for kind in kinds if catalogue.find(name, kind) is not None), kinds[0])


def find_backend(plugins: PluginSet, name: str, kind: BackendKind, device: str | None = None) -> BackendRecord | None:
    """The record that ``name`` (or an alias) reaches; with two owners of one name, the one that answers ``device``."""
    found = [
        record
        for record in plugins.backends()
        if record.spec.kind is kind and (record.spec.name == name or name in record.spec.aliases)
    ]
    found.sort(key=lambda record: device is None or device not in {d for d, _ in record.spec.devices})
    return found[0] if found else None


def config_model(spec: BackendSpec) -> type[BaseModel]:
    """Import the config model of a backend.

    Raises:
        RlctlError: it cannot be imported or is no config model; the plugin is at fault, and named.
    """
    model = guarded(lambda: load_object(spec.config))
    if isinstance(model, BaseException):
        raise RlctlError(
            f"the config model of backend {spec.name!r} cannot be imported",
            found=f"{spec.config}: {cause_chain(model)[-1].line}",
            wanted="a pydantic model that imports without the backend's libraries",
            next=f"rlctl doctor {spec.name}",
        ) from model
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise RlctlError(
            f"the config model of backend {spec.name!r} is not one",
            found=f"{spec.config} is a {type(model).__name__}",
            wanted="a pydantic model",
            next=f"rlctl doctor {spec.name}",
        )
    return model


def checked_section(
    document: Document, role: str, spec: BackendSpec, plugins: PluginSet
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """A role's ``engine`` section against the config model of its backend, which is one of ``plugins``.

    Returns:
        The complete section (None when there is any problem), and the problems.

    Raises:
        RlctlError: the model cannot be imported, or fails in a way that says nothing about the section.
    """
    loc: Loc = (role, "engine")
    model = config_model(spec)

    def hint(place: Loc, key: str) -> tuple[str, list[str]]:
        return _leftover(place, key, role, spec, plugins, {role: model})

    checked = guarded(lambda: _checked(model, document, loc, hint))
    if isinstance(checked, BaseException):
        # A validator of the plugin's own has failed.
        raise RlctlError(
            f"the config model of backend {spec.name!r} failed",
            found=cause_chain(checked)[-1].line,
            wanted="a model that takes or refuses the section",
            next=f"rlctl doctor {spec.name}",
        ) from checked
    return checked


def _checked(
    model: type[BaseModel], document: Document, loc: Loc, hint: UnknownKey
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """The complete section as plain data (None when there is any problem), and the problems."""
    value, problems = check(model, document, prefix=loc, unknown=hint)
    return (None if value is None else value.model_dump(mode="json")), problems


def _leftover(
    place: Loc, key: str, role: str, spec: BackendSpec, plugins: PluginSet, engines: dict[str, type[BaseModel]]
) -> tuple[str, list[str]]:
    """A hint for a key that the chosen backend does not know: a near name, another backend's, or a key of core."""
    model = engines[role]
    near = nearest(key, model.model_fields, 0.75) if len(place) == 2 else None
    if near:
        path = dotted((*place, near))
        return f"did you mean {path}?", [path]
    owners = []
    for record in plugins.backends():
        if record.spec.name == spec.name and record.spec.kind is spec.kind:
            continue
        try:
            known = config_model(record.spec).model_fields
        except RlctlError:
            continue  # only a hint: another backend's fault is not this run's matter
        if key in known:
            owners.append(record.spec.name)
    if owners:
        names = " and ".join(dict.fromkeys(owners))
        return f"it is a key of {names}, and {role}.backend is {spec.name}: remove it, or change the backend", []
    if not model.model_fields:
        return f"the backend {spec.name} has no settings: remove it", []
    return for_key(place, key, engines)
