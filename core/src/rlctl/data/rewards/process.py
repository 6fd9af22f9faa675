"""The parent side of a reward that runs in a process of its own: a hard time limit, and crashes that stay there."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from rlctl.data.rewards.worker import frame, read_frame
from rlctl.errors import DataError

LOAD_TIMEOUT_S = 120.0
"""Imports of a user's file or of sympy, on a busy machine."""


class JobTimeoutError(Exception):
    """A call ran past its limit; the process was ended and the next call starts a fresh one."""


class JobFailedError(Exception):
    """The job answered with an error; ``fields`` as in :class:`rlctl.data.rewards.worker.JobError`."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(str(fields))
        self.fields = fields


class JobDiedError(Exception):
    """The process ended during a call: a crash, or ``os._exit``. ``how`` says which signal or exit code."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class JobLoadError(Exception):
    """The process ended, or took too long, before its job was made. ``how`` as for :class:`JobDiedError`."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class JobProcess:
    """One job in one child process, started when first used and again after a time-out.

    Args:
        target: ``module:factory`` of the job.
        args: keyword arguments of the factory, picklable.
        timeout_s: limit of one call.
    """

    def __init__(self, target: str, args: dict[str, Any], timeout_s: float) -> None:
        self._target = target
        self._args = args
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and make the job; nothing when it runs already.

        Raises:
            JobFailedError: the factory reported an error.
            JobLoadError: the process ended, or took too long.
        """
        with self._lock:
            self._start()

    def call(self, payload: Any, timeout_s: float | None = None) -> Any:
        """The job's value for ``payload``.

        Args:
            timeout_s: limit of this call; default: the job's.

        Raises:
            JobTimeoutError: no answer within the limit.
            JobFailedError: the job reported an error.
            JobDiedError: the process ended.
            JobLoadError: a fresh process could not make the job.
        """
        with self._lock:
            self._start()
            return self._exchange((payload,), self._timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process is None:
                return
            assert self._process.stdin is not None
            # A worker that is idle leaves by itself once its pipe is closed.
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)
            self._kill()

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self._kill()

    def _start(self) -> None:
        if self._process is not None:
            return
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            # -P: the working directory holds the user's files, which must not stand in for the standard library's.
            [sys.executable, "-P", "-c", "from rlctl.data.rewards.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        try:
            self._exchange((self._target, self._args), LOAD_TIMEOUT_S)
        except JobFailedError:
            self._kill()
            raise
        except JobDiedError as error:
            raise JobLoadError(error.how) from error
        except JobTimeoutError as error:
            raise JobLoadError(f"was not ready after {LOAD_TIMEOUT_S:g} s") from error

    def _exchange(self, request: Any, timeout_s: float) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(frame(request))
            process.stdin.flush()
            status, value = self._receive(process.stdout, time.monotonic() + timeout_s)
        except (EOFError, BrokenPipeError) as error:
            raise JobDiedError(self._kill()) from error
        except BaseException:
            # An interrupted exchange would leave an answer in the pipe for the next request.
            self._kill()
            raise
        if status == "error":
            raise JobFailedError(value)
        return value

    def _receive(self, stream: Any, deadline: float) -> Any:
        # Only the wait for the first byte is limited: the child writes a whole frame at once.
        ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise JobTimeoutError
        return read_frame(stream)

    def _kill(self) -> str:
        """End the process and its children; returns how it had ended by itself, for a message."""
        process, self._process = self._process, None
        if process is None:
            return "was not running"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2 if process.poll() is None else None)
        code = process.poll()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if code is None:
            return "was ended"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def unexpected(name: str, error: JobFailedError | JobLoadError) -> DataError:
    """The error for a job that failed in a way its reward has no words for."""
    return DataError(
        f"the process of the reward {name!r} failed",
        found=error.fields.get("message")
        if isinstance(error, JobFailedError)
        else f"it {error.how} while it was loaded",
        next="report this with the row, or choose another reward",
    )
