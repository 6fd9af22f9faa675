"""The process of one rank: started by :mod:`rlctl.runtime.transports.process`, it takes calls and answers them.

It never outlives its controller: a thread reads the socket, and when the controller's end closes, however that came
about, the process ends at once with all that it started. Where that thread cannot run, or is gone, a guard does it
(:mod:`rlctl.runtime.guard`). Nothing heavy is imported before both are there.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

from rlctl import extensions
from rlctl.runtime import phases, wire
from rlctl.runtime.channel import Frame, FrameReader, FrameWriter, pack
from rlctl.runtime.failures import error_record
from rlctl.runtime.guard import start_guard
from rlctl.runtime.launch import Launch, Stop
from rlctl.runtime.processes import MARKER, kill_marked
from rlctl.runtime.records import Call, Event, Raised, Result
from rlctl.runtime.status_board import open_board

START_UP = 0
"""The call id of what goes wrong before the first call."""


class Line:
    """This rank's end of the socket."""

    def __init__(self, sock: socket.socket, scratch: str) -> None:
        self.frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.allowed: tuple[str, ...] = wire.ALLOWED
        self._scratch = scratch
        self._reader = FrameReader(sock)
        self._writer = FrameWriter(sock)
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="rlctl-reader", daemon=True).start()

    def _read(self) -> None:
        while not self._reader.closed:
            for frame in self._reader.read():
                self.frames.put(frame)
        self._end()

    def _end(self) -> None:
        """The controller is gone: nobody waits for anything any more."""
        # In this order: another rank that does the same ends this one.
        shutil.rmtree(self._scratch, ignore_errors=True)
        kill_marked(os.environ.get(MARKER, ""))
        os.killpg(os.getpgrp(), signal.SIGKILL)

    def receive(self) -> Any:
        header, tensors = self.frames.get().open()
        return wire.decode(header, tensors, self.allowed)

    def send(self, message: Any) -> None:
        """From any thread."""
        parcel = pack(*wire.encode(message, self.allowed))
        with self._lock, contextlib.suppress(ConnectionError):  # the reader sees to that
            self._writer.send(parcel)


def main(pool: str, rank: int, descriptors: tuple[int, ...], parent: int, scratch: str) -> int:
    """Serve until told to stop. Returns the exit code."""
    extensions.keep_from_loading()
    sock, board = descriptors
    start_guard(parent, os.environ.get(MARKER, ""), scratch)
    # Into the rank's log: of a fatal signal the stack, and of a hanging rank all stacks when it is asked for them.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    line = Line(socket.socket(fileno=sock), scratch)
    launch = line.receive()
    assert isinstance(launch, Launch), launch
    line.allowed = launch.allowed
    phases.install_sink(open_board(board).write)
    with phases.phase("start-up"):
        try:
            worker = _make(launch)
        except BaseException as error:  # whatever keeps a rank from starting is told to the controller
            traceback.print_exc()
            line.send(Raised(rank, START_UP, error_record(error, traceback.format_exc(), phases.current())))
            return 1
    while isinstance(message := line.receive(), Call):
        _serve(worker, message, rank, line)
    assert isinstance(message, Stop), message
    with phases.phase("shutting down"):
        worker.shutdown()
    return 0


def _make(launch: Launch) -> Any:
    kind = wire.resolve(launch.worker, (*launch.allowed, launch.worker.partition(":")[0]))
    plugins = None
    if launch.plugins:
        from rlctl.plugins import load_plugins

        plugins = load_plugins()
    return kind(launch.boot, plugins, print)


def _serve(worker: Any, call: Call, rank: int, line: Line) -> None:
    try:
        value = worker.run(call, lambda said: line.send(Event(rank, call.id, said)))
        with phases.phase(f"answering {call.method}"):
            line.send(Result(rank, call.id, value))
    except BaseException as error:  # a rank's failure is the controller's to tell, an exit or interrupt included
        traceback.print_exc()
        line.send(Raised(rank, call.id, error_record(error, traceback.format_exc(), phases.current())))


def _leave(code: int) -> NoReturn:
    """End the process once its exit functions have run: to take a large library's modules apart takes seconds, for nothing."""
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _pool, _rank, _numbers, _parent, _scratch = sys.argv[1:]
    _leave(main(_pool, int(_rank), tuple(map(int, _numbers.split(","))), int(_parent), _scratch))
