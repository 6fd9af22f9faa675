"""Weights from one worker group to another in buckets, when rollout and training do not share processes.

The training ranks export together and rank 0 gives each bucket to the controller; every rollout rank takes it. At most a
few buckets exist at a time: the rollout engine reads from a short queue while it loads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rlctl.engine import Engine
from rlctl.errors import EngineError
from rlctl.runtime.phases import beat
from rlctl.sync import fingerprint_tensor

_POLL_S = 0.5


class Outlet:
    """The sending side of one rank.

    Args:
        weights: the engine's export; collective, so every rank takes the same number of tensors a bucket.
        send: this rank's buckets are the ones that count.
        verify: take fingerprints.
    """

    def __init__(self, weights: Iterator[tuple[str, torch.Tensor]], *, send: bool, verify: bool) -> None:
        self._weights = weights
        self._send = send
        self._verify = verify
        self._sent: dict[str, str] = {}

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
                self._sent[name] = fingerprint_tensor(tensor) if self._verify else ""
                bucket[name] = tensor.detach().cpu()
        return bucket

    def close(self) -> dict[str, str]:
        """Name -> fingerprint of everything sent."""
        close = getattr(self._weights, "close", None)
        if close is not None:
            close()
        return self._sent


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
                raise EngineError(
                    "the rollout engine stopped reading weights before the last one",
                    found="rlctl_load_weights returned",
                    wanted="an engine that takes every tensor it is given",
                )
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
