"""One step ahead: the next rollouts are sampled while the update of the step before them still goes on.

    step k    |  wait for batch k, sync, begin batch k + 1 | score, advantages, update k            |
    rollout   |                                            | batch k + 1, with the policy of k - 1 ...

So from the second step on a batch is one update older than the policy that learns from it, and never more: its *staleness*.
Importance weights (``algorithm.rollout_correction``) account for it. What is sampled with which weights depends on the step
alone and not on who is faster, so a run repeats; and nothing is sampled ahead over a checkpoint, so a resumed run goes on as
one that never stopped.

The scheme is that of asynchronous actor-learner systems with a bound of one step (arXiv 2410.18252).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlctl.data.prompts import PromptEncoder
from rlctl.data.rows import Row
from rlctl.data.sampler import BatchSampler
from rlctl.generation import Completion
from rlctl.roles.rollout import RolloutRole
from rlctl.runtime.remote import RemoteEngine
from rlctl.sync import SyncReport
from rlctl.tracking.reporter import Reporter
from rlctl.trainers.seeds import step_seed

if TYPE_CHECKING:
    from rlctl.trainers.rl import StepTimer

Sampled = tuple[list[list[int]], list[Completion]]
"""Prompts and their completions."""

MOST = 1
"""Updates that a batch may be older than the policy that learns from it."""


@dataclass(frozen=True)
class Drawn:
    """One generation batch.

    Args:
        seconds: that it took to sample, whoever waited for it.
        staleness: updates of the policy since its weights.
    """

    rows: Sequence[Row]
    prompts: Sequence[list[int]]
    completions: Sequence[Completion]
    seconds: float
    staleness: int


class Flight:
    """A generation batch on its way, in a thread of its own: the one user of the rollout's processes until it has landed."""

    def __init__(self, rows: Sequence[Row], policy: int) -> None:
        self.rows, self.policy = rows, policy
        self.seconds = 0.0
        self._sampled: Sampled = ([], [])
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self, sample: Callable[[], Sampled]) -> None:
        """Call ``sample`` in a thread."""
        # A daemon: an interpreter on its way out does not wait for rollouts that nobody will read.
        self._thread = threading.Thread(target=self._run, args=(sample,), name="rollouts-ahead", daemon=True)
        self._thread.start()

    def _run(self, sample: Callable[[], Sampled]) -> None:
        start = time.perf_counter()
        try:
            self._sampled = sample()
        except BaseException as error:  # it is raised again in the thread that waits
            self._failure = error
        self.seconds = time.perf_counter() - start

    def settle(self) -> None:
        """Wait until it has ended, well or not."""
        assert self._thread is not None, "it was begun"
        self._thread.join()

    def land(self) -> Sampled:
        """Its prompts and their completions, waited for.

        Raises:
            BaseException: what sampling raised.
        """
        self.settle()
        if self._failure is not None:
            raise self._failure
        return self._sampled


@dataclass
class Ahead:
    """Draws generation batches, one of them ahead.

    Args:
        sampler, rows, encoder: where prompts come from.
        rollout: has processes of its own (the configuration is refused else).
        actor: whose weights it serves.
        seed: of the run.
        pauses: true for a step over whose end nothing is sampled ahead: a checkpoint is saved there, or the run ends.
    """

    sampler: BatchSampler
    rows: Sequence[Row]
    encoder: PromptEncoder
    rollout: RolloutRole
    actor: RemoteEngine
    reporter: Reporter
    seed: int
    pauses: Callable[[int], bool]
    drawn: int = 0
    """Batches begun so far: each has a seed of its own."""
    memory: dict[str, float] = field(default_factory=dict)
    """Of the rollout's processes, asked while they last had nothing to do."""
    last_sync: SyncReport | None = None
    _served: int | None = None
    """Updates that the weights which the rollout serves have seen; None after a sync that :meth:`started` was told of."""
    _flight: Flight | None = None

    def started(self, sync: SyncReport) -> None:
        """The rollout serves the weights with which the next step begins, by ``sync``."""
        self.last_sync, self._served = sync, None

    def draw(self, step: int, timer: StepTimer) -> Drawn:
        """The next batch, for ``step``; then serve the newest weights, and begin the batch after it."""
        if self._flight is None:
            self._refresh(step - 1, timer)
            self._begin()
        flight = self._flight
        assert flight is not None, "just begun"
        with timer("gen"), self.reporter.phase("generate", None):
            prompts, completions = flight.land()
        self._flight = None
        drawn = Drawn(flight.rows, prompts, completions, flight.seconds, step - 1 - flight.policy)
        assert 0 <= drawn.staleness <= MOST, (step, flight.policy)
        self.memory = self.rollout.engine.memory()
        self._refresh(step - 1, timer)
        if not self.pauses(step):
            self._begin()
        return drawn

    def settle(self, step: int, timer: StepTimer) -> None:
        """Leave the rollout idle, with the weights after ``step``, for something else than training."""
        if self._flight is not None:
            self._flight.settle()
        self._refresh(step, timer)

    def stop(self) -> None:
        """End a batch that nobody will draw, by ending the rollout's processes."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self.rollout.engine.group.abandon()
            flight.settle()

    def _refresh(self, policy: int, timer: StepTimer) -> None:
        """Serve the weights after ``policy`` updates; nothing to do where they are served."""
        if self._served is None:
            self._served = policy
        if self._served == policy:
            return
        with timer("update_weights"):
            self.last_sync = self.rollout.sync(self.actor)
        self._served = policy

    def _begin(self) -> None:
        assert self._served is not None, "refreshed before"
        self.drawn += 1
        rows = [self.rows[i] for i in self.sampler.next()]
        seed = step_seed(self.seed, self.drawn)
        self._flight = Flight(rows, self._served)
        self._flight.begin(lambda: self.rollout.converse(rows, self.encoder, "sample", seed))

    # ---- a checkpoint -----------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, int]:
        assert self._flight is None, "a step with a checkpoint samples nothing ahead"
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from :meth:`state_dict`."""
        self.drawn = int(state["drawn"])
