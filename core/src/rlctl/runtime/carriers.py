"""How the bytes of a bucket get from the sender of a link to its receivers; :mod:`rlctl.runtime.link` has the words around it.

A *collective* carries them: gloo's broadcast between CPUs, NCCL's between GPUs. Or all ends see the same two buffers, which a
sync makes and gives back: memory without a name that processes of a host map (:class:`SharedMemory`), or memory of one GPU
whose handle its other processes open (:class:`CudaIpc`). Then a bucket has arrived when it has been written, and a buffer is
free when every receiver has said that it has read it.
"""

from __future__ import annotations

import datetime
import json
import mmap
import os
import secrets
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import torch

from rlctl import device as devices
from rlctl.runtime import link_wait
from rlctl.runtime.failures import PeerFailedError
from rlctl.runtime.packed import Buckets

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from rlctl.runtime.transfer import LinkEnd

_COOKIE = 16
_PAGE = mmap.PAGESIZE


class Carrier(Protocol):
    """One end's share of the carrying. ``key`` names a bucket, the same at all ends and never twice."""

    @property
    def buckets(self) -> Buckets:
        """What is carried, from and to."""
        ...

    @property
    def in_place(self) -> bool:
        """True where a receiver reads a bucket where the sender wrote it."""
        ...

    def begin(self, number: int) -> None:
        """The ``number``-th sync begins."""
        ...

    def written(self) -> None:
        """On the sender, before the others are told of a bucket: what was written into it can be read."""
        ...

    def broadcast(self, key: str, data: torch.Tensor) -> Any:
        """Begin to carry ``data``; every end calls it. Returns what :meth:`wait` takes, None where nothing is to be waited for."""
        ...

    def wait(self, work: Any) -> None:
        """On the sender: until the bucket's buffer may be written again. On a receiver: until the bucket is here.

        Raises:
            PeerFailedError: it took too long.
            RuntimeError: a rank is gone.
        """
        ...

    def taken(self, key: str) -> None:
        """On a receiver: it has read the bucket."""
        ...

    def close(self) -> None:
        """Leave; not collective."""
        ...


class Collective:
    """Broadcast in a process group of the link's own. Making it is collective."""

    in_place = False

    def __init__(self, store: TCPStore, end: LinkEnd) -> None:
        self.buckets = Buckets(end.bucket_bytes, end.device)
        self._timeout = datetime.timedelta(seconds=end.timeout_s)
        self._on_device = torch.device(end.device).type != "cpu"
        self._group = _process_group(store, end, self._timeout)

    def begin(self, number: int) -> None:
        """Nothing: the group is there."""

    def written(self) -> None:
        """Nothing: the collective itself follows what was written."""

    def broadcast(self, key: str, data: torch.Tensor) -> Any:
        """See :class:`Carrier`."""
        from torch._C._distributed_c10d import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        return self._group.broadcast([data], options) if data.numel() else None

    def wait(self, work: Any) -> None:
        """See :class:`Carrier`."""
        if work is not None:
            link_wait.for_work(work, self._timeout.total_seconds(), on_device=self._on_device)

    def taken(self, key: str) -> None:
        """Nothing: a receiver has buffers of its own."""

    def close(self) -> None:
        """See :class:`Carrier`."""
        if self._on_device:
            self._group.abort()  # what may still be in there waits for somebody who is gone
        del self._group


class SharedBuffers:
    """A carrier whose ends see the same buffers. Subclasses say how those are made, told of and opened.

    Args:
        words: where the ends talk to each other.
    """

    in_place = True
    kind: type[_SharedBuckets]

    def __init__(self, words: TCPStore, end: LinkEnd) -> None:
        self.buckets = self.kind(words, end)
        self._words, self._end = words, end

    def begin(self, number: int) -> None:
        """See :class:`Carrier`."""
        self.buckets.free()  # those of a sync that broke off
        self.buckets.key = f"buffers/{number}"

    def written(self) -> None:
        """See :class:`Carrier`."""
        devices.synchronize(self._end.device)

    def broadcast(self, key: str, data: torch.Tensor) -> Any:
        """See :class:`Carrier`."""
        return key

    def wait(self, work: Any) -> None:
        """See :class:`Carrier`."""
        if work is None or self._end.rank > 0:
            return
        for rank in range(1, self._end.size):
            said = f"{work}/taken/{rank}"
            link_wait.for_words(self._words, said, self._end.timeout_s)
            self._words.delete_key(said)

    def taken(self, key: str) -> None:
        """See :class:`Carrier`."""
        devices.synchronize(self._end.device)
        self._words.set(f"{key}/taken/{self._end.rank}", "1")

    def close(self) -> None:
        """See :class:`Carrier`."""
        self.buckets.free()


class _SharedBuckets(Buckets, ABC):
    """Both buffers of one sync: made by the sender when the first is asked for, opened by the receivers."""

    def __init__(self, words: TCPStore, end: LinkEnd) -> None:
        super().__init__(end.bucket_bytes, end.device)
        self.key = ""
        self._words, self._end = words, end
        self._said = ""

    def get(self, number: int) -> torch.Tensor:
        """See :class:`rlctl.runtime.packed.Buckets`."""
        if not self._buffers:
            if self._end.rank == 0:
                self._buffers, told = self._make()
                self._words.set(self.key, json.dumps(told))
                self._said = self.key
            else:
                told = json.loads(link_wait.for_words(self._words, self.key, self._end.timeout_s))
                self._buffers = self._open(told)
        return self._buffers[number % 2]

    def free(self) -> None:
        """See :class:`rlctl.runtime.packed.Buckets`. The memory itself goes when the last end has called it."""
        if self._said:
            self._words.delete_key(self._said)
            self._said = ""
        super().free()

    @abstractmethod
    def _make(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """On the sender: two buffers ``[size] uint8``, and what the others must know of them, as JSON data."""

    @abstractmethod
    def _open(self, told: dict[str, Any]) -> list[torch.Tensor]:
        """On a receiver: the same buffers."""


class _MappedBuckets(_SharedBuckets):
    """Memory of the host without a name: a file that only the processes which map it keep.

    Receivers find it among the sender's open files in ``/proc``, which the kernel shows to processes of the same user; a random
    word at its beginning tells it from whatever else has that number.
    """

    def _make(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        number = os.memfd_create("rlctl-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(number, _PAGE + 2 * self.size)
            whole = mmap.mmap(number, _PAGE + 2 * self.size)
            cookie = secrets.token_bytes(_COOKIE)
            whole[:_COOKIE] = cookie
        except BaseException:
            os.close(number)
            raise
        # It stays open until the receivers have it: until the buffers are given back.
        self._file = number
        return self._views(whole), {"pid": os.getpid(), "file": number, "cookie": cookie.hex()}

    def _open(self, told: dict[str, Any]) -> list[torch.Tensor]:
        path = Path(f"/proc/{told['pid']}/fd/{told['file']}")
        try:
            with path.open("r+b") as file:
                whole = mmap.mmap(file.fileno(), _PAGE + 2 * self.size)
        except (OSError, ValueError) as error:
            raise PeerFailedError(
                f"{self._end.who} cannot map the sender's memory ({error}): set runtime.weight_transport=collective"
            ) from error
        if whole[:_COOKIE].hex() != told["cookie"]:
            raise PeerFailedError(f"{self._end.who} found other memory than the sender's at {path}")
        return self._views(whole)

    def _views(self, whole: mmap.mmap) -> list[torch.Tensor]:
        # The tensors keep the mapping: it ends with the last of them.
        content = torch.frombuffer(whole, dtype=torch.uint8)
        return [content[_PAGE + at * self.size :][: self.size] for at in range(2)]

    def free(self) -> None:
        """See :class:`_SharedBuckets`."""
        super().free()
        if (number := getattr(self, "_file", None)) is not None:
            os.close(number)
            self._file = None


class _IpcBuckets(_SharedBuckets):
    """Memory of one GPU, opened in its other processes through the CUDA runtime's handles (``cudaIpcGetMemHandle``)."""

    def _make(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        devices.collect_shared(self._end.device)  # what the receivers of the sync before this one have given back
        buffers = [torch.empty(self.size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return buffers, {"handles": [_plain(buffer.untyped_storage()._share_cuda_()) for buffer in buffers]}

    def _open(self, told: dict[str, Any]) -> list[torch.Tensor]:
        index = self.device.index
        buffers: list[torch.Tensor] = []
        with devices.current(self._end.device):
            for handle in told["handles"]:
                # The first is the sender's number of the device, which may be another one here.
                storage = torch.UntypedStorage._new_shared_cuda(index, *_unplain(handle)[1:])
                buffers.append(torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)[: self.size])
        return buffers


class SharedMemory(SharedBuffers):
    """Between processes of one host, on the CPU."""

    kind = _MappedBuckets


class CudaIpc(SharedBuffers):
    """Between processes on one GPU."""

    kind = _IpcBuckets


def _plain(values: tuple[Any, ...]) -> list[Any]:
    return [{"hex": v.hex()} if isinstance(v, bytes) else v for v in values]


def _unplain(values: list[Any]) -> list[Any]:
    return [bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for v in values]


def _process_group(store: Any, end: LinkEnd, timeout: datetime.timedelta) -> Any:
    """The group itself, a backend's object: the process's default group is its pool's."""
    from torch._C._distributed_c10d import PrefixStore

    store = PrefixStore("group", store)
    device = torch.device(end.device)
    if device.type == "cuda":
        from torch._C._distributed_c10d import ProcessGroupNCCL

        devices.set_device(device.type, device.index)
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, end.rank, end.size, options)
    from torch._C._distributed_c10d import ProcessGroupGloo

    address = urlsplit(end.url).hostname or ""
    if not address.startswith("127."):
        return ProcessGroupGloo(store, end.rank, end.size, timeout=timeout)
    options: Any = getattr(ProcessGroupGloo, "_Options")()  # noqa: B009  (its stubs leave it out)
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return ProcessGroupGloo(store, end.rank, end.size, options)
