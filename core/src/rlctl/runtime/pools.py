"""The worker groups of a run, by pool. A group starts when the first engine is built in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from rlctl.config.schema import RunConfig
from rlctl.device import Device
from rlctl.interpreters.program import Program
from rlctl.plugins import PluginSet
from rlctl.runtime.boots import make_boots, threads_of_a_rank
from rlctl.runtime.group import Limits, WorkerGroup
from rlctl.runtime.records import Boot
from rlctl.runtime.transports.base import Transport
from rlctl.runtime.transports.inline import InlineTransport
from rlctl.runtime.worker import Worker


class Pools:
    """Starts groups, keeps them, and ends them all.

    Args:
        log_dir: where ranks of other processes write what they print; may be set until the first group starts.
        notice: told what a backend has to say once (aliases, left-out wrappers), and what is started.
    """

    def __init__(
        self,
        config: RunConfig,
        plugins: PluginSet,
        device: Device,
        *,
        log_dir: Path | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self._config = config
        self._plugins = plugins
        self._device = device
        self.log_dir = log_dir
        self._notice = notice or (lambda text: None)
        self._groups: dict[str, WorkerGroup] = {}
        self.before_close = ExitStack()
        """Called before the groups end: for who uses them from another thread."""
        self.launcher = config.runtime.chosen_launcher()

    @property
    def num_ranks(self) -> int:
        """Ranks of all pools together where a role lives."""
        return sum(self._config.pools_used().values())

    def size(self, pool: str) -> int:
        """Ranks of one pool."""
        return self._config.runtime.sizes()[pool]

    def python(self, pool: str) -> str | None:
        """The interpreter of one pool; None for this one."""
        return self._config.runtime.python_of(pool)

    def started(self, pool: str) -> bool:
        """True once the group of ``pool`` runs."""
        return pool in self._groups

    def group(self, pool: str) -> WorkerGroup:
        """The running group of ``pool``; starts it the first time.

        Raises:
            RlctlError: it cannot be started.
        """
        if pool not in self._groups:
            runtime = self._config.runtime
            limits = Limits(runtime.start_timeout_s, runtime.hang_timeout_s, runtime.failure_grace_s)
            group = WorkerGroup(
                pool, self._transport(pool), self._boots(pool), Worker, limits, python=self.python(pool)
            )
            self._groups[pool] = group  # before it starts: whatever interrupts that, close() finds it
            try:
                group.start()
            except BaseException:
                if group.closed:
                    del self._groups[pool]
                raise
        return self._groups[pool]

    def close(self) -> None:
        """End every group, kindly."""
        with ExitStack() as stack:  # one that cannot end must not keep the others
            for group in self._groups.values():
                stack.callback(group.close)
            stack.callback(self.before_close.close)

    def describe(self) -> dict[str, object]:
        """For the manifest: launcher, and each pool's interpreter, versions, and ranks with host and process id."""
        pools = {
            name: {
                "nproc": group.world_size,
                "python": group.hellos[0].executable,
                "versions": {"python": group.hellos[0].python, **self._versions(name), **group.hellos[0].versions},
                "ranks": [{"host": h.host, "pid": h.pid} for h in group.hellos],
            }
            for name, group in self._groups.items()
        }
        return {"launcher": self.launcher, "pools": pools}

    def _versions(self, pool: str) -> Mapping[str, str]:
        """Of what the manifest's own list of versions, which is this interpreter's, does not say."""
        python = self.python(pool)
        if python is None:
            return {}
        from rlctl.interpreters.asking import look

        return look(python).versions

    def _transport(self, pool: str) -> Transport:
        if self.launcher == "inline":
            return InlineTransport(lambda boot: Worker(boot, self._plugins, self._notice))
        logs = None if self.log_dir is None else self.log_dir / pool
        python = self.python(pool)
        program = None if python is None else Program.of(python)
        if self.launcher == "process":
            from rlctl.runtime.transports.process import ProcessTransport

            return ProcessTransport(log_dir=logs, program=program)
        from rlctl.runtime.transports.ray import RayTransport

        ray = self._config.runtime.ray
        return RayTransport(
            ray.address,
            strategy=ray.strategy,
            cpus_per_rank=ray.cpus_per_rank,
            placement_timeout_s=ray.placement_timeout_s,
            log_dir=logs,
            notice=self._notice,
            program=program,
        )

    def _boots(self, pool: str) -> list[Boot]:
        size = self.size(pool)
        # Pools of one host share its devices: each takes those behind the pools before it.
        before = 0
        for name, other in self._config.pools_used().items():
            if name == pool:
                break
            before += other
        first = before if self._device.type != "cpu" and self.launcher == "process" else 0
        return make_boots(
            pool,
            size,
            self._device,
            num_threads=self._threads(),
            collective_timeout_s=self._config.runtime.collective_timeout_s,
            first_local_rank=first,
        )

    def _threads(self) -> int | None:
        """CPU threads of a rank: as configured, else the cores of this host shared by its ranks."""
        wanted = self._config.trainer.num_threads
        if wanted is not None or self.launcher == "inline":
            return wanted
        # The nodes of a Ray cluster have cores of their own.
        return threads_of_a_rank(self.num_ranks) if self.launcher == "process" else None
