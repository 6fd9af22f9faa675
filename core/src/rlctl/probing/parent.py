"""The parent's side: one child a task, in parallel, each with a time limit and a process group that is killed whole."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rlctl import __version__
from rlctl.causes import is_own_frame
from rlctl.extensions import AUTOLOAD_VARIABLE
from rlctl.interpreters.program import Program
from rlctl.records import API_VERSION

_CHILD = Path(__file__).with_name("child.py")
_ELSEWHERE = Path(__file__).with_name("elsewhere.py")
_TAIL_BYTES = 32 * 1024
_TRACE_GRACE_S = 1.0


@dataclass(frozen=True)
class Task:
    """Something to try in a child.

    Args:
        action: one of :data:`rlctl.probing.child.ACTIONS`.
        step: what it starts with, in words, for a death before anything else.
        arguments: JSON types, as the action reads them.
        env: extra environment variables.
        program: another interpreter that the child runs in (see :mod:`rlctl.probing.elsewhere`); None for this one, with
            this process's ``sys.path``.
    """

    action: str
    step: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    program: Program | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a task.

    Args:
        result: the JSON object that the child wrote, or None when it did not get that far.
        died: how it ended without a result (``killed by SIGSEGV``), or empty.
        timed_out: it was cut by the time limit.
        step: what it was doing.
        trace: the innermost frames at its death or cut, most recent first.
        stdout, stderr: the end of what it printed.
        seconds: how long it took.
    """

    result: dict[str, Any] | None
    died: str
    timed_out: bool
    step: str
    trace: tuple[str, ...]
    stdout: str
    stderr: str
    seconds: float


def run_probes(tasks: Sequence[Task], timeout_s: float, workers: int | None = None) -> list[Outcome]:
    """Run every task in a child of its own.

    Args:
        timeout_s: limit for each child from its own start.
        workers: children at a time; default: two, or one a CPU where there are more.

    Returns:
        One outcome a task, in the same order. An interrupt kills every child and is raised on.

    Raises:
        InterpreterError: the system cannot start the interpreter of a task's ``program``.
    """
    if not tasks:
        return []
    live: dict[int, subprocess.Popen[bytes]] = {}
    count = workers or max(2, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(max_workers=min(count, len(tasks)))
    try:
        return list(pool.map(lambda task: _run(task, timeout_s, live), tasks))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(live.values()):
            _kill_group(process)


def _run(task: Task, timeout_s: float, live: dict[int, subprocess.Popen[bytes]]) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="rlctl-probe-") as name:
        directory = Path(name)
        command, env, own = _start(task)
        payload = {"action": task.action, "step": task.step, **own, **task.arguments}
        (directory / "task.json").write_text(json.dumps(payload))
        start = time.monotonic()
        process = _open(task.program, [*command, name], {**env, **_environment(), **task.env})
        live[process.pid] = process
        assert process.stdout is not None
        assert process.stderr is not None
        tails = [_Tail(process.stdout), _Tail(process.stderr)]
        try:
            timed_out = not _wait(process, timeout_s)
            if timed_out:
                _ask_where(process, directory / "trace")
        finally:
            _kill_group(process)
            live.pop(process.pid, None)
        code = process.returncode
        for tail in tails:
            tail.finish()
        result = _read_result(directory / "result.json")
        return Outcome(
            result=result,
            died="" if result is not None or timed_out else _death(code),
            timed_out=timed_out and result is None,
            step=_read(directory / "step") or task.step,
            trace=_frames(_read(directory / "trace")),
            stdout=tails[0].text,
            stderr=tails[1].text,
            seconds=time.monotonic() - start,
        )


def _open(program: Program | None, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=env,
        )
    except OSError as error:  # an executable file that this system cannot run: empty, of another machine, a lost "#!"
        if program is None:
            raise
        from rlctl.interpreters.faults import no_python

        raise no_python(program.python, f"it cannot be started: {error.strerror or error}") from error


def _start(task: Task) -> tuple[list[str], Mapping[str, str], dict[str, Any]]:
    """The child's command line, its environment, and what it is told beside its arguments."""
    if task.program is None:
        return [sys.executable, "-P", str(_CHILD)], os.environ, {"sys_path": [str(p) for p in sys.path]}
    # Without -P, which old interpreters do not know.
    own = {"version": __version__, "api": list(API_VERSION)}
    return [task.program.python, str(_ELSEWHERE)], task.program.environment(os.environ), own


def _environment() -> dict[str, str]:
    # Autoloading hides which extension broke: with it a plain `import torch` fails for every backend at once.
    return {AUTOLOAD_VARIABLE: "0", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """True when the child ended in time. It is not reaped yet, so that its process group's number stays its own."""
    end = time.monotonic() + timeout_s
    pause = 0.005
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= end:
            return False
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
        pause = min(pause * 1.5, 0.1)
    return True


def _ask_where(process: subprocess.Popen[bytes], trace: Path) -> None:
    """Have faulthandler write where the child hangs, and give it a moment for it."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGUSR1)
    end = time.monotonic() + _TRACE_GRACE_S
    while time.monotonic() < end and "File" not in _read(trace):
        time.sleep(0.02)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the child and everything that it started, then reap it."""
    if process.returncode is None:  # once reaped, its number may belong to another
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Tail:
    """Keeps the end of a stream; reads all of it, so that a chatty child never blocks."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._kept = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while chunk := os.read(self._stream.fileno(), 65536):
                self._kept = (self._kept + chunk)[-_TAIL_BYTES:]

    def finish(self) -> None:
        # A process that left the group may hold the pipe open for ever: what came until now is enough.
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            self._stream.close()

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _read_result(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _death(code: int) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (the system may be out of memory)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"ended with exit code {code} before it was done"


def _frames(trace: str, most: int = 8) -> tuple[str, ...]:
    """``file:line in function`` of foreign frames, most recent first."""
    frames: list[str] = []
    for line in trace.splitlines():
        text = line.strip()
        if not text.startswith("File "):
            continue
        path, _, rest = text[len("File ") :].rpartition(", line ")
        number, _, function = rest.partition(" in ")
        path = path.strip('"')
        if path.startswith("<frozen importlib") or is_own_frame(path):
            continue
        frames.append(f"{path}:{number} in {function}")
    return tuple(frames[:most])
