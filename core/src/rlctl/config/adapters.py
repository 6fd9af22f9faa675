"""``model.lora`` against the backend of the role that would train the adapters, before anything is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl import catalogue
from rlctl.config.document import Document, Loc, dotted
from rlctl.config.problems import Problem
from rlctl.records import BackendSpec

if TYPE_CHECKING:
    from rlctl.plugins import PluginSet

_PLACES: dict[str, Loc] = {"actor": ("model", "lora"), "critic": ("critic", "model", "lora")}
"""Roles that are trained, and where their adapters are asked for."""


def adapter_problems(document: Document, role: str, spec: BackendSpec, plugins: PluginSet) -> list[Problem]:
    """Adapters that the backend of ``role`` does not train, with those that do."""
    loc = _PLACES.get(role)
    if loc is None or spec.lora or document.get(loc) is None:
        return []
    known = {s.name: s for s in (*(e.spec for e in catalogue.entries()), *(r.spec for r in plugins.backends()))}
    able = sorted(name for name, s in known.items() if s.lora)
    installed = [record.spec.name for record in plugins.backends() if record.spec.name in able]
    instead = (
        f"set {role}.backend={(installed or able)[0]}" + ("" if installed else "; install it first") if able else ""
    )
    return [
        Problem(
            dotted(loc),
            str(document.origin(loc)),
            f"{spec.name} trains no adapters",
            wanted=f"a backend that does: {', '.join(able)}" if able else "a backend that does; there is none",
            hint=f"{instead}, or take {dotted(loc)} out" if instead else f"take {dotted(loc)} out",
        )
    ]
