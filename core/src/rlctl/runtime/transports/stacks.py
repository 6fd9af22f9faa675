"""Stacks of a rank that hangs, as ``faulthandler`` writes them, cut to what tells something."""

from __future__ import annotations

import re

_HEAD = re.compile(r"(Current thread|Thread) 0x")
_OWN = re.compile(r"worker_main\.py\", line \d+ in _read$")
_FRAMES = 24


def tidy(text: str) -> str:
    """The thread that runs the calls first, our own reader left out, and so is whatever else was printed meanwhile."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if _HEAD.match(line):
            blocks.append([line])
        elif blocks and line.startswith("  "):
            blocks[-1].append(line)
    blocks = [b for b in blocks if not any(_OWN.search(line) for line in b)]
    blocks.sort(key=lambda b: not b[0].startswith("Current thread"))
    return "\n".join(line for block in blocks for line in _cut(block))


def _cut(block: list[str]) -> list[str]:
    left = len(block) - 1 - _FRAMES
    return block if left <= 0 else [*block[: 1 + _FRAMES], f"  ... {left} more"]
