"""Worker groups for the topologies under test: one for each world size, kept while topologies of that size follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlctl.device import Device
from rlctl.plugins import PluginSet
from rlctl.runtime.boots import make_boots, threads_of_a_rank
from rlctl.runtime.group import Limits, WorkerGroup
from rlctl.runtime.transports.base import Transport
from rlctl.runtime.transports.inline import InlineTransport
from rlctl.runtime.worker import Worker


class Ranks:
    """Starts a group when one is needed, and ends it when another size is.

    Args:
        timeout_s: limit of one collective, and of a rank that makes no progress.
        log_dir: where ranks of other processes write what they print.
    """

    def __init__(
        self,
        plugins: PluginSet,
        device: Device,
        *,
        timeout_s: float,
        log_dir: Path | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self._plugins = plugins
        self.device = device
        self._timeout_s = timeout_s
        self._log_dir = log_dir
        self._notice = notice or (lambda text: None)
        self._group: WorkerGroup | None = None
        self.starts = 0

    def group(self, world_size: int, *, fresh: bool = False) -> WorkerGroup:
        """A running group of ``world_size`` ranks.

        Args:
            fresh: not one that has run a topology before.

        Raises:
            RlctlError: it cannot be started.
        """
        known = self._group
        if known is not None and (fresh or known.closed or known.world_size != world_size):
            self.close()
        if self._group is None:
            limits = Limits(hang_s=self._timeout_s)
            boots = make_boots(
                "verify",
                world_size,
                self.device,
                num_threads=threads_of_a_rank(world_size) if world_size > 1 else None,
                collective_timeout_s=self._timeout_s,
            )
            group = WorkerGroup("verify", self._transport(world_size), boots, Worker, limits)
            group.start()
            self._group = group
            self.starts += 1
        return self._group

    def close(self) -> None:
        """End the present group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def kill(self) -> None:
        """End the present group now."""
        if self._group is not None:
            self._group.kill()
            self._group = None

    def _transport(self, world_size: int) -> Transport:
        if world_size == 1:
            return InlineTransport(lambda boot: Worker(boot, self._plugins, self._notice))
        from rlctl.runtime.transports.process import ProcessTransport

        return ProcessTransport(log_dir=self._log_dir)
