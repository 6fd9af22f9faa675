"""A link across two pools, over which one training rank sends weights to all ranks of a rollout pool.

Rank 0 is the sender, the others are the receivers. Buckets (:mod:`rlctl.runtime.packed`) travel by a carrier
(:mod:`rlctl.runtime.carriers`): a collective in a process group that is none of the pools' own, or memory that all see. Their
headers go through the store at which the ranks met, so a receiver knows what comes before it takes part, and either side can
call the rest off in words:

- a receiver whose engine fails says so in the store and takes the buckets that are under way without looking at them; the
  sender sees that before its next bucket and calls off, and all others end with what was said;
- a sender that fails calls off in place of the next header.

So nobody is left in a broadcast by an error, and the group stays usable. Who dies breaks it: on the CPU the others' calls
fail at once, on a GPU by the time limit, or when the controller, which sees the death, ends them.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from rlctl.runtime import link_wait, meeting
from rlctl.runtime.carriers import Carrier, Collective, CudaIpc, SharedMemory
from rlctl.runtime.failures import PeerFailedError
from rlctl.runtime.packed import Header, Packer, Unpacker
from rlctl.runtime.phases import beat
from rlctl.runtime.transfer import LinkEnd

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_LOOK_S = 0.002
"""How often a receiver that works on one bucket looks whether the next one is coming."""
_WORDS = "words"
"""Before every key: the collective library keeps its own in the same store."""
_END, _OFF, _BUCKET = "end", "off", "bucket"


class PackedLink:
    """See the module, and :class:`rlctl.runtime.transfer.WeightLink`. Making it is collective over its ranks.

    Raises:
        RuntimeError: the others did not come within the time limit.
    """

    carried_by: Callable[[TCPStore, LinkEnd], Carrier] = Collective

    def __init__(self, end: LinkEnd) -> None:
        self._end = end
        timeout = datetime.timedelta(seconds=end.timeout_s)
        store = meeting.tcp_store(end.url, end.rank, end.size, timeout)
        # A connection of its own: one that waits for words would keep the collective library from the store.
        self._words = meeting.tcp_store(end.url, max(1, end.rank), end.size, timeout)
        self._store = store
        self.carrier = type(self).carried_by(store, end)
        self._buckets = self.carrier.buckets
        self._round: _Round | None = None
        self._said: list[str] = []
        self.peak_bytes = 0
        """The most bytes that the last sync held here: buckets, and one tensor."""

    # ---- the sender -------------------------------------------------------------------------------------------
    def send(self, weights: Iterator[tuple[str, torch.Tensor]], number: int) -> None:
        """Send all of ``weights`` to every receiver. The next bucket is packed while one travels.

        Args:
            number: of the sync, another one each time.

        Raises:
            PeerFailedError: a receiver said that it failed; the others have been told.
            BaseException: what ``weights`` raised; the receivers have been told.
            RuntimeError: a receiver is gone, or took too long.
        """
        assert self._end.rank == 0, "rank 0 sends"
        round_ = _Round(number)
        self._forget(number)
        self.carrier.begin(number)
        packer = Packer(weights, self._buckets)
        travelling: Any = None
        try:
            for header, data in packer:
                before, travelling = travelling, None
                if not self.carrier.in_place:
                    self.carrier.wait(before)
                self._look_for_failures(number)
                self.carrier.written()
                self._say(round_.key(), _BUCKET, header.to_json())
                current = self.carrier.broadcast(round_.key(), data)
                round_.bucket += 1
                if self.carrier.in_place:
                    # The receivers know of this one while they read the one before it, whose buffer is packed next.
                    self.carrier.wait(before)
                travelling = current
                beat(bucket=round_.bucket)
            before, travelling = travelling, None
            self.carrier.wait(before)
        except BaseException as error:
            # What travels must arrive first: the receivers look at words between buckets only. Who waited for it in vain
            # does not wait again.
            with contextlib.suppress(RuntimeError):
                self.carrier.wait(travelling)
                self._say(round_.key(), _OFF, _words_of(error, self._end.who))
            raise
        self.peak_bytes = packer.peak_bytes
        self._buckets.free()
        self._say(round_.key(), _END, "")

    def _look_for_failures(self, number: int) -> None:
        if self._words.check([_failed(number)]):
            raise PeerFailedError(link_wait.for_words(self._words, _failed(number), self._end.timeout_s).decode())

    def _say(self, key: str, kind: str, text: str) -> None:
        self._words.set(key, json.dumps([kind, text]))
        self._said.append(key)

    def _forget(self, number: int) -> None:
        """Delete from the store what the sync before this one said. Its receivers have ended it: this one began."""
        for key in self._said:
            self._words.delete_key(key)
        self._said = [_failed(number)]

    # ---- a receiver -------------------------------------------------------------------------------------------
    def receive(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """What the sender sends. A tensor is good until the next one is asked for.

        Raises:
            PeerFailedError: the sender, or by it another receiver, said that it failed.
            GuardError: a tensor did not arrive whole.
            RuntimeError: the sender is gone, or took too long.
        """
        assert self._end.rank > 0, "rank 0 sends"
        self._round = round_ = _Round(number)
        self.carrier.begin(number)
        unpacker = Unpacker(self._end.device, views=self.carrier.in_place)
        looked = time.monotonic()
        while (bucket := self._next_bucket(round_)) is not None:
            beat(bucket=round_.taken)
            for named in unpacker.unpack(*bucket):
                yield named
                if round_.coming is None and time.monotonic() - looked > _LOOK_S:
                    looked = time.monotonic()
                    if self._words.check([round_.key()]):
                        self._post(round_)
            self.carrier.taken(round_.key(round_.taken - 1))
            self.peak_bytes = self._buckets.num_bytes + unpacker.largest
        self._buckets.free()
        unpacker.finish()

    def give_up(self, words: str) -> None:
        """After an error of this receiver, or of its engine: tell the others, and let what is under way arrive.

        Nothing to do where the sync has ended, here or for all. Never raises: the error that led here is the one to tell.
        """
        round_, self._round = self._round, None
        if round_ is None or round_.over:
            return
        with contextlib.suppress(RuntimeError):  # called off, as wanted; or nobody is left to hear it
            self._words.set(_failed(round_.number), f"{self._end.who}: {words}")
            if round_.taken:  # the one in which it failed
                self.carrier.taken(round_.key(round_.taken - 1))
            while self._next_bucket(round_) is not None:
                self.carrier.taken(round_.key(round_.taken - 1))
        self._buckets.free()

    def _next_bucket(self, round_: _Round) -> tuple[Header, torch.Tensor] | None:
        """The next bucket, once it is here; None at the end."""
        try:
            if round_.coming is None and not round_.over:
                self._post(round_)
            if round_.off is not None:
                raise PeerFailedError(round_.off)
            coming, round_.coming = round_.coming, None
            if coming is None:
                return None
            header, data, work = coming
            self.carrier.wait(work)
        except BaseException:
            round_.over = True  # by words, or because nobody is there
            raise
        round_.taken += 1
        return header, data

    def _post(self, round_: _Round) -> None:
        """Read the next words and, where a bucket comes, take part in its broadcast."""
        kind, text = json.loads(link_wait.for_words(self._words, round_.key(), self._end.timeout_s))
        round_.over = kind != _BUCKET
        if kind == _OFF:
            round_.off = text
        elif kind == _BUCKET:
            header = Header.from_json(text)
            data = self._buckets.get(round_.bucket)[: header.size]
            round_.coming = header, data, self.carrier.broadcast(round_.key(), data)
            round_.bucket += 1

    # ---- both -------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Leave; not collective."""
        self.carrier.close()
        del self._words, self._store


class SharedMemoryLink(PackedLink):
    """Between processes of one host, through memory that all of them map."""

    carried_by = SharedMemory


class CudaIpcLink(PackedLink):
    """Between processes on one GPU, through memory that all of them open."""

    carried_by = CudaIpc


class _Round:
    """How far one sync has come at one end."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.bucket = 0
        """The next one to send, or to take part in."""
        self.taken = 0
        self.coming: tuple[Header, torch.Tensor, Any] | None = None
        self.over = False
        self.off: str | None = None
        """Why the rest was called off."""

    def key(self, bucket: int | None = None) -> str:
        """Where the words about a bucket are; by default about the next one."""
        return f"{_WORDS}/{self.number}/{self.bucket if bucket is None else bucket}"


def _failed(number: int) -> str:
    return f"{_WORDS}/{number}/failed"


def _words_of(error: BaseException, who: str) -> str:
    if isinstance(error, PeerFailedError):
        return str(error)
    return f"{who}: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
