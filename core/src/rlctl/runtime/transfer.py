"""Which way weights go from the training pool to the rollout pool.

In one pool there is nothing to choose: an engine hands over to its neighbour in the same process (:mod:`rlctl.sync`).
Between pools a *link* carries them from rank to rank, if both pools offer one that fits where they are; else they go by the
controller. Links are records (``rlctl_weight_transports``): core's own are :data:`OWN`, plugins add theirs, and a rank
offers those of its environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rlctl.errors import CapabilityError
from rlctl.records import WeightTransportSpec

if TYPE_CHECKING:
    import torch

    from rlctl.plugins import PluginSet

Wish = Literal["auto", "controller", "collective", "host"]

OWN = (
    WeightTransportSpec(
        "cuda_ipc", "rlctl.runtime.link:CudaIpcLink", "device", ("cuda",), "packed buckets in memory of one GPU"
    ),
    WeightTransportSpec(
        "shared_memory",
        "rlctl.runtime.link:SharedMemoryLink",
        "host",
        ("cpu",),
        "packed buckets in memory that CPU processes of one host map",
    ),
    WeightTransportSpec(
        "gloo", "rlctl.runtime.link:PackedLink", "network", ("cpu",), "packed buckets, broadcast between CPU processes"
    ),
    WeightTransportSpec(
        "nccl", "rlctl.runtime.link:PackedLink", "network", ("cuda",), "packed buckets, broadcast between GPUs"
    ),
)
CONTROLLER = "controller"
"""How weights travel where no link fits: to the controller and from there to each rank, on the CPU."""

_REACH = ("device", "host", "network")
"""What a link between processes may reach; the nearest is the cheapest."""
_WISHED = {"auto": _REACH, "collective": ("network",), "host": ("device", "host")}


@dataclass(frozen=True)
class LinkEnd:
    """One rank's end of a link.

    Args:
        url: where the ranks meet, ``tcp://HOST:PORT``; the sender serves it.
        rank, size: in the link: 0 sends, 1 to ``size - 1`` receive.
        device: of the weights, as torch writes it (``cuda:1``).
        timeout_s: limit of each wait for another rank.
        bucket_bytes: of a bucket; each side holds two.
        who: this rank in words, for the others' messages.
    """

    url: str
    rank: int
    size: int
    device: str
    timeout_s: float
    bucket_bytes: int
    who: str


class WeightLink(Protocol):
    """What the ``target`` of a :class:`WeightTransportSpec` makes: one rank's end of a link.

    Made as ``Class(end)`` with a :class:`LinkEnd`, on the sender and on every receiver at the same
    time, and kept from sync to sync. The sender says in words why it stops; no rank waits longer than the end's time limit.
    """

    peak_bytes: int
    """The most bytes that the last sync held here beside the engine's own."""

    def send(self, weights: Iterator[tuple[str, torch.Tensor]], number: int) -> None:
        """On rank 0: send every tensor, in order, in the ``number``-th sync. Raises PeerFailedError for a receiver's doing."""
        ...

    def receive(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """On the others: what is sent, each tensor good until the next is asked for."""
        ...

    def give_up(self, words: str) -> None:
        """On a receiver that has failed: let the others know, and leave nobody waiting. Never raises."""
        ...

    def close(self) -> None:
        """Leave. Not collective."""
        ...


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is, for the choice.

    Args:
        address: of its host, as the other ranks reach it.
        device: type of device that its engine's weights are on.
        unit: which device of all, where that can be told (a GPU's own id).
        room: the same for processes that can map one another's memory; empty where none can.
        offers: the links of its environment.
        made_of: what core's own links are made of there (``torch 2.13.0``). Its versions do not talk to each other.
    """

    address: str
    device: str
    unit: str
    offers: tuple[WeightTransportSpec, ...]
    room: str = ""
    made_of: str = ""


def offered(plugins: PluginSet) -> tuple[WeightTransportSpec, ...]:
    """Core's links and those of the plugins; a name of core's is core's."""
    own = {spec.name for spec in OWN}
    found = [record for _, record in plugins.records("rlctl_weight_transports")]
    return (*OWN, *(spec for spec in found if spec.name not in own and spec.scope in _REACH))


def choose(wish: Wish, sender: Whereabouts, receivers: Sequence[Whereabouts]) -> WeightTransportSpec | None:
    """The link to use, None for the controller: of those that fit all ranks the one that reaches least far.

    Raises:
        CapabilityError: ``wish`` is ``collective`` or ``host`` and none fits; says why.
    """
    if wish == CONTROLLER:
        return None
    ranks = (sender, *receivers)
    devices = sorted({r.device for r in ranks})
    units = [r.unit for r in ranks if r.unit]
    common = [s for s in sender.offers if s.scope in _WISHED[wish] and all(s in r.offers for r in receivers)]
    one_host = len({(r.address, r.room) for r in ranks}) == 1
    reached = {
        "device": len(units) == len(ranks) and len(set(units)) == 1,
        "host": one_host,
        "network": len(units) == len(set(units)),  # collectives refuse two ranks on one device
    }
    libraries = sorted({r.made_of for r in ranks})
    if len(libraries) > 1:
        common = [spec for spec in common if spec not in OWN]
    if not sender.room:
        common = [spec for spec in common if spec.name != "shared_memory"]
    if len(devices) > 1:
        why = f"weights on {' and '.join(devices)}"
    else:
        fitting = [s for s in common if devices[0] in s.devices and reached[s.scope]]
        if fitting:
            return min(fitting, key=lambda spec: _REACH.index(spec.scope))
        why = f"links for {', '.join(f'{d} ({s.name})' for s in common for d in s.devices) or 'nothing'}"
        why += "" if one_host or wish != "host" else ", and ranks that cannot map one another's memory"
        why += "" if reached["network"] or wish != "collective" else f", and two ranks on one {devices[0]} device"
        why += "" if len(libraries) == 1 else f", as core's own do not join {' and '.join(libraries)}"
    if wish != "auto":
        raise CapabilityError(
            "no link between the training and the rollout ranks fits",
            found=why,
            wanted="all ranks on one kind of device with collectives, each rank on a device of its own, and one version of torch"
            if wish == "collective"
            else "all ranks of one user on one host's CPUs or on one GPU, and one version of torch",
            next="runtime.weight_transport=auto takes whatever way there is",
        )
    return None
