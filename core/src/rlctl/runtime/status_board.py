"""The newest status of one rank, in memory that controller and rank share: readable while the rank hangs in native code
and after it died, killed in the middle of writing included.

Two slots take turns, each with a checksum: a torn one is seen, and the one before it still stands.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib

from rlctl.runtime.channel import anonymous_file
from rlctl.runtime.phases import Status

_SLOT = 4096
_SIZE = 2 * _SLOT
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode  # json.dumps makes one anew each time
_HEAD = struct.Struct("<IIQ")  # checksum of what follows it, bytes of text, number of the status


class StatusBoard:
    """One side of a board.

    Args:
        descriptor: of the board's memory, from :func:`new_board`; it may be closed afterwards.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._number = 0

    def write(self, status: Status) -> None:
        """Put a status up. One process writes; a few microseconds."""
        text = encode_status(status)
        if len(text) > _SLOT - _HEAD.size:  # numbers are short: only a long text can do that
            text = encode_status(Status(status.phase[:200], {}, status.beats, status.since))
        self._number += 1
        head = _HEAD.pack(0, len(text), self._number)[4:]
        start = _SLOT * (self._number % 2)
        checksum = zlib.crc32(text, zlib.crc32(head))
        self._memory[start : start + _HEAD.size + len(text)] = checksum.to_bytes(4, "little") + head + text

    def read(self) -> Status | None:
        """The newest whole status; None before the first."""
        found = [slot for slot in (self._slot(0), self._slot(_SLOT)) if slot is not None]
        return decode_status(max(found)[1]) if found else None

    def _slot(self, start: int) -> tuple[int, bytes] | None:
        content = self._memory[start : start + _SLOT]
        checksum, size, number = _HEAD.unpack_from(content)
        body = content[4 : _HEAD.size + size]
        if number == 0 or size > _SLOT - _HEAD.size or zlib.crc32(body) != checksum:
            return None
        return number, body[_HEAD.size - 4 :]

    def close(self) -> None:
        self._memory.close()


def new_board() -> int:
    """A descriptor of a new board's memory, which has no name anywhere. The caller closes it."""
    return anonymous_file(_SIZE, "rlctl_status")


def encode_status(status: Status) -> bytes:
    """A status as JSON."""
    return _to_json([status.phase, dict(status.detail), status.beats, status.since]).encode()


def decode_status(text: bytes) -> Status:
    """The inverse of :func:`encode_status`."""
    return Status(*json.loads(text))


def open_board(descriptor: int) -> StatusBoard:
    """The rank's side of a board that it was started with."""
    board = StatusBoard(descriptor)
    os.close(descriptor)
    return board
