"""Stacks of a rank that hangs, as ``faulthandler`` writes them, cut to what tells something."""

from __future__ import annotations

import re

_BLOCK = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
_OWN = re.compile(r"worker_main\.py\", line \d+ in _read$", re.MULTILINE)
_FRAMES = 24


def tidy(text: str) -> str:
    """The thread that runs the calls first and our own reader left out; each stack down to where calls are served."""
    blocks = [b.strip("\n") for b in _BLOCK.split(text) if b.strip() and not _OWN.search(b)]
    blocks.sort(key=lambda b: not b.startswith("Current thread"))
    lines: list[str] = []
    for block in blocks:
        head, *frames = block.splitlines()
        shown = frames[:_FRAMES]
        lines += [head, *shown]
        if len(frames) > len(shown):
            lines.append(f"  ... {len(frames) - len(shown)} more")
    return "\n".join(lines)
