"""What became of an actor that does not answer any more, from what Ray says about it. Texts of Ray 2.50 to 2.60."""

from __future__ import annotations

import re

from rlctl.runtime.phases import Status
from rlctl.runtime.records import Death

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NODE_ID = re.compile(r"Node Id: \w+")
_DETAIL = re.compile(r"Worker exit detail:|The actor (is dead|died) because")
_LOW_MEMORY = re.compile(r"killed due to the node running low on memory\.? ?")
_WORDS = 300


def death_of(rank: int, error: BaseException, status: Status | None, *, node_lives: bool) -> Death:
    """The death of an actor whose call ended in ``error``.

    Args:
        status: of its rank, as it was seen last.
        node_lives: its node is among those that answer.
    """
    text = _COLOURS.sub("", str(error))
    words = " ".join(text.split())
    if "creation task" in words:  # with a traceback of the node's own
        last = text.rstrip().splitlines()[-1].strip()
        return Death(rank, f"its Ray actor could not be made: {last}", text, status)
    if _LOW_MEMORY.search(words):
        cause = f"Ray ended it for want of memory on its node: {_after(text.splitlines()[0], _LOW_MEMORY)}"
        return Death(rank, cause, text.partition("Refer to the documentation")[0], status)
    if "node has died" in words or not node_lives:
        return Death(rank, f"its node is gone; Ray says: {_after(words, _NODE_ID)}", status=status)
    return Death(rank, f"its Ray actor is gone: {_ending(words)}", status=status)


def unreachable(rank: int, error: BaseException, status: Status | None, limit_s: float) -> Death:
    """The death of an actor that nobody knows to be dead, but that has not been reached for ``limit_s``."""
    words = " ".join(_COLOURS.sub("", str(error)).split())[:_WORDS]
    return Death(rank, f"its node cannot be reached for {limit_s:.0f} s; Ray says: {words}", status=status)


def _after(words: str, sign: re.Pattern[str]) -> str:
    """What stands behind ``sign``; before it there are names and numbers."""
    found = sign.search(words)
    return (words[found.end() :] if found else words).strip()[:_WORDS]


def _ending(words: str) -> str:
    detail = _after(words, _DETAIL)
    if "connection error code 2" in detail or "End of file" in detail:
        return "its process ended without a word, as one that SIGKILL ended"
    return detail
