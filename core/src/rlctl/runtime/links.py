"""The links of one rank to ranks of other pools: made at an engine's first sync, kept as long as the engine."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from rlctl import device as devices
from rlctl.declare import load_object
from rlctl.plugins import PluginSet
from rlctl.runtime import meeting
from rlctl.runtime.phases import phase
from rlctl.runtime.records import Boot
from rlctl.runtime.room import room
from rlctl.runtime.transfer import LinkEnd, WeightLink, Whereabouts, offered


@dataclass(frozen=True)
class LinkPlan:
    """A link as the controller tells it to both pools.

    Args:
        name: of the transport, see :func:`rlctl.runtime.transfer.offered`.
        url, size, bucket_bytes: see :class:`rlctl.runtime.transfer.LinkEnd`.
    """

    name: str
    url: str
    size: int
    bucket_bytes: int


class Links:
    """See the module."""

    def __init__(self, boot: Boot, plugins: PluginSet) -> None:
        self._boot = boot
        self._plugins = plugins
        self._links: dict[tuple[str, LinkPlan], WeightLink] = {}
        self._holders: dict[str, socket.socket] = {}

    def whereabouts(self, device: str) -> Whereabouts:
        """Where this rank is, with its weights on ``device``."""
        kind = device.partition(":")[0]
        return Whereabouts(
            self._boot.address,
            kind,
            devices.unit(device),
            offered(self._plugins),
            room() if kind == "cpu" else "",
            devices.collective_library(kind),
        )

    def meeting_place(self, *, loopback: bool) -> str:
        """A URL at which this rank will wait for the others: on the host's loopback, or where other hosts reach it."""
        holder, url = meeting.reserve("127.0.0.1" if loopback else self._boot.address)
        self._holders[url] = holder
        return url

    def get(self, role: str, plan: LinkPlan, rank: int, device: str) -> WeightLink:
        """This rank's end of a link. Collective the first time.

        Args:
            role: of the engine here.
            rank: in the link.
            device: of the weights here.
        """
        if (role, plan) not in self._links:
            target = next(spec.target for spec in offered(self._plugins) if spec.name == plan.name)
            end = LinkEnd(
                plan.url,
                rank,
                plan.size,
                devices.indexed(device),
                self._boot.collective_timeout_s,
                plan.bucket_bytes,
                f"rank {self._boot.rank} of pool {self._boot.pool}",
            )
            with phase("sync"):
                self._links[role, plan] = load_object(target)(end)
            if (holder := self._holders.pop(plan.url, None)) is not None:
                holder.close()
        return self._links[role, plan]

    def drop(self, role: str) -> None:
        """Leave those of one engine."""
        for key in [key for key in self._links if key[0] == role]:
            self._links.pop(key).close()

    def close(self) -> None:
        """Leave all of them."""
        while self._links:
            self._links.popitem()[1].close()
        while self._holders:
            self._holders.popitem()[1].close()
