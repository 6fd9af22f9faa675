"""One process a rank on this host. Tensors travel through shared memory without a name; nothing is left behind by it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlctl import device as devices
from rlctl.errors import CapabilityError
from rlctl.interpreters.faults import no_python
from rlctl.interpreters.program import Program
from rlctl.interrupts import shielded
from rlctl.runtime import launch, wire
from rlctl.runtime.channel import FrameReader, FrameWriter, Parcel, pack
from rlctl.runtime.launch import Descriptors, Launch, Stop
from rlctl.runtime.phases import Status
from rlctl.runtime.processes import ending, kill_group, kill_marked
from rlctl.runtime.records import Boot, Call, Death, Message
from rlctl.runtime.status_board import StatusBoard, new_board
from rlctl.runtime.transports.stacks import tidy

WORKER = "rlctl.runtime.worker:Worker"
_TAIL_BYTES = 16 * 1024
_STACKS_S = 3.0
_BLIND_S = 0.1
"""How often to look for deaths where the system cannot signal them (no pidfd)."""


class ProcessTransport:
    """See :class:`rlctl.runtime.transports.base.Transport`.

    Args:
        log_dir: gets ``rank_N.log`` with what each rank prints; without it the logs are temporary, and only their end is
            shown when a rank dies.
        env: environment variables of the ranks, beside the controller's own.
        allowed: packages whose records may travel (see :mod:`rlctl.runtime.wire`).
        worker, plugins: see :class:`rlctl.runtime.launch.Launch`.
        program: another interpreter that the ranks run in.
    """

    name = "process"

    def __init__(
        self,
        log_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        allowed: Sequence[str] = wire.ALLOWED,
        *,
        worker: str = WORKER,
        plugins: bool = True,
        program: Program | None = None,
    ) -> None:
        self._log_dir = log_dir
        self._env = dict(env or {})
        self._allowed = tuple(allowed)
        self._worker = worker
        self._plugins = plugins
        self._program = program
        self._ranks: list[RankProcess] = []
        self._selector = selectors.DefaultSelector()
        self._marker = uuid.uuid4().hex
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    # ---- starting -------------------------------------------------------------------------------------------------
    def start(self, boots: Sequence[Boot]) -> None:
        _check_devices(boots)
        self._scratch = tempfile.TemporaryDirectory(prefix="rlctl_ranks_")
        logs = self._log_dir or Path(self._scratch.name)
        logs.mkdir(parents=True, exist_ok=True)
        store = f"file://{self._scratch.name}/store" if len(boots) > 1 else ""
        for boot in boots:
            full = replace(boot, store=store, num_threads=launch.threads(boot))
            log = logs / f"rank_{boot.rank}.log"
            rank = RankProcess(full, log, self._scratch.name, self._marker, self._env, self._program)
            self._ranks.append(rank)
            self._selector.register(rank.socket, selectors.EVENT_READ, rank)
            if rank.pidfd is not None:
                self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)
            self.send(boot.rank, self._parcel(Launch(full, self._worker, self._plugins, self._allowed)))

    # ---- messages -------------------------------------------------------------------------------------------------
    def pack(self, call: Call) -> Parcel:
        return self._parcel(call)

    def _parcel(self, message: Any) -> Parcel:
        return pack(*wire.encode(message, self._allowed))

    def send(self, rank: int, packed: Any) -> None:
        found = self._ranks[rank]
        if not found.gone:
            with contextlib.suppress(ConnectionError):  # its death will be told
                found.writer.send(packed)

    def receive(self, timeout_s: float) -> list[Message]:
        deadline = time.monotonic() + timeout_s
        blind = any(r.pidfd is None and not r.gone for r in self._ranks)
        while True:
            left = max(0.0, deadline - time.monotonic())
            messages = self._turn(min(left, _BLIND_S) if blind else left)
            if messages or time.monotonic() >= deadline:
                return messages

    def _turn(self, timeout_s: float) -> list[Message]:
        """One round of whatever is ready: what ranks say, what waits to be sent, who has ended."""
        for rank in self._ranks:
            if not rank.gone and not rank.reader.closed:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.writer.pending else 0)
                if self._selector.get_key(rank.socket).events != events:
                    self._selector.modify(rank.socket, events, rank)
        messages: list[Message] = []
        for key, events in self._selector.select(timeout_s):
            rank: RankProcess = key.data
            if key.fileobj is not rank.socket:
                continue
            if events & selectors.EVENT_WRITE:
                with contextlib.suppress(ConnectionError):
                    rank.writer.flush()
            if events & selectors.EVENT_READ:
                messages += self._decoded(rank.reader.read())
                if rank.reader.closed:
                    self._selector.unregister(rank.socket)  # it would be ready for ever
        for rank in self._ranks:
            if not rank.gone and rank.has_ended():
                messages += [*self._decoded(rank.reader.drain()), self._bury(rank)]
        return messages

    def _decoded(self, frames: Iterable[Any]) -> list[Message]:
        opened = [frame.open() for frame in frames]
        return [wire.decode(header, tensors, self._allowed) for header, tensors in opened]

    def _bury(self, rank: RankProcess) -> Death:
        """Take leave of a rank that has ended, and end what it started."""
        for handle in (rank.socket, rank.pidfd):
            with contextlib.suppress(KeyError, ValueError):
                if handle is not None:
                    self._selector.unregister(handle)
        cause = rank.end()
        said = rank.output().rstrip()
        if said and self._log_dir is not None:
            said += f"\n(all of it: {rank.log})"
        return Death(rank.number, cause, said, rank.status)

    # ---- looking in -----------------------------------------------------------------------------------------------
    def statuses(self) -> list[Status | None]:
        return [rank.status for rank in self._ranks]

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        # Without a status a rank is too young to have a handler: the signal would end it.
        asked = {r.number: r for r in self._ranks if r.number in ranks and not r.gone and r.status is not None}
        begun = {number: rank.stack_size() for number, rank in asked.items()}
        for rank in asked.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGUSR1)
        deadline, sizes = time.monotonic() + _STACKS_S, dict(begun)
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = {number: rank.stack_size() for number, rank in asked.items()}
            if now == sizes and all(now[n] > begun[n] for n in asked):
                break
            sizes = now
        return {n: tidy(rank.read_stack(begun[n])) for n, rank in asked.items() if rank.stack_size() > begun[n]}

    # ---- the end --------------------------------------------------------------------------------------------------
    def close(self, grace_s: float) -> None:
        try:
            if any(not r.gone for r in self._ranks):
                stop = self._parcel(Stop())
                for rank in self._ranks:
                    self.send(rank.number, stop)
                deadline = time.monotonic() + grace_s
                while any(not r.gone for r in self._ranks) and (left := deadline - time.monotonic()) > 0:
                    self._turn(min(left, _BLIND_S))
        finally:
            self.kill()

    def kill(self) -> None:
        # An impatient second Ctrl-C must not leave half of them.
        with shielded():
            for rank in self._ranks:
                if not rank.gone:
                    kill_group(rank.process.pid)
            for rank in self._ranks:
                if not rank.gone:
                    self._bury(rank)
            self._selector.close()
            if self._scratch is not None:
                kill_marked(self._marker)
                self._scratch.cleanup()
                self._scratch = None


class RankProcess:
    """The controller's view of one process.

    Raises:
        InterpreterError: another interpreter cannot be started.
    """

    def __init__(
        self,
        boot: Boot,
        log: Path,
        scratch: str,
        marker: str,
        env: Mapping[str, str],
        program: Program | None = None,
    ) -> None:
        self.number = boot.rank
        self.gone = False
        self.log = log
        self.socket, theirs = socket.socketpair()
        self.reader, self.writer = FrameReader(self.socket), FrameWriter(self.socket)
        board = new_board()
        self._board = StatusBoard(board)
        self._last: Status | None = None
        numbers = Descriptors(theirs.fileno(), board)
        try:
            with log.open("ab") as output:
                began = time.strftime("%Y-%m-%d %H:%M:%S")
                output.write(f"--- {began} rank {boot.rank} of {boot.world_size}, pool {boot.pool}\n".encode())
                output.flush()
                self._log_start = output.tell()
                self.process = _started(
                    program,
                    launch.command(boot, numbers, os.getpid(), scratch, program),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=launch.environment(boot, marker, env, program),
                    pass_fds=(numbers.socket, numbers.board),
                    # A session of its own: Ctrl-C in the terminal reaches the controller alone.
                    start_new_session=True,
                )
        finally:
            theirs.close()
            os.close(board)
        self.socket.setblocking(False)
        self.pidfd = os.pidfd_open(self.process.pid) if hasattr(os, "pidfd_open") else None

    def has_ended(self) -> bool:
        """True when the process has ended; it is still there to be asked for its code."""
        if not hasattr(os, "waitid"):
            return self.process.poll() is not None
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody else in this process has waited for it
            return True

    @property
    def status(self) -> Status | None:
        return self._last if self.gone else self._board.read()

    def end(self) -> str:
        """Kill what is left of it; says how it ended."""
        # Before its code is taken: until then nothing else can have its number.
        kill_group(self.process.pid)
        cause = ending(self.process.wait())
        self._last, self.gone = self._board.read(), True
        self._board.close()
        self.socket.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
        return cause

    def output(self) -> str:
        """The end of what it printed."""
        start = max(self._log_start, self.stack_size() - _TAIL_BYTES)
        text = self.read_stack(start)
        return text.partition("\n")[2] if start > self._log_start else text

    def stack_size(self) -> int:
        """Bytes of its log, to which it writes its stacks when it gets SIGUSR1."""
        try:
            return self.log.stat().st_size
        except OSError:  # somebody has cleared up
            return 0

    def read_stack(self, start: int) -> str:
        """Its log from the byte ``start`` on."""
        try:
            with self.log.open("rb") as file:
                file.seek(start)
                return file.read().decode(errors="replace")
        except OSError:
            return ""


def _started(program: Program | None, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen[bytes](command, **options)
    except OSError as error:
        if program is None:
            raise
        raise no_python(program.python, f"{type(error).__name__}: {error}") from error


def _check_devices(boots: Sequence[Boot]) -> None:
    device = boots[0].device
    wanted = max(b.local_rank for b in boots) + 1
    if device != "cpu" and (seen := devices.device_count(device)) < wanted:
        raise CapabilityError(
            f"pool {boots[0].pool} has more ranks than this host has {device} devices for",
            found=f"{seen} {device} {'device' if seen == 1 else 'devices'}",
            wanted=f"{wanted}, one a rank",
            next=f"--nproc {seen}, or trainer.device=cpu",
        )
