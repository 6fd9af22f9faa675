"""One Ray actor a rank, in a placement group, on one node or many. Ray is imported inside functions only.

An actor starts the rank's process on its node and hands frames on (see :mod:`rlctl.runtime.transports.ray_rank`). What
travels is what travels between processes: plain records, a header and tensors as bytes, put into Ray's object store once
however many ranks get it. Each actor has one call of ours waiting in it that returns when its rank says something or
ends, so nothing is polled, and a dead actor or node shows by that call's failure.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlctl.interpreters.program import Program
from rlctl.interrupts import shielded
from rlctl.runtime import ray_cluster, wire
from rlctl.runtime.channel import SHARED_FROM, Frame, lay_out
from rlctl.runtime.launch import Launch, Stop
from rlctl.runtime.phases import Status
from rlctl.runtime.processes import MARKER
from rlctl.runtime.ray_cluster import Placement, RayCluster
from rlctl.runtime.ray_resources import STRATEGIES, Ask, bundle_for
from rlctl.runtime.records import Boot, Call, Death, Message
from rlctl.runtime.status_board import decode_status
from rlctl.runtime.transports.process import WORKER
from rlctl.runtime.transports.ray_deaths import death_of, unreachable
from rlctl.runtime.transports.ray_rank import CONCURRENCY, ENDED, RankActor, RankSpec

PREFIXES = (
    *("RLCTL_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH", "PYTORCH_", "OMP_", "MKL_"),
    *("NCCL_", "GLOO_", "HCCL_", "CUDA_LAUNCH_", "VLLM_"),
)
"""Variables of the controller that begin so are the ranks' too."""
_LOOK_S = 1.0
_RETRY_S = 0.5
_UNREACHABLE_S = 15.0
_STACKS_S = 6.0
_END_S = 5.0


@dataclass(frozen=True)
class Packed:
    """A call ready to be sent, any number of times. ``body`` is bytes, or a reference to its size and pieces in Ray's object
    store."""

    table_size: int
    header_size: int
    body: Any


@dataclass(eq=False)
class _Rank:
    """The controller's view of one actor.

    Args:
        gone: its rank has ended, or the actor has.
        heard: number of the answer that is waited for.
        lost_at: since when it cannot be reached.
        retry_at: when to try again.
        looking: a status that was asked for and has not come.
    """

    number: int
    actor: Any
    node: str
    gone: bool = False
    heard: int = 0
    lost_at: float | None = None
    retry_at: float | None = None
    looking: Future[Any] | None = None
    status: Status | None = None


@dataclass
class _Group:
    """What :meth:`RayTransport.start` made."""

    cluster: RayCluster
    placement: Placement
    ranks: list[_Rank] = field(default_factory=list)


class RayTransport:
    """See :class:`rlctl.runtime.transports.base.Transport`.

    Args:
        address: of a cluster that exists (``auto``, ``HOST:PORT``); None for one of this run's own, on this host. See
            :func:`rlctl.runtime.ray_cluster.connect`.
        strategy: how ranks are laid out over nodes: PACK, STRICT_PACK, SPREAD or STRICT_SPREAD.
        cpus_per_rank: CPUs that Ray sets aside for a rank, beside its accelerator.
        placement_timeout_s: longest wait for what the cluster has, but not free.
        log_dir: gets ``rank_N.log`` on the rank's node where that can be written there.
        env: environment variables of the ranks, beside the controller's own of :data:`PREFIXES`.
        allowed: packages whose records may travel (see :mod:`rlctl.runtime.wire`).
        worker, plugins: see :class:`rlctl.runtime.launch.Launch`.
        notice: told what is waited for.
        program: another interpreter that the ranks run in, on whatever node; it needs no Ray, the actors keep the cluster's.
    """

    name = "ray"

    def __init__(
        self,
        address: str | None = None,
        *,
        strategy: str = "PACK",
        cpus_per_rank: float = 1.0,
        placement_timeout_s: float = 120.0,
        log_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        allowed: Sequence[str] = wire.ALLOWED,
        worker: str = WORKER,
        plugins: bool = True,
        notice: Callable[[str], None] | None = None,
        program: Program | None = None,
    ) -> None:
        assert strategy in STRATEGIES, strategy
        self._address = address
        self._strategy = strategy
        self._cpus = cpus_per_rank
        self._placement_timeout_s = placement_timeout_s
        self._log_dir = log_dir
        self._env = dict(env or {})
        self._allowed = tuple(allowed)
        self._worker = worker
        self._plugins = plugins
        self._program = program
        self._notice = notice or (lambda text: None)
        self._group: _Group | None = None
        self._answers: queue.SimpleQueue[tuple[_Rank, Future[Any]]] = queue.SimpleQueue()
        self._last: list[Status | None] = []

    # ---- starting -------------------------------------------------------------------------------------------------
    def start(self, boots: Sequence[Boot]) -> None:
        bundle = bundle_for(boots[0].device, self._cpus)
        cluster = ray_cluster.connect(self._address)
        try:
            ask = Ask(boots[0].pool, len(boots), bundle, self._strategy)
            placement = cluster.place(ask, self._placement_timeout_s, self._notice)
        except BaseException:
            cluster.release()
            raise
        self._group = _Group(cluster, placement)
        self._launch(self._group, boots, bundle)

    def _launch(self, group: _Group, boots: Sequence[Boot], bundle: Mapping[str, float]) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for method, concurrency_group in CONCURRENCY.items():
            ray.method(concurrency_group=concurrency_group)(getattr(RankActor, method))
        remote: Any = ray.remote  # its overloads leave this argument out
        actor = remote(concurrency_groups=dict.fromkeys(CONCURRENCY.values(), 1))(RankActor)
        marker = uuid.uuid4().hex
        env = _environment()
        for boot in boots:
            local, count = group.placement.local(boot.rank)
            told = Launch(
                replace(boot, local_rank=local, local_world_size=count), self._worker, self._plugins, self._allowed
            )
            logs = None if self._log_dir is None else str(self._log_dir.absolute())
            own = group.cluster.own
            spec = RankSpec(
                told, f"{marker}-{boot.rank}", logs, os.getcwd(), self._env, host_threads=own, program=self._program
            )
            made = actor.options(
                name=f"{boot.pool}/{boot.rank}/{marker[:8]}",
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources={k: v for k, v in bundle.items() if k not in ("CPU", "GPU")},
                max_restarts=0,
                max_task_retries=0,
                runtime_env={"env_vars": env},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group.placement.group, placement_group_bundle_index=group.placement.bundles[boot.rank]
                ),
            ).remote(wire.encode(spec)[0])
            rank = _Rank(boot.rank, made, group.placement.nodes[boot.rank])
            group.ranks.append(rank)
            self._listen(rank)
        # The actors fetch it from rank 0's themselves: nothing here waits for them.
        store = group.ranks[0].actor.meeting_place.remote() if len(boots) > 1 else ""
        for rank in group.ranks:
            rank.actor.begin.remote(store)

    # ---- messages -------------------------------------------------------------------------------------------------
    def pack(self, call: Call) -> Packed:
        return self._packed(call)

    def _packed(self, message: Any) -> Packed:
        header, tensors = wire.encode(message, self._allowed)
        layout = lay_out(header, tensors)
        if layout.size < SHARED_FROM:
            body = bytearray(layout.size)
            layout.write_to(body)
            return Packed(layout.table_size, layout.header_size, bytes(body))
        import numpy
        import ray

        # As pieces: they go from where they lie into the object store, and nowhere else.
        pieces = [(start, numpy.frombuffer(piece, dtype=numpy.uint8)) for start, piece in layout.pieces if len(piece)]
        return Packed(layout.table_size, layout.header_size, ray.put((layout.size, pieces)))

    def send(self, rank: int, packed: Any) -> None:
        found = self._ranks[rank]
        if not found.gone:
            found.actor.send.remote(packed.table_size, packed.header_size, packed.body)

    def receive(self, timeout_s: float) -> list[Message]:
        # Not by Ray's own wait: a signal that arrives in there comes out as a bare KeyboardInterrupt, whatever it was.
        answers: list[tuple[_Rank, Future[Any]]] = []
        again = self._ask_again()
        with contextlib.suppress(queue.Empty):
            answers.append(self._answers.get(timeout=min(timeout_s, again)))
            while True:
                answers.append(self._answers.get_nowait())
        return [message for rank, answer in answers for message in self._heard(rank, answer)]

    def _listen(self, rank: _Rank) -> None:
        said = rank.actor.listen.remote(rank.heard)
        said.future().add_done_callback(lambda answer: self._answers.put((rank, answer)))

    def _ask_again(self) -> float:
        """Listen again to actors that could not be reached a while ago; the seconds until the next such try."""
        again = math.inf
        for rank in self._ranks:
            if rank.retry_at is not None and not rank.gone:
                left = rank.retry_at - time.monotonic()
                if left <= 0:
                    rank.retry_at = None
                    self._listen(rank)
                else:
                    again = min(again, left)
        return again

    def _heard(self, rank: _Rank, answer: Future[Any]) -> list[Message]:
        from ray.exceptions import ActorUnavailableError, RayError

        if rank.gone or self._group is None:
            return []
        try:
            said: list[tuple[Any, ...]] = answer.result()
        except ActorUnavailableError as error:
            # A network that stumbled, or a node that died and is not known to be dead yet.
            now = time.monotonic()
            rank.lost_at = rank.lost_at or now
            if now - rank.lost_at < _UNREACHABLE_S:
                rank.retry_at = now + _RETRY_S
                return []
            rank.gone = True
            return [unreachable(rank.number, error, rank.status, _UNREACHABLE_S)]
        except RayError as error:
            rank.gone = True
            alive = {node.id for node in self._group.cluster.view().nodes}
            return [death_of(rank.number, error, rank.status, node_lives=rank.node in alive)]
        rank.lost_at = None
        rank.heard += 1
        messages: list[Message] = []
        for item in said:
            if item[0] == ENDED:
                _, cause, output, status = item
                rank.gone = True
                rank.status = rank.status if status is None else decode_status(status)
                messages.append(Death(rank.number, cause, output, rank.status))
            else:
                _, table_size, header_size, body = item
                # A copy of its own: what lies in the object store is shared, and read only.
                header, tensors = Frame(bytearray(body), table_size, header_size).open()
                messages.append(wire.decode(header, tensors, self._allowed))
        if not rank.gone:
            self._listen(rank)
        return messages

    @property
    def _ranks(self) -> list[_Rank]:
        return [] if self._group is None else self._group.ranks

    # ---- looking in -----------------------------------------------------------------------------------------------
    def statuses(self) -> list[Status | None]:
        if self._group is None:
            return list(self._last)
        self._looked(0.0)  # what was asked for last time and came too late
        for rank in self._ranks:
            if not rank.gone and rank.looking is None:
                rank.looking = rank.actor.look.remote().future()
        self._looked(_LOOK_S)
        return [rank.status for rank in self._ranks]

    def _looked(self, timeout_s: float) -> None:
        """Take the statuses that come within ``timeout_s``."""
        for rank, found in _answered({r: r.looking for r in self._ranks if r.looking is not None}, timeout_s):
            rank.looking = None
            # From an actor that is gone nothing comes: what was seen last stands.
            if found is not None and not rank.gone:
                rank.status = decode_status(found)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        asked = {
            rank: rank.actor.stacks.remote().future() for rank in self._ranks if rank.number in ranks and not rank.gone
        }
        return {rank.number: text for rank, text in _answered(asked, _STACKS_S) if text}

    # ---- the end --------------------------------------------------------------------------------------------------
    def close(self, grace_s: float) -> None:
        try:
            if self._group is not None:
                stop = self._packed(Stop())
                for rank in self._ranks:
                    self.send(rank.number, stop)
                deadline = time.monotonic() + grace_s
                while any(not r.gone for r in self._ranks) and (left := deadline - time.monotonic()) > 0:
                    self.receive(left)
        finally:
            self.kill()

    def kill(self) -> None:
        # An impatient second Ctrl-C must not leave half of them.
        with shielded():
            if self._group is None:
                return
            group, self._group = self._group, None
            self._last = [rank.status for rank in group.ranks]
            try:
                _end(group)
            finally:
                group.cluster.release()


def _end(group: _Group) -> None:
    """End the ranks, then their actors, then give their places back."""
    import ray
    from ray.exceptions import RayError

    _answered({r: r.actor.end.remote().future() for r in group.ranks}, _END_S)
    for rank in group.ranks:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(rank.actor, no_restart=True)
    # A call that can only fail tells when an actor is gone.
    _answered({r: r.actor.end.remote().future() for r in group.ranks}, _END_S)
    group.cluster.remove(group.placement)


def _answered(asked: Mapping[_Rank, Future[Any]], timeout_s: float) -> list[tuple[_Rank, Any]]:
    """(rank, answer) of those that came within ``timeout_s``; None where the actor is gone."""
    from ray.exceptions import RayError

    done, _ = wait(asked.values(), timeout=timeout_s)
    found: list[tuple[_Rank, Any]] = []
    for rank, answer in asked.items():
        if answer in done:
            try:
                found.append((rank, answer.result()))
            except RayError:
                found.append((rank, None))
    return found


def _environment() -> dict[str, str]:
    """Variables of the actors, and so of the ranks: where the controller finds modules, and what starts as it should."""
    given = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES) and name != MARKER}
    # What the node's own Python brings along it finds itself.
    own = [Path(path).resolve() for path in {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix}]
    more = [
        path for path in sys.path if path and not any(Path(path).resolve().is_relative_to(prefix) for prefix in own)
    ]
    if more:
        given["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(more))
    return given
