"""Frames between a controller and one rank over a socket of the same host.

A frame is a header (bytes) and tensors. From 64 KiB on its body lies in anonymous shared memory whose descriptor travels
with the frame: it is written once, whoever and however many receive it, and mapped there copy-on-write, so nothing is
copied again and nobody sees another's changes. The memory has no name; it is gone with its last user, however that ended.

Body: table (JSON: dtype and shape of each tensor), header, then each tensor at a multiple of 64 bytes.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import struct
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlctl.errors import RlctlError

if TYPE_CHECKING:
    import torch

SHARED_FROM = 64 * 1024
"""Bodies of this many bytes or more travel in shared memory."""

_PREFIX = struct.Struct("<4sIQQQ")  # magic, 1 if the body is shared memory, bytes of table, header, body
_MAGIC = b"rlc1"
_ALIGN = 64
_CHUNK = 1 << 18
_FD_SPACE = socket.CMSG_SPACE(16 * struct.calcsize("i"))
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_WRITE_MAX = 1 << 30


class _Descriptor:
    """Owns a file descriptor."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


@dataclass(frozen=True)
class Parcel:
    """A frame ready to be sent, any number of times: ``inline`` bytes, and the shared memory behind it if there is any."""

    inline: bytes
    shared: _Descriptor | None = None


@dataclass(frozen=True)
class Layout:
    """Where the pieces of a body lie in it: (offset, bytes), in order. Between them may be gaps of zeros."""

    table_size: int
    header_size: int
    size: int
    pieces: Sequence[tuple[int, Any]]

    def write_to(self, body: Any) -> None:
        """Copy the pieces to where they belong in a writable buffer of ``size`` bytes."""
        view = memoryview(body)
        for start, piece in self.pieces:
            view[start : start + len(piece)] = piece


def lay_out(header: bytes, tensors: Sequence[torch.Tensor] = ()) -> Layout:
    """The body of a frame, before anything is copied.

    Args:
        tensors: contiguous, on the CPU. They must live until the body is written.
    """
    table = (
        json.dumps([[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]).encode() if tensors else b""
    )
    offset = len(table) + len(header)
    pieces: list[tuple[int, Any]] = [(0, table), (len(table), header)]
    for tensor in tensors:
        if size := tensor.numel() * tensor.element_size():
            offset = _aligned(offset)
            # The view is of the tensor's own memory: ``tensors`` keeps it until the body is written.
            pieces.append((offset, memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")))
            offset += size
    return Layout(len(table), len(header), offset, pieces)


def pack(header: bytes, tensors: Sequence[torch.Tensor] = ()) -> Parcel:
    """Make a frame.

    Args:
        tensors: contiguous, on the CPU.
    """
    return parcel(lay_out(header, tensors))


def parcel(layout: Layout) -> Parcel:
    """A frame with this body."""
    sizes = layout.table_size, layout.header_size, layout.size
    if layout.size < SHARED_FROM:
        body = bytearray(layout.size)
        layout.write_to(body)
        return Parcel(_PREFIX.pack(_MAGIC, 0, *sizes) + body)
    shared = _Descriptor(anonymous_file(layout.size))
    for start, piece in layout.pieces:
        view = memoryview(piece)
        while view:
            written = os.pwrite(shared.number, view[:_WRITE_MAX], start)
            view, start = view[written:], start + written
    _seal(shared.number)
    return Parcel(_PREFIX.pack(_MAGIC, 1, *sizes), shared)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def anonymous_file(size: int, name: str = "rlctl") -> int:
    """A descriptor of ``size`` zero bytes without a name in any file system that others see. The caller closes it."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        number, path = tempfile.mkstemp(prefix=f"{name}_")
        os.unlink(path)
    os.ftruncate(number, size)
    return number


def _seal(number: int) -> None:
    """Nobody may change what was sent. (An unlinked file has no seals; there it is a promise.)"""
    if hasattr(os, "memfd_create"):
        import fcntl

        fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)


@dataclass(frozen=True)
class Frame:
    """A frame that arrived."""

    body: bytearray | mmap.mmap
    table_size: int
    header_size: int

    def open(self) -> tuple[bytes, list[torch.Tensor]]:
        """(header, tensors). The tensors are writable, lie in the frame's own memory and keep it alive."""
        start = self.table_size + self.header_size
        header = bytes(self.body[self.table_size : start])
        if not self.table_size:
            return header, []
        import torch

        tensors: list[torch.Tensor] = []
        for name, shape in json.loads(self.body[: self.table_size]):
            dtype = getattr(torch, name, None)
            if not isinstance(dtype, torch.dtype):
                raise RlctlError(
                    "a tensor arrived whose dtype this torch has not",
                    found=f"{name}, and torch {torch.__version__}",
                    wanted="a dtype that the torch of both environments has",
                )
            size = dtype.itemsize
            for length in shape:
                size *= length
            if not size:
                tensors.append(torch.empty(shape, dtype=dtype))
                continue
            start = _aligned(start)
            flat = torch.frombuffer(self.body, dtype=torch.uint8, count=size, offset=start)
            tensors.append(flat.view(dtype).view(shape))
            start += size
        return header, tensors


class FrameReader:
    """Puts frames together from what arrives on a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self._arrived: deque[_Descriptor] = deque()
        self.closed = False
        """True when the other side has closed its end, or is gone."""

    def read(self) -> list[Frame]:
        """One receive, and the frames that it completes. Waits only where the socket is a blocking one."""
        try:
            data, extra, _, _ = self._socket.recvmsg(_CHUNK, _FD_SPACE, _CLOEXEC)
        except BlockingIOError:
            return []
        except ConnectionError:
            data, extra = b"", []
        for level, kind, content in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                count = len(content) // struct.calcsize("i")
                numbers = struct.unpack(f"{count}i", content[: count * struct.calcsize("i")])
                self._arrived.extend(map(_Descriptor, numbers))
        if not data:
            self.closed = True
            return []
        self._buffer += data
        frames: list[Frame] = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def drain(self) -> list[Frame]:
        """Every frame that is here already; the socket must not be a blocking one."""
        frames: list[Frame] = []
        while not self.closed:
            before = len(self._buffer)
            found = self.read()
            frames += found
            if not found and len(self._buffer) == before:
                break
        return frames

    def _next(self) -> Frame | None:
        if len(self._buffer) < _PREFIX.size:
            return None
        magic, is_shared, table, header, body = _PREFIX.unpack_from(self._buffer)
        assert magic == _MAGIC, f"no frame starts with {magic!r}"
        if is_shared:
            del self._buffer[: _PREFIX.size]
            # The mapping is made while the descriptor is held; afterwards it lives by itself.
            descriptor = self._arrived.popleft()
            mapped = _map_private(descriptor.number, body)
            del descriptor
            return Frame(mapped, table, header)
        if len(self._buffer) < _PREFIX.size + body:
            return None
        content = self._buffer[_PREFIX.size : _PREFIX.size + body]
        del self._buffer[: _PREFIX.size + body]
        return Frame(content, table, header)


def _map_private(number: int, size: int) -> mmap.mmap:
    options: dict[str, Any] = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
    if sys.version_info >= (3, 13):
        options["trackfd"] = False  # else every live message costs a descriptor
    return mmap.mmap(number, size, **options)


class FrameWriter:
    """Sends frames over a socket. Over one that does not block, what does not go out at once waits for :meth:`flush`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._waiting: deque[tuple[memoryview, _Descriptor | None]] = deque()

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    def send(self, parcel: Parcel) -> None:
        """Queue a frame and send what the socket takes.

        Raises:
            ConnectionError: the other side is gone.
        """
        self._waiting.append((memoryview(parcel.inline), parcel.shared))
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes.

        Raises:
            ConnectionError: the other side is gone.
        """
        while self._waiting:
            data, shared = self._waiting[0]
            rights = [] if shared is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", shared.number))]
            try:
                # The descriptor goes with the first byte; whatever is left after that is bytes alone.
                sent = self._socket.sendmsg([data], rights)
            except BlockingIOError:
                return
            if sent < len(data):
                self._waiting[0] = (data[sent:], None)
            else:
                self._waiting.popleft()
