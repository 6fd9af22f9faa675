"""Weights of one rank on their way out, and into one rank, when rollout and training do not share processes.

Over a link (:mod:`rlctl.runtime.transfer`) the ranks work with one another: :func:`send`, :func:`receive`. By the controller
rank 0 gives each bucket to it, and every rollout rank takes it: :class:`Outlet`, :class:`Inlet`; at most a few buckets exist
at a time, as the rollout engine reads from a short queue while it loads. Either way the training ranks export together.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlctl.engine import Engine
from rlctl.errors import EngineError
from rlctl.runtime.phases import beat, phase
from rlctl.runtime.transfer import WeightLink
from rlctl.sync import Ledger

_POLL_S = 0.5


@dataclass(frozen=True)
class Sent:
    """What the sender says after a sync over a link; empty from ranks that only took part in the export.

    Args:
        fingerprints: name -> fingerprint of what was sent, or an empty text.
        num_bytes: of all tensors.
        peak_bytes: see :class:`rlctl.sync.SyncReport`.
    """

    fingerprints: Mapping[str, str]
    num_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Received:
    """What a receiver says: the engine's answer (see ``rlctl_load_weights``), and its peak."""

    answer: Mapping[str, Any]
    peak_bytes: int


def send(
    engine: Engine, link: WeightLink | None, *, version: int, number: int, dtype: str | None, verify: bool
) -> Sent:
    """Export the weights of ``engine`` and send them. Collective: every rank of the engine exports, who has a link sends.

    Args:
        number: of the sync over this link.

    Raises:
        GuardError: a name comes twice.
        BaseException: see :meth:`rlctl.runtime.link.PackedLink.send`.
    """
    with phase("sync", version=version):
        weights = engine.export_weights(dtype)
        if link is None:
            for _ in weights:
                beat()
            return Sent({}, 0, 0)
        ledger = Ledger(verify=verify)
        link.send(ledger.note(weights), number)
        return Sent(ledger.sent, ledger.num_bytes, link.peak_bytes)


def receive(engine: Engine, link: WeightLink, *, version: int, number: int) -> Received:
    """Load what comes over ``link`` into ``engine``. Whatever this ends in, the sender is not left waiting.

    Raises:
        EngineError: the engine has not read all.
        BaseException: what the engine or the link raised.
    """
    with phase("sync", version=version):
        arriving = link.receive(number)
        try:
            answer = engine.load_weights(arriving, version)
            if (left := next(arriving, None)) is not None:
                raise _stopped_early(f"rlctl_load_weights returned before weight {left[0]!r}")
        except BaseException as error:
            link.give_up(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
            raise
        return Received(answer, link.peak_bytes)


def _stopped_early(found: str) -> EngineError:
    return EngineError(
        "the rollout engine stopped reading weights before the last one",
        found=found,
        wanted="an engine that takes every tensor it is given",
    )


class Outlet:
    """The sending side of one rank.

    Args:
        weights: the engine's export; collective, so every rank takes the same number of tensors a bucket.
        send: this rank's buckets are the ones that count.
        verify: take fingerprints.
    """

    def __init__(self, weights: Iterator[tuple[str, torch.Tensor]], *, send: bool, verify: bool) -> None:
        self._ledger = Ledger(verify=verify)
        self._weights = self._ledger.note(weights) if send else weights
        self._send = send

    def next_bucket(self, max_bytes: int) -> dict[str, torch.Tensor]:
        """Tensors until ``max_bytes`` are reached, at least one; empty at the end or where nothing is sent."""
        bucket: dict[str, torch.Tensor] = {}
        size = 0
        while size < max_bytes:
            item = next(self._weights, None)
            if item is None:
                break
            beat()
            name, tensor = item
            size += tensor.numel() * tensor.element_size()
            if self._send:
                bucket[name] = tensor.detach().cpu()
        return bucket

    def close(self) -> dict[str, str]:
        """Name -> fingerprint of everything sent."""
        close = getattr(self._weights, "close", None)
        if close is not None:
            close()
        return self._ledger.sent


class Inlet:
    """The receiving side of one rank: ``rlctl_load_weights`` runs in a thread and reads what is put here.

    Raises:
        BaseException: whatever the engine raised, from :meth:`put` or :meth:`close`.
    """

    def __init__(self, engine: Engine, version: int) -> None:
        self._queue: queue.Queue[Mapping[str, torch.Tensor] | None] = queue.Queue(maxsize=1)
        self._answer: dict[str, Any] | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._load, args=(engine, version), name="load-weights", daemon=True)
        self._thread.start()

    def _load(self, engine: Engine, version: int) -> None:
        try:
            # no_grad is a thread's own: loading copies into parameters.
            with torch.no_grad():
                self._answer = engine.load_weights(self._arriving(), version)
        except BaseException as error:  # it is raised again in the worker's own thread
            self._failure = error

    def _arriving(self) -> Iterator[tuple[str, torch.Tensor]]:
        while (bucket := self._queue.get()) is not None:
            yield from bucket.items()

    def put(self, bucket: Mapping[str, torch.Tensor] | None) -> None:
        """Hand one bucket over; None ends. Waits while the engine still works on the one before the last."""
        while True:
            if self._failure is not None:
                raise self._failure
            if not self._thread.is_alive() and bucket is not None:
                raise _stopped_early("rlctl_load_weights returned")
            try:
                self._queue.put(bucket, timeout=_POLL_S)
                return
            except queue.Full:
                beat()

    def close(self) -> dict[str, Any]:
        """What ``rlctl_load_weights`` answered."""
        if self._thread.is_alive():
            self.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._answer is not None, "it returned"
        return self._answer
