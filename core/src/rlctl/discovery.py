"""Stage 1: what the installed distributions say of themselves. Reads metadata, imports nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.utils import canonicalize_name

from rlctl.hookspecs import ENTRY_POINT_GROUP

DISABLE = "RLCTL_DISABLE_PLUGINS"
"""Entry-point or dist names to leave out, comma separated; ``*`` leaves out every third-party plugin."""

FIRST_PARTY_DISTS = frozenset(
    {
        "rlctl",
        "rlctl-core",
        "rlctl-plugin-fsdp",
        "rlctl-plugin-megatron",
        "rlctl-plugin-veomni",
        "rlctl-plugin-vllm",
        "rlctl-plugin-mindspeed",
    }
)


@dataclass(frozen=True)
class Candidate:
    """One entry point: ``name = target`` of ``dist`` ``version``."""

    name: str
    dist: str
    version: str
    target: str

    @property
    def first_party(self) -> bool:
        return canonicalize_name(self.dist) in FIRST_PARTY_DISTS

    @property
    def label(self) -> str:
        return f"{self.dist} {self.version}".rstrip()


def discover() -> list[Candidate]:
    """Every entry point of the group ``rlctl.plugins``, in order of name, disabled and conflicting ones included.

    A distribution that is shadowed by another of its name earlier on ``sys.path`` does not count, as in an import.
    """
    found: dict[tuple[str, str, str], Candidate] = {}
    for dist in metadata.distributions():
        for candidate in _of_dist(dist):
            found.setdefault((candidate.name, canonicalize_name(candidate.dist), candidate.target), candidate)
    return sorted(found.values(), key=lambda c: (c.name, c.dist, c.target))


def _of_dist(dist: metadata.Distribution) -> Iterator[Candidate]:
    try:
        points = [p for p in dist.entry_points if p.group == ENTRY_POINT_GROUP]
    except Exception:  # foreign metadata on disk may be broken in any way; without entry points it is no plugin
        return
    if not points:
        return
    name, version = _name_and_version(dist)
    if not _is_shadowed(dist, name):
        for point in points:
            yield Candidate(point.name, name, version, point.value)


def _name_and_version(dist: metadata.Distribution) -> tuple[str, str]:
    try:
        name, version = dist.metadata["Name"], dist.metadata["Version"]
    except Exception:  # as above: a dist with unreadable metadata is still listed, under the name of its directory
        name, version = None, None
    return name or f"(nameless dist in {dist.locate_file('')})", version or ""


def _is_shadowed(dist: metadata.Distribution, name: str) -> bool:
    try:
        return str(metadata.distribution(name).locate_file("")) != str(dist.locate_file(""))
    except (metadata.PackageNotFoundError, ValueError):
        return False


def disabled_names() -> frozenset[str]:
    """What ``RLCTL_DISABLE_PLUGINS`` names, normalised."""
    return frozenset(
        n.strip() if n.strip() == "*" else canonicalize_name(n.strip())
        for n in os.environ.get(DISABLE, "").split(",")
        if n.strip()
    )


def is_disabled(candidate: Candidate, disabled: Iterable[str]) -> bool:
    """True when the variable names its entry point or dist, or is ``*`` and the dist is no first-party one."""
    names = set(disabled)
    if {canonicalize_name(candidate.name), canonicalize_name(candidate.dist)} & names:
        return True
    return "*" in names and not candidate.first_party


def claimed_twice(candidates: Iterable[Candidate]) -> dict[str, tuple[Candidate, ...]]:
    """Entry-point names that more than one entry point claims, each with its claimants."""
    by_name: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_name.setdefault(canonicalize_name(candidate.name), []).append(candidate)
    return {name: tuple(claims) for name, claims in by_name.items() if len(claims) > 1}
