"""What a transport does. It carries calls and answers and says who died; what that means is the group's business."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rlctl.runtime.phases import Status
from rlctl.runtime.records import Boot, Call, Message


class Transport(Protocol):
    """Carries :class:`Call` to ranks and :class:`Message` back. One a worker group; used from one thread."""

    name: str
    """``inline``, ``process`` or ``ray``."""

    def start(self, boots: Sequence[Boot]) -> None:
        """Launch one worker a rank and return at once. ``boots`` has no ``store``: the transport fills it in.

        Raises:
            RlctlError: the resources are not there (what is short is said before anything waits for them).
        """
        ...

    def pack(self, call: Call) -> Any:
        """The call in the form in which it travels. What several ranks get is packed once."""
        ...

    def send(self, rank: int, packed: Any) -> None:
        """Hand a packed call to a rank; never blocks for the answer. A rank that is gone shows as a Death later."""
        ...

    def receive(self, timeout_s: float) -> list[Message]:
        """What has arrived, waiting up to ``timeout_s`` for the first. A rank's death comes once, after what it sent."""
        ...

    def statuses(self) -> list[Status | None]:
        """The newest status of each rank, by rank; None where it cannot be read. Never blocks for long."""
        ...

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Python stacks of ranks that do not answer, as far as they can be had within a few seconds."""
        ...

    def close(self, grace_s: float) -> None:
        """Ask every rank to end, and end those that have not after ``grace_s``. Safe to call again."""
        ...

    def kill(self) -> None:
        """End every rank now, with all that it started. Safe to call again."""
        ...
