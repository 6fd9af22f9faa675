"""Where this user's own files live, outside of any run."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_dir() -> Path:
    """Files that can be made again: ``RLCTL_CACHE_DIR``, else ``rlctl`` below the XDG cache directory. Not created."""
    return _directory("RLCTL_CACHE_DIR", "XDG_CACHE_HOME", ".cache")


def user_data_dir() -> Path:
    """Files worth keeping, such as evidence: ``RLCTL_DATA_DIR``, else ``rlctl`` below the XDG data directory. Not created."""
    return _directory("RLCTL_DATA_DIR", "XDG_DATA_HOME", ".local/share")


def _directory(own: str, xdg: str, default: str) -> Path:
    if os.environ.get(own):
        return Path(os.environ[own]).expanduser()
    base = os.environ.get(xdg)
    return (Path(base) if base else Path.home() / default) / "rlctl"
