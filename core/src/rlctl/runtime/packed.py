"""Named tensors as a row of byte buckets of one size, and back.

A tensor begins at a multiple of :data:`ALIGN` bytes, fills what is left of its bucket, and goes on in the next ones, so a
bucket is never sent half empty and a tensor may be larger than many of them. Each bucket has a header that says what is in
it. Neither side holds more than two buckets and one tensor: one bucket travels while the other is filled or read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import torch

from rlctl.errors import GuardError

ALIGN = 16
"""Bytes; the size of the largest element of any dtype."""


@dataclass(frozen=True)
class Piece:
    """A run of bytes of one tensor within a bucket.

    Args:
        dtype: as torch names it, without ``torch.``.
        start: the first of the tensor's bytes that are here.
        offset, size: where they lie in the bucket, in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    offset: int
    size: int


@dataclass(frozen=True)
class Header:
    """What one bucket holds: its bytes in use, and the pieces in order."""

    size: int
    pieces: tuple[Piece, ...]

    def to_json(self) -> str:
        return json.dumps([self.size, [astuple(p) for p in self.pieces]], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Header:
        size, pieces = json.loads(text)
        return cls(size, tuple(Piece(n, d, tuple(shape), *rest) for n, d, shape, *rest in pieces))


class Buckets:
    """Two byte buffers on one device, made when they are needed and used over again.

    Args:
        size: bytes of each, rounded up to a multiple of :data:`ALIGN`.
    """

    def __init__(self, size: int, device: torch.device | str) -> None:
        self.size = _aligned(max(size, ALIGN))
        self.device = torch.device(device)
        self._buffers: list[torch.Tensor] = []

    def get(self, number: int) -> torch.Tensor:
        """The buffer of the ``number``-th bucket ``[size] uint8``; it is that of the bucket two before it, too."""
        at = number % 2
        while len(self._buffers) <= at:
            self._buffers.append(torch.empty(self.size, dtype=torch.uint8, device=self.device))
        return self._buffers[at]

    def free(self) -> None:
        """Give the memory back; what comes next makes new buffers."""
        self._buffers.clear()

    @property
    def num_bytes(self) -> int:
        """What the buffers take."""
        return len(self._buffers) * self.size


class Packer:
    """The sending side: iterate for (header, bytes of the bucket in use).

    A bucket's bytes stay as they are until the one after the next is asked for.

    Args:
        weights: (name, tensor), on any device.
    """

    def __init__(self, weights: Iterator[tuple[str, torch.Tensor]], buckets: Buckets) -> None:
        self._weights = weights
        self._buckets = buckets
        self.num_bytes = 0
        """Of all tensors so far."""
        self.largest = 0
        """Bytes of the largest tensor so far."""

    @property
    def peak_bytes(self) -> int:
        """The most that was held at a time: buckets, and one tensor."""
        return self._buckets.num_bytes + self.largest

    def __iter__(self) -> Iterator[tuple[Header, torch.Tensor]]:
        number = at = 0
        pieces: list[Piece] = []
        for name, tensor in self._weights:
            content = _bytes_of(name, tensor)
            total = content.numel()
            self.num_bytes += total
            self.largest = max(self.largest, total)
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            start, at = 0, _aligned(at)
            while True:
                take = min(self._buckets.size - at, total - start)
                if take or not total:
                    self._buckets.get(number)[at : at + take].copy_(content[start : start + take])
                    pieces.append(Piece(name, dtype, shape, start, at, take))
                start, at = start + take, at + take
                if start == total:
                    break
                yield Header(at, tuple(pieces)), self._buckets.get(number)[:at]
                number, at, pieces = number + 1, 0, []
        if pieces:
            yield Header(at, tuple(pieces)), self._buckets.get(number)[:at]


class Unpacker:
    """The receiving side: the tensors, in the order in which they were packed.

    Args:
        device: where to make them.
        views: give out one that lies whole in its bucket as it lies there, without a copy: it is good until the next is asked for.
    """

    def __init__(self, device: torch.device | str, *, views: bool = False) -> None:
        self._device = torch.device(device)
        self._views = views
        self._open: tuple[str, str, torch.Tensor, torch.Tensor] | None = None
        self._filled = 0
        self.largest = 0
        """Bytes of the largest tensor so far."""

    def unpack(self, header: Header, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that end in this bucket.

        Args:
            data: the bucket's bytes ``[>= header.size] uint8``. They may be overwritten once this has ended.

        Raises:
            GuardError: the pieces do not follow one another, or do not fit their tensor; it is named.
        """
        for piece in header.pieces:
            if self._views and (view := self._view(piece, header.size, data)) is not None:
                yield piece.name, view
                continue
            name, _, tensor, content = self._take(piece)
            end = piece.start + piece.size
            if piece.start != self._filled or end > content.numel() or piece.offset + piece.size > header.size:
                raise _broken(
                    name,
                    f"bytes {piece.start} to {end} of {content.numel()}, after {self._filled} of them",
                    "its bytes in order, each once",
                )
            content[piece.start : end].copy_(data[piece.offset : piece.offset + piece.size])
            self._filled = end
            if end == content.numel():
                self._open, self._filled = None, 0
                del content
                yield name, tensor
                del tensor  # while the next one is made, this one is the consumer's alone

    def _view(self, piece: Piece, size: int, data: torch.Tensor) -> torch.Tensor | None:
        """The tensor of ``piece`` within the bucket; None where it is not all there."""
        dtype = getattr(torch, piece.dtype, None)
        if self._open is not None or not isinstance(dtype, torch.dtype):
            return None
        whole = piece.start == 0 and piece.size == math.prod(piece.shape) * dtype.itemsize > 0
        if not whole or piece.offset + piece.size > size:
            return None
        return data[piece.offset : piece.offset + piece.size].view(dtype).reshape(piece.shape)

    def finish(self) -> None:
        """There are no more buckets.

        Raises:
            GuardError: a tensor is not whole.
        """
        if self._open is not None:
            name, _, _, content = self._open
            raise _broken(name, f"{self._filled} of {content.numel()} bytes, then the end", "the whole tensor")

    def _take(self, piece: Piece) -> tuple[str, str, torch.Tensor, torch.Tensor]:
        key = f"{piece.dtype} {piece.shape}"
        if self._open is None:
            dtype = getattr(torch, piece.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise _broken(piece.name, f"dtype {piece.dtype}", "a dtype that this torch has")
            tensor = torch.empty(piece.shape, dtype=dtype, device=self._device)
            content = _bytes_of(piece.name, tensor)
            self.largest = max(self.largest, content.numel())
            self._open = (piece.name, key, tensor, content)
        elif self._open[:2] != (piece.name, key):
            name, kind, _, content = self._open
            raise _broken(
                name,
                f"{self._filled} of {content.numel()} bytes ({kind}), then {piece.name} ({key})",
                "the whole tensor",
            )
        return self._open


def _bytes_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The content of a tensor ``[num_bytes] uint8``, shared with it where it is contiguous."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_quantized
    if not plain or tensor.layout is not torch.strided or tensor.is_meta:
        raise GuardError(
            f"weight {name!r} cannot be sent",
            found=f"a {type(tensor).__name__} ({tensor.layout}, on {tensor.device})",
            wanted="a dense tensor with values of its own",
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _aligned(at: int) -> int:
    return -(-at // ALIGN) * ALIGN


def _broken(name: str, found: str, wanted: str) -> GuardError:
    return GuardError(f"weight {name!r} did not arrive whole", found=found, wanted=wanted)
