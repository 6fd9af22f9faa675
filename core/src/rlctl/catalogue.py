"""What is known of backends that may not be installed: ours, and the rest of the field.

``plan``, ``doctor``, ``capabilities`` and error messages read it, so that they can speak of what could be installed and
of what refuses an axis. The records of released plugins are generated from the plugins themselves
(``first_party.json``; a test keeps them equal); the others are in :mod:`rlctl.catalogue_field`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources

from rlctl import __version__
from rlctl.codec import spec_from_json
from rlctl.records import BackendKind, BackendSpec

DATA_FILE = "first_party.json"


class PluginState(StrEnum):
    """Whether a plugin of ours exists for a backend."""

    RELEASED = "released"
    PLANNED = "planned"
    NOT_BUILT = "not_built"


@dataclass(frozen=True)
class CatalogueEntry:
    """A known backend.

    Args:
        spec: its record. Of one that is not released, the engine target and config are empty.
        dist: the distribution that carries its plugin, or will; None when none is planned.
        state: whether that distribution exists.
    """

    spec: BackendSpec
    dist: str | None
    state: PluginState

    @property
    def install(self) -> str:
        """The command that brings it, or the next best step where there is none."""
        if self.state is PluginState.NOT_BUILT:
            return "rlctl capabilities shows what other backends offer; docs/write-a-plugin.md shows how to add one"
        return self.spec.install_hint

    @property
    def note(self) -> str:
        """A sentence for a user who asked for it, or empty when the install command says everything."""
        if self.state is PluginState.PLANNED:
            return f"{self.dist} is not released with rlctl {__version__} yet; its command works from the release that brings it"
        if self.state is PluginState.NOT_BUILT:
            return f"{self.spec.name} is known, but no rlctl plugin for it is built"
        return ""


@cache
def entries() -> tuple[CatalogueEntry, ...]:
    """Every known backend: released ones first, in the order of the files."""
    from rlctl.catalogue_field import field_entries

    text = resources.files("rlctl").joinpath(DATA_FILE).read_text(encoding="utf-8")
    data = json.loads(text)["backends"]
    ours = [CatalogueEntry(spec_from_json(d["spec"]), d["dist"], PluginState.RELEASED) for d in data]
    planned = [CatalogueEntry(spec, dist, PluginState.PLANNED) for spec, dist in field_entries() if dist]
    others = [CatalogueEntry(spec, None, PluginState.NOT_BUILT) for spec, dist in field_entries() if not dist]
    return (*ours, *planned, *others)


def find(name: str, kind: BackendKind | None = None) -> CatalogueEntry | None:
    """The entry of a backend name or alias; exact names before aliases."""
    known = [e for e in entries() if kind is None or e.spec.kind is kind]
    exact = [e for e in known if e.spec.name == name]
    return next(iter(exact or [e for e in known if name in e.spec.aliases]), None)


def installable(kind: BackendKind | None = None) -> list[CatalogueEntry]:
    """Backends with a plugin of ours, released or planned, one entry a name."""
    first: dict[str, CatalogueEntry] = {}
    for entry in entries():
        if entry.state is not PluginState.NOT_BUILT and (kind is None or entry.spec.kind is kind):
            first.setdefault(entry.spec.name, entry)
    return list(first.values())


def cell_lines() -> list[str]:
    """The matrix of the field as text, one cell a line: backend, state, head, place, axis, support, constraint, reason.

    A test compares it with a committed file, so that no cell changes unseen.
    """
    out: list[str] = []
    for entry in entries():
        for cell in entry.spec.capabilities:
            place = cell.device if cell.vendor is None else f"{cell.device}/{cell.vendor}"
            rule = f" [{cell.constraint}]" if cell.constraint else ""
            key = f"{entry.spec.name} {entry.state} {cell.model_type} {place} {cell.axis}"
            out.append(f"{key}: {cell.support}{rule}: {cell.reason}")
    return out


def dump(owned: Iterable[tuple[str, BackendSpec]]) -> str:
    """The text of ``first_party.json`` for (dist, record) pairs: one capability a line, so that a diff can be read."""
    from rlctl.codec import spec_to_json

    lines = ["{", ' "backends": [']
    blocks: list[str] = []
    for dist, spec in owned:
        data = spec_to_json(spec)
        cells = data.pop("capabilities")
        body = [f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in data.items()]
        body.append('   "capabilities": [\n' + ",\n".join(f"    {json.dumps(c)}" for c in cells) + "\n   ]")
        blocks.append(f'  {{"dist": {json.dumps(dist)}, "spec": {{\n' + ",\n".join(body) + "\n  }}")
    return "\n".join([*lines, ",\n".join(blocks), " ]", "}", ""])
