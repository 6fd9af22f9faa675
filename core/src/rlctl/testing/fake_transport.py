"""Simulated ranks: a worker group without processes.

:class:`FakeTransport` runs each rank in a thread of this process. They meet in a :class:`Fabric`, whose collectives wait
for one another as real ones do, so engines with a mesh can be tried in milliseconds. :class:`CannedTransport` has any
number of ranks that answer at once and compute nothing: what remains is the controller's own work.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from rlctl.batch import PackedBatch
from rlctl.engine import Engine, EngineInfo, StepOutput, TrainOutput
from rlctl.generation import Completion, FinishReason, GenerateRequest
from rlctl.plugins import PluginSet
from rlctl.runtime import phases
from rlctl.runtime.failures import error_record
from rlctl.runtime.group import Limits, WorkerGroup
from rlctl.runtime.phases import Status
from rlctl.runtime.records import Boot, BuildSpec, Built, Call, Event, Hello, Message, Raised, RankPlace, Result
from rlctl.runtime.worker import Worker

T = TypeVar("T")


class FabricError(RuntimeError):
    """A collective of simulated ranks cannot end."""


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size


class Fabric:
    """Where simulated ranks meet. Collectives are among threads; every member of a group calls them in one order.

    Args:
        timeout_s: how long a rank waits for its peers.
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._meetings: dict[tuple[int, ...], _Meeting] = {}
        self._lock = threading.Lock()
        self._broken = False

    def gather(self, group: Sequence[int], rank: int, value: T, what: str) -> list[T]:
        """The values of all members, in the order of ``group``. ``what`` says which collective this is.

        Raises:
            FabricError: a peer failed or did not come, or is in another collective.
        """
        members = tuple(group)
        with self._lock:
            meeting = self._meetings.setdefault(members, _Meeting(len(members)))
            if self._broken:
                meeting.barrier.abort()
        meeting.slots[members.index(rank)] = (what, value)
        self._wait(meeting, rank, what)
        found = list(meeting.slots)
        self._wait(meeting, rank, what)  # nobody writes the next values before all have read these
        if len({label for label, _ in found}) != 1:
            calls = ", ".join(f"rank {r}: {label}" for r, (label, _) in zip(members, found, strict=True))
            raise FabricError(f"the ranks run different collectives ({calls})")
        return [value for _, value in found]

    def _wait(self, meeting: _Meeting, rank: int, what: str) -> None:
        try:
            meeting.barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            raise FabricError(f"rank {rank} waits for a peer that is gone or elsewhere, in {what}") from None

    def abort(self) -> None:
        """Let no rank wait any longer: one has failed."""
        with self._lock:
            self._broken = True
            for meeting in self._meetings.values():
                meeting.barrier.abort()


EngineMaker = Callable[[BuildSpec, Boot, Fabric], Engine]


class FakeWorker(Worker):
    """One simulated rank. Its engines come from ``make_engine``."""

    def __init__(self, boot: Boot, fabric: Fabric, make_engine: EngineMaker) -> None:
        super().__init__(boot, PluginSet())
        self.fabric = fabric
        self._make_engine = make_engine

    def _join(self) -> None:
        """Threads of one process are together already."""

    def _create(self, spec: BuildSpec, settings: Mapping[str, Any]) -> Engine:
        return self._make_engine(spec, self.boot, self.fabric)


class FakeTransport:
    """Ranks as threads; see :class:`rlctl.runtime.transports.base.Transport`. An error of one ends the others' waiting.

    Args:
        make_engine: gives each rank its engines.
        timeout_s: of one collective.
    """

    name = "fake"

    def __init__(self, make_engine: EngineMaker, timeout_s: float = 30.0) -> None:
        self.fabric = Fabric(timeout_s)
        self.packed: list[Call] = []
        """Every call that was packed, in order."""
        self.sent: list[tuple[int, Call]] = []
        """Every call that was sent, with its rank, in order."""
        self._make_engine = make_engine
        self._arrived: queue.Queue[Message] = queue.Queue()
        self._inboxes: list[queue.Queue[Call | None]] = []
        self._threads: list[threading.Thread] = []

    def start(self, boots: Sequence[Boot]) -> None:
        self._inboxes = [queue.Queue() for _ in boots]
        for boot, inbox in zip(boots, self._inboxes, strict=True):
            thread = threading.Thread(target=self._serve, args=(boot, inbox), name=f"rank-{boot.rank}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, boot: Boot, inbox: queue.Queue[Call | None]) -> None:
        worker = FakeWorker(boot, self.fabric, self._make_engine)
        while (call := inbox.get()) is not None:
            call_id = call.id
            try:
                value = worker.run(call, lambda v, i=call_id: self._arrived.put(Event(boot.rank, i, v)))
            except Exception as error:  # whatever an engine raises is what the controller must hear of
                record = error_record(error, traceback.format_exc(), phases.current())
                self._arrived.put(Raised(boot.rank, call.id, record))
                self.fabric.abort()
            else:
                self._arrived.put(Result(boot.rank, call.id, value))
        worker.shutdown()

    def pack(self, call: Call) -> Any:
        self.packed.append(call)
        return call

    def send(self, rank: int, packed: Any) -> None:
        self.sent.append((rank, packed))
        self._inboxes[rank].put(packed)

    def receive(self, timeout_s: float) -> list[Message]:
        try:
            found = [self._arrived.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        while not self._arrived.empty():
            found.append(self._arrived.get())
        return found

    def statuses(self) -> list[Status | None]:
        return [None] * len(self._inboxes)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        return {}

    def close(self, grace_s: float) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(grace_s)
        self.kill()

    def kill(self) -> None:
        self.fabric.abort()
        for inbox in self._inboxes:
            inbox.put(None)


def fake_group(
    world_size: int, make_engine: EngineMaker, *, timeout_s: float = 30.0, limits: Limits | None = None
) -> WorkerGroup:
    """A started group of simulated ranks; close it in the end."""
    boots = [Boot(rank=rank, world_size=world_size) for rank in range(world_size)]
    group = WorkerGroup("fake", FakeTransport(make_engine, timeout_s), boots, FakeWorker, limits)
    group.start()
    return group


class CannedTransport:
    """Ranks that answer at once with numbers made up before; see :class:`rlctl.runtime.transports.base.Transport`.

    Scores are zeros, or what a field of the batch holds if ``echo`` names one: then order can be seen.

    Args:
        places: of the ranks, by rank.
    """

    name = "canned"

    def __init__(self, places: Sequence[RankPlace], echo: str | None = None) -> None:
        self.num_packed = 0
        self.num_sent = 0
        self.seconds = 0.0
        """Processor time spent in here, which is no work of the controller."""
        self._places = places
        self._echo = echo
        self._waiting: list[tuple[int, Call]] = []
        self._zeros = torch.zeros(0)
        step = StepOutput(grad_norm=1.0, lr=1e-6, skipped=False)
        names = ("actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/entropy")
        self._trained = TrainOutput(0.5, {**dict.fromkeys(names, 0.1), "_weight": 1.0}, {}, step, 1)

    def start(self, boots: Sequence[Boot]) -> None:
        assert len(boots) == len(self._places), (len(boots), len(self._places))

    def pack(self, call: Call) -> Any:
        self.num_packed += 1
        return call

    def send(self, rank: int, packed: Any) -> None:
        self.num_sent += 1
        self._waiting.append((rank, packed))

    def receive(self, timeout_s: float) -> list[Message]:
        start = time.thread_time()
        answers: list[Message] = [Result(rank, call.id, self._answer(rank, call)) for rank, call in self._waiting]
        self._waiting.clear()
        self.seconds += time.thread_time() - start
        return answers

    def _answer(self, rank: int, call: Call) -> Any:
        match call.method:
            case "hello":
                return Hello(rank, "nowhere", 0, "")
            case "build":
                return Built(self._places[rank], EngineInfo(num_parameters=0, vocab_size=0, model_family="none"))
            case "train_batch":
                return self._trained
            case "eval_loss":
                return self._trained.loss, self._trained.sums
            case "infer_batch":
                _, batch, _, want = call.args
                return dict.fromkeys(want, self._scores(batch))
            case "generate":
                return _completions(call.args[1])
        return None

    def _scores(self, batch: PackedBatch) -> torch.Tensor:
        if self._echo is not None:
            return batch.items[self._echo].float()
        if self._zeros.numel() < batch.num_items:
            self._zeros = torch.zeros(batch.num_items)
        return self._zeros[: batch.num_items]

    def statuses(self) -> list[Status | None]:
        return [None] * len(self._places)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        return {}

    def close(self, grace_s: float) -> None:
        self._waiting.clear()

    def kill(self) -> None:
        self._waiting.clear()


def _completions(request: GenerateRequest) -> list[Completion]:
    """One token a row: the row's number in the whole request."""
    first, n = request.params.row_offset, request.params.n
    return [
        Completion(p, s, [first + p * n + s], [0.0], FinishReason.LENGTH)
        for p in range(len(request.prompts))
        for s in range(n)
    ]
