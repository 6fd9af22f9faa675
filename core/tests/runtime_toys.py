"""Workers without engines, and the groups of processes that the tests of the runtime start of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.errors import BatchError, EngineError, RlctlError, UsageError
from rlctl.runtime.dispatch import Dispatch, dispatch
from rlctl.runtime.phases import beat, phase
from rlctl.runtime.records import Boot, Call, Hello

if TYPE_CHECKING:
    from rlctl.runtime.group import Limits, WorkerGroup

ALLOWED = ("rlctl", "runtime_toys")


@dataclass(frozen=True)
class Double:
    """A plain record outside of core."""

    factor: int = 2

    def __call__(self, value: int) -> int:
        return self.factor * value


class ToyError(EngineError):
    """An error class of a plugin, whose constructor asks for something else."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"toy number {number} broke", found="a toy", wanted="a tool", next="buy another", details=("a", "b")
        )


class SlottedError(Exception):
    """An error that keeps nothing more."""

    __slots__ = ()


class ToyWorker:
    """One rank without torch."""

    def __init__(self, boot: Boot, plugins: Any, notice: Callable[[str], None]) -> None:
        self.boot = boot
        notice(f"hello from rank {boot.rank}")
        self.on_shutdown: str = ""

    def run(self, call: Call, emit: Callable[[Any], None]) -> Any:
        self.emit = emit
        with phase(call.method):
            return getattr(self, call.method)(*call.args, **call.kwargs)

    def shutdown(self) -> None:
        if self.on_shutdown == "hang":
            time.sleep(600)
        if self.on_shutdown:
            Path(self.on_shutdown).write_text("bye")

    @dispatch(Dispatch.ONE_TO_ALL)
    def hello(self) -> Hello:
        return Hello(self.boot.rank, "here", os.getpid(), "3", {})

    @dispatch(Dispatch.ONE_TO_ALL)
    def echo(self, value: Any) -> Any:
        return value

    @dispatch(Dispatch.RANK_ZERO)
    def first(self) -> int:
        return self.boot.rank

    @dispatch(Dispatch.ONE_TO_ALL)
    def apply(self, function: Any, value: Any) -> Any:
        return function(value)

    @dispatch(Dispatch.ONE_TO_ALL)
    def environment(self, names: tuple[str, ...]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names} | {"sid": str(os.getsid(0)), "pid": str(os.getpid())}

    @dispatch(Dispatch.ONE_TO_ALL)
    def imported(self, name: str) -> bool:
        return name in sys.modules

    @dispatch(Dispatch.ONE_TO_ALL)
    def set_shutdown(self, what: str) -> None:
        self.on_shutdown = what

    @dispatch(Dispatch.ONE_TO_ALL)
    def talk(self, count: int) -> int:
        for i in range(count):
            self.emit(i)
        return count

    @dispatch(Dispatch.ONE_TO_ALL)
    def unsendable(self) -> Any:
        return threading.Lock()

    @dispatch(Dispatch.ONE_TO_ALL)
    def start_children(self, detached: bool) -> int:
        child = subprocess.Popen(["sleep", "600"], start_new_session=detached)
        return child.pid

    @dispatch(Dispatch.ONE_TO_ALL)
    def at(self, rank: int, what: str, after_s: float = 0.0) -> int:
        """Rank ``rank`` does ``what``; the others wait for it as in a collective."""
        beat(rows=3, tokens=120)
        if self.boot.rank == rank:
            with phase("backward", micro_batch=2, micro_batches=3, micro_rows=1, micro_tokens=40):
                time.sleep(after_s)
                print("about to", what, flush=True)
                return DEEDS[what]() or 0
        with phase("waiting"):
            if what == "raise":
                time.sleep(0.2)
                raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1")
            if what not in ("return",):
                time.sleep(600)
        return 0

    @dispatch(Dispatch.ONE_TO_ALL)
    def lag(self, rank: int) -> int:
        """All answer; ``rank`` dies right after its answer."""
        if self.boot.rank == rank:
            threading.Timer(0.3, DEEDS["kill"]).start()
        return rank

    @dispatch(Dispatch.ONE_TO_ALL)
    def long_with_beats(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.1)
            if self.boot.rank == 1:
                beat()


class BrokenAtStart(ToyWorker):
    def __init__(self, boot: Boot, plugins: Any, notice: Callable[[str], None]) -> None:
        if boot.rank == 1:
            raise UsageError("rank 1 cannot start", found="a broken toy", next="mend it")
        super().__init__(boot, plugins, notice)


class OtherRlctl(ToyWorker):
    @dispatch(Dispatch.ONE_TO_ALL)
    def hello(self) -> Hello:
        return Hello(self.boot.rank, "here", os.getpid(), "3", {}, sys.executable, "9.9.9", (7, 0))


class SlowToStart(ToyWorker):
    def __init__(self, boot: Boot, plugins: Any, notice: Callable[[str], None]) -> None:
        if boot.rank == 1:
            time.sleep(600)
        super().__init__(boot, plugins, notice)


class PlainFailure(ToyWorker):
    def __init__(self, boot: Boot, plugins: Any, notice: Callable[[str], None]) -> None:
        import no_such_library_anywhere  # type: ignore[import-not-found]  # noqa: F401


def _raise(error: BaseException) -> Callable[[], Any]:
    def deed() -> Any:
        raise error

    return deed


DEEDS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "raise": _raise(ValueError("no such luck\nsecond line")),
    "slotted": _raise(SlottedError("slots")),
    "refuse": _raise(BatchError("a bad row", found="row 7", wanted="a good one", next="mend row 7", details=("why",))),
    "usage": _raise(UsageError("bad usage")),
    "toy": _raise(ToyError(5)),
    "interrupt": _raise(KeyboardInterrupt()),
    "system exit": _raise(SystemExit(7)),
    "memory": _raise(MemoryError()),
    "hang": lambda: time.sleep(600),
    "hold": lambda: [ctypes.PyDLL(None).sleep(600) for _ in range(9)],  # a signal ends a sleep
    "return": lambda: 1,
}


def boots(count: int = 2) -> list[Boot]:
    return [Boot(rank=i, world_size=count, local_rank=i, local_world_size=count) for i in range(count)]


def toy_group(
    count: int = 2, worker: type = ToyWorker, limits: Limits | None = None, log_dir: Path | None = None, **env: str
) -> WorkerGroup:
    """A group of processes that is not started yet."""
    # Here, because the ranks import this module: a group knows the real worker, and so torch.
    from rlctl.runtime.group import Limits, WorkerGroup
    from rlctl.runtime.transports.process import ProcessTransport

    target = f"{worker.__module__}:{worker.__qualname__}"
    transport = ProcessTransport(log_dir, env, ALLOWED, worker=target, plugins=False)
    limits = limits or Limits(start_s=60, hang_s=60, grace_s=3, close_s=5)
    return WorkerGroup("main", transport, boots(count), worker, limits)


def gone(pid: int) -> bool:
    """No process of that number, or one that only waits to be asked for its code."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def all_gone(pids: list[int], within_s: float) -> list[int]:
    """The ones that are still there after ``within_s``."""
    deadline = time.monotonic() + within_s
    while (left := [p for p in pids if not gone(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def controller() -> None:
    """A controller process for the tests that end it: argument 1 is what its ranks do when it has printed their ids."""
    group = toy_group(2)
    group.start()
    children = group.call("start_children", False) + group.call("start_children", True)
    ranks = [h.pid for h in group.hellos]
    print(*ranks, *children, flush=True)
    with contextlib.suppress(RlctlError):
        group.call("at", 1, sys.argv[1])
    group.close()


if __name__ == "__main__":
    # The module must have one name here and in the ranks.
    import runtime_toys

    runtime_toys.controller()
