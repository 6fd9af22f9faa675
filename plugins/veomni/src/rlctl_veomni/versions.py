"""Which VeOmni this backend was proved with. Reads metadata, imports nothing of it."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

PROVED = "0.1.12"
"""The version that the tests run with, and the only one that is accepted: stand-ins and weights reach into its insides."""


def installed() -> Version | None:
    """The installed veomni; None without one."""
    try:
        return Version(metadata.version("veomni"))
    except metadata.PackageNotFoundError:
        return None


def is_proved(version: Version) -> bool:
    """Whether the tests ran with this version."""
    return version.release[:3] == Version(PROVED).release[:3]
