"""The child side of a reward that runs in a process of its own (see ``process.py``).

Frames on standard input and output are an 8-byte length and a pickle. The first request is ``(target, args)``, where
``target`` is ``module:factory``; every later one is a payload for the job that the factory made. The answer is
``("ok", value)`` or ``("error", fields)``. Jobs run in the main thread, where ``signal.alarm`` works; another thread
watches the pipe, so that the process goes away with its parent even while a job never returns.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import signal
import struct
import sys
import threading
from typing import Any, BinaryIO

LENGTH = struct.Struct(">Q")
GRACE_S = 2.0


class JobError(Exception):
    """A failure with fields for the parent's message."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(str(fields))
        self.fields = fields


def read_frame(stream: BinaryIO) -> Any:
    """The next frame's object; EOFError at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    size = LENGTH.unpack(head)[0]
    body = stream.read(size)
    if len(body) < size:
        raise EOFError
    return pickle.loads(body)


def frame(value: Any) -> bytes:
    """``value`` as a frame."""
    body = pickle.dumps(value, protocol=5)
    return LENGTH.pack(len(body)) + body


def main() -> None:
    """Serve one job until the pipe closes."""
    # Whatever the job prints goes to standard error, and its children cannot read our requests.
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    # Ctrl-C reaches the parent, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(source, requests), daemon=True).start()
    job: Any = None
    while True:
        request = requests.get()
        if request is None:
            return
        try:
            if job is None:
                target, args = request
                module, _, name = target.partition(":")
                job = getattr(importlib.import_module(module), name)(**args)
                answer = ("ok", None)
            else:
                answer = ("ok", job(request[0]))
        except JobError as error:
            answer = ("error", error.fields)
        except Exception as error:  # the boundary of the process: the parent decides what to make of it
            answer = ("error", {"kind": "unexpected", "message": f"{type(error).__name__}: {error}"})
        sink.write(frame(answer))


def _listen(source: BinaryIO, requests: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            requests.put(read_frame(source))
        except EOFError:
            break
    requests.put(None)
    # A job that never returns must not outlive the run. An idle worker has ended long before this.
    threading.Event().wait(GRACE_S)
    sys.stderr.flush()
    os._exit(0)
