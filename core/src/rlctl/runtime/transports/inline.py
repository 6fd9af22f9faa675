"""One rank in the controller's own process: calls are plain calls, errors are the errors themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlctl.runtime import phases
from rlctl.runtime.phases import Status
from rlctl.runtime.records import Boot, Call, Event, Message, Result
from rlctl.runtime.worker import Worker


class InlineTransport:
    """See :class:`rlctl.runtime.transports.base.Transport`. Exceptions pass through :meth:`receive` as they are.

    Args:
        make_worker: builds the worker; the controller's plugins are in there already.
    """

    name = "inline"

    def __init__(self, make_worker: Callable[[Boot], Worker]) -> None:
        self._make_worker = make_worker
        self._worker: Worker | None = None
        self._waiting: list[Call] = []
        self.on_event: Callable[[Event], None] | None = None
        """Told of events while a call runs: nobody could receive them, the call has the thread."""

    def start(self, boots: Sequence[Boot]) -> None:
        assert len(boots) == 1, "one rank lives in the controller's process"
        self._worker = self._make_worker(boots[0])

    def pack(self, call: Call) -> Any:
        return call

    def send(self, rank: int, packed: Any) -> None:
        assert rank == 0, rank
        self._waiting.append(packed)

    def receive(self, timeout_s: float) -> list[Message]:
        if not self._waiting or self._worker is None:
            return []
        call = self._waiting.pop(0)

        def emit(value: Any) -> None:
            if self.on_event is not None:
                self.on_event(Event(0, call.id, value))

        return [Result(0, call.id, self._worker.run(call, emit))]

    def statuses(self) -> list[Status | None]:
        return [phases.current()]

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        return {}

    def close(self, grace_s: float) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        self.kill()

    def kill(self) -> None:
        self._worker = None
        self._waiting.clear()
