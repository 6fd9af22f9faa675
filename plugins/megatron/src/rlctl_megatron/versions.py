"""Which megatron-core this backend was proved with, and what differs between the versions that it accepts."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

PROVED = "0.16.1"
"""The version that the tests run with. Later ones need Python 3.12 and were only looked at."""


def installed() -> Version | None:
    """The installed megatron-core; None without one. Reads metadata, imports nothing."""
    try:
        return Version(metadata.version("megatron-core"))
    except metadata.PackageNotFoundError:
        return None


def is_proved(version: Version) -> bool:
    return version.release[:3] == Version(PROVED).release[:3]
