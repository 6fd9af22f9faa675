"""The Ray actor of one rank. It starts the rank's process, hands frames on in both directions without reading them, and
knows how the rank does and how it ended.

The rank is a process of its own, the same as in :mod:`rlctl.runtime.transports.process`: calls run in its main thread, a
crash in native code takes only itself, and the actor still answers while the rank hangs with the interpreter's lock held.
It cannot outlive the actor: the system kills it with its parent, and the end of their socket ends it too.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.interpreters.program import Program
from rlctl.interrupts import STOP_SIGNALS
from rlctl.runtime import launch, meeting, wire
from rlctl.runtime.channel import Frame, Layout, parcel
from rlctl.runtime.launch import Launch
from rlctl.runtime.processes import kill_group, kill_marked
from rlctl.runtime.records import Event
from rlctl.runtime.status_board import encode_status
from rlctl.runtime.transports.process import RankProcess
from rlctl.runtime.transports.stacks import tidy

SAID, ENDED = "said", "ended"
"""What an answer of :meth:`RankActor.listen` begins with: a frame of the rank, or how it ended."""
CONCURRENCY = {"listen": "listen", "look": "look", "stacks": "look", "end": "look"}
"""Method -> its group of one thread. The others have a thread too, and so an order."""
_EVENT = f'"{Event.__module__}:{Event.__qualname__}"'.encode()
_GATHER_S = 0.05
_POLL_S = 0.1
_STACKS_S = 3.0


@dataclass(frozen=True)
class RankSpec:
    """What an actor is made from.

    Args:
        launch: for the rank; its boot has no store yet.
        marker: see :data:`rlctl.runtime.launch.MARKER`; unique to the rank.
        log_dir: where the rank's output goes, where this node can write there.
        cwd: the controller's working directory, taken where this node has it.
        env: further variables for the rank.
        host_threads: the cores of this host are shared by its ranks; otherwise Ray's own share for the actor counts.
        program: another interpreter that the rank runs in.
    """

    launch: Launch
    marker: str
    log_dir: str | None
    cwd: str
    env: Mapping[str, str]
    host_threads: bool
    program: Program | None = None


class RankActor:
    """See the module. Frames, listening and looking have a thread each, see :data:`CONCURRENCY`.

    Args:
        spec: header of an encoded :class:`RankSpec`.
    """

    def __init__(self, spec: bytes) -> None:
        self._spec: RankSpec = wire.decode(spec, ())
        boot = self._spec.launch.boot
        with contextlib.suppress(OSError):
            os.chdir(self._spec.cwd)
        if self._spec.host_threads and "OMP_NUM_THREADS" not in self._spec.env:
            os.environ.pop("OMP_NUM_THREADS", None)
        self._address = _node_address()
        boot = replace(boot, local_rank=_device_index(boot.device, boot.local_rank), address=self._address)
        self._boot = replace(boot, num_threads=launch.threads(boot))
        self._scratch = tempfile.TemporaryDirectory(prefix=f"rlctl_ranks_{boot.pool}_{boot.rank}_")
        self._holder: socket.socket | None = None
        self._outbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._answers = 0
        self._answer: list[tuple[Any, ...]] = []
        self._gone = threading.Event()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # see rlctl.runtime.ray_host; a rank inherits the mask
        log = _log_path(self._spec.log_dir, self._scratch.name, boot.rank)
        env, marker, program = self._environment(), self._spec.marker, self._spec.program
        self._rank = RankProcess(self._boot, log, self._scratch.name, marker, env, program)
        threading.Thread(target=self._watch, name="rlctl-watch", daemon=True).start()

    def _environment(self) -> dict[str, str]:
        """Collectives go over the interface that has this node's address, unless the user says else."""
        name = meeting.interface_of(self._address)
        found = {} if name is None else dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), name)
        return {**{k: v for k, v in found.items() if k not in os.environ}, **self._spec.env}

    def meeting_place(self) -> str:
        """Where the group meets, on this node's address. Asked of rank 0's actor."""
        self._holder, url = meeting.reserve(self._address)
        return url

    def begin(self, store: str) -> None:
        """Tell the rank what it is; it answers calls from here on."""
        told = replace(self._spec.launch, boot=replace(self._boot, store=store))
        header, _ = wire.encode(told, told.allowed)
        self.send(0, len(header), header)

    # ---- frames -----------------------------------------------------------------------------------------------
    def send(self, table_size: int, header_size: int, body: Any) -> None:
        """Hand a frame to the rank. ``body`` is bytes, or (size, [(offset, array of bytes), ...])."""
        size, pieces = body if isinstance(body, tuple) else (len(body), [(0, body)])
        frame = parcel(Layout(table_size, header_size, size, [(start, memoryview(piece)) for start, piece in pieces]))
        rank = self._rank
        with contextlib.suppress(OSError, ValueError):  # it is gone, which is told where it is listened to
            rank.writer.send(frame)
            with selectors.DefaultSelector() as selector:
                selector.register(rank.socket, selectors.EVENT_WRITE)
                while rank.writer.pending and not self._gone.is_set():
                    selector.select(_POLL_S)
                    rank.writer.flush()

    def listen(self, number: int) -> list[tuple[Any, ...]]:
        """What has come from the rank since the last time; waits for it. Its end comes last.

        Events alone wait a moment for others to go with; anything else goes at once.

        Args:
            number: of this answer, from 0; the last one is given again where it got lost on its way.
        """
        if number != self._answers - 1:
            assert number == self._answers, (number, self._answers)
            self._answer = self._gather()
            self._answers += 1
        return self._answer

    def _gather(self) -> list[tuple[Any, ...]]:
        found = [self._outbox.get()]
        until = time.monotonic() + _GATHER_S
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    found.append(self._outbox.get_nowait())
            left = until - time.monotonic()
            if left <= 0 or not all(_is_event(item) for item in found):
                return found
            with contextlib.suppress(queue.Empty):
                found.append(self._outbox.get(timeout=left))

    def _watch(self) -> None:
        """In a thread: what the rank says, then how it ended."""
        rank = self._rank
        with selectors.DefaultSelector() as selector:
            selector.register(rank.socket, selectors.EVENT_READ)
            if rank.pidfd is not None:
                selector.register(rank.pidfd, selectors.EVENT_READ)
            while not rank.has_ended():
                ready = selector.select(None if rank.pidfd is not None else _POLL_S)
                if any(key.fileobj is rank.socket for key, _ in ready):
                    self._put(rank.reader.read())
                    if rank.reader.closed:
                        selector.unregister(rank.socket)
        self._put(rank.reader.drain())
        self._gone.set()
        output = rank.output()
        cause = rank.end()
        kill_marked(self._spec.marker)
        last = rank.status
        self._outbox.put((ENDED, cause, output, None if last is None else encode_status(last)))

    def _put(self, frames: list[Frame]) -> None:
        for frame in frames:
            self._outbox.put((SAID, frame.table_size, frame.header_size, _as_array(frame.body)))

    # ---- looking in -------------------------------------------------------------------------------------------
    def look(self) -> bytes | None:
        """The rank's newest status, encoded."""
        try:
            status = self._rank.status
        except ValueError:  # it ended, and its board was put away, just now
            status = self._rank.status
        return None if status is None else encode_status(status)

    def stacks(self) -> str:
        """The rank's Python stacks; empty where they cannot be had within a few seconds."""
        rank = self._rank
        # Without a status a rank is too young to have a handler: the signal would end it.
        if self._gone.is_set() or rank.status is None:
            return ""
        with contextlib.suppress(OSError):  # it ended meanwhile
            begun = size = rank.stack_size()
            os.kill(rank.process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + _STACKS_S
            while time.monotonic() < deadline:
                time.sleep(_POLL_S)
                now = rank.stack_size()
                if now == size and now > begun:
                    return tidy(rank.read_stack(begun))
                size = now
        return ""

    def end(self) -> None:
        """End the rank now, with all that it started; returns when it is gone."""
        if not self._gone.is_set():
            kill_group(self._rank.process.pid)
        self._gone.wait(_STACKS_S)
        kill_marked(self._spec.marker)
        if self._holder is not None:
            self._holder.close()
        self._scratch.cleanup()


def _is_event(item: tuple[Any, ...]) -> bool:
    return item[0] == SAID and _EVENT in bytes(item[3][item[1] : item[1] + item[2]])


def _as_array(body: Any) -> Any:
    import numpy

    return numpy.frombuffer(body, dtype=numpy.uint8)


def _log_path(wanted: str | None, scratch: str, rank: int) -> Path:
    """The log where the user wants it, if this node can write there."""
    name = f"rank_{rank}.log"
    if wanted is not None:
        with contextlib.suppress(OSError):
            Path(wanted).mkdir(parents=True, exist_ok=True)
            path = Path(wanted) / name
            path.touch()
            return path
    return Path(scratch) / name


def _node_address() -> str:
    import ray

    return ray.util.get_node_ip_address()


def _device_index(device: str, local_rank: int) -> int:
    """Which of the devices that this process sees is the rank's: the first, as Ray shows an actor its own only; the one
    that Ray assigned where it was told to leave visibility alone. On a CPU the local rank."""
    from rlctl.runtime.ray_resources import ACCELERATORS

    if device not in ACCELERATORS:
        return local_rank
    import ray

    ids = ray.get_runtime_context().get_accelerator_ids().get(ACCELERATORS[device], [])
    hidden = os.environ.get("ASCEND_RT_VISIBLE_DEVICES" if device == "npu" else "CUDA_VISIBLE_DEVICES", "")
    visible = [name for name in hidden.split(",") if name]
    if not ids:
        return local_rank
    if visible:
        return visible.index(ids[0]) if ids[0] in visible else 0
    return int(ids[0]) if ids[0].isdigit() else 0
