"""Which megatron-core this backend was proved with, and what differs between the versions that it accepts."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

PROVED = "0.16.1"
"""The version that the tests run with. Later ones need Python 3.12 and were only looked at."""

LEGACY = "0.12.1"
"""The version that MindSpeed patches on Ascend; the tests run it on a CPU too."""


def installed() -> Version | None:
    """The installed megatron-core; None without one. Reads metadata, imports nothing."""
    try:
        return Version(metadata.version("megatron-core"))
    except metadata.PackageNotFoundError:
        return None


def is_legacy(version: Version | None) -> bool:
    """Whether its names are those of :data:`LEGACY`; see :mod:`rlctl_megatron.compat`."""
    return version is not None and version < Version("0.13.dev0")


def is_proved(version: Version) -> bool:
    return version.release[:3] == Version(PROVED).release[:3]
