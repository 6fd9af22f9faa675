"""Which processes can map one another's memory. Imports no torch: doctor asks too."""

from __future__ import annotations

import os
from pathlib import Path


def room() -> str:
    """What processes have in common that can map one another's memory: host, its processes' numbers, and user; empty where none can."""
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = os.stat("/proc/self/ns/pid").st_ino
        Path(f"/proc/{os.getpid()}/fd").stat()
    except OSError:
        return ""
    return f"{boot}/{numbers}/{os.getuid()}"
