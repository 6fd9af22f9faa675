"""Weights between two pools, as the controller has them carried: over a link where one fits, else through its own hands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlctl.runtime.links import LinkPlan
from rlctl.runtime.together import Part, call_together
from rlctl.runtime.transfer import CONTROLLER, Whereabouts, Wish, choose
from rlctl.runtime.weights import Received, Sent
from rlctl.sync import SyncReport, check_coverage, check_fingerprints

if TYPE_CHECKING:
    from rlctl.runtime.remote import RemoteEngine

MIB = 2**20
BUCKET_MIB = 256
CPU_BUCKET_MIB = 32
"""Between CPUs small buckets are faster: less memory is touched for the first time, and packing overlaps sooner."""


@dataclass(frozen=True)
class Transfer:
    """How weights shall travel between pools.

    Args:
        wish: ``auto`` (a link where one fits), ``controller``, ``collective`` or ``host`` (such a link, or an error).
        bucket_mib: size of a bucket; each side of a link holds two. None: :func:`bucket_mib`.
    """

    wish: Wish = "auto"
    bucket_mib: int | None = None


def bucket_mib(device: str) -> int:
    """MiB of a bucket over a link between devices of this type."""
    return CPU_BUCKET_MIB if device == "cpu" else BUCKET_MIB


class Carriage:
    """From one training engine to one rollout engine of another pool. Where the ranks are is asked once."""

    def __init__(self, source: RemoteEngine, target: RemoteEngine, transfer: Transfer) -> None:
        self._source, self._target, self._transfer = source, target, transfer
        self._chosen = False
        self._plan: LinkPlan | None = None
        self._count = 0

    def sync(self, version: int, *, verify: bool, dtype: str | None) -> SyncReport:
        """One sync, checked.

        Raises:
            CapabilityError: a link is wished for and none fits.
            GuardError: a name was exported twice or not loaded, or a fingerprint differs.
            RlctlError: a rank failed; the ranks of both pools have ended then.
        """
        start = time.perf_counter()
        if not self._chosen:
            self._plan = self._choose()
            self._chosen = True
        if self._plan is None:
            how, (sent, received) = CONTROLLER, self._by_controller(version, verify, dtype)
        else:
            how, (sent, received) = self._plan.name, self._over_link(self._plan, version, verify, dtype)
        target = self._target
        for one in received:
            check_coverage(sent.fingerprints, one.answer, version)
        if verify:
            for served in target.group.call("fingerprint", target.role, tuple(sent.fingerprints)):
                check_fingerprints(sent.fingerprints, served, version)
        peak = max(sent.peak_bytes, *(one.peak_bytes for one in received))
        return SyncReport(version, how, len(sent.fingerprints), sent.num_bytes, time.perf_counter() - start, peak)

    def _choose(self) -> LinkPlan | None:
        if self._transfer.wish == CONTROLLER:
            return None
        source, target = self._source, self._target
        sender: Whereabouts = source.group.call("whereabouts", source.role)[0]
        receivers: Sequence[Whereabouts] = target.group.call("whereabouts", target.role)
        spec = choose(self._transfer.wish, sender, receivers)
        if spec is None:
            return None
        loopback = all(r.address == sender.address for r in receivers)
        url: str = source.group.call("meeting_place", loopback)
        mib = self._transfer.bucket_mib or bucket_mib(sender.device)
        return LinkPlan(spec.name, url, 1 + len(receivers), mib * MIB)

    def _over_link(
        self, plan: LinkPlan, version: int, verify: bool, dtype: str | None
    ) -> tuple[Sent, Sequence[Received]]:
        source, target = self._source, self._target
        self._count += 1
        doing = (
            f"sync {version}: weights of {source.role} in pool {source.group.name} to {target.role} in pool "
            f"{target.group.name} by {plan.name}"
        )
        sent, received = call_together(
            [
                Part(source.group, "send_weights", (source.role, plan, self._count, version, dtype, verify)),
                Part(target.group, "receive_weights", (target.role, plan, self._count, version)),
            ],
            doing=doing,
        )
        return sent[0], received

    def _by_controller(self, version: int, verify: bool, dtype: str | None) -> tuple[Sent, Sequence[Received]]:
        source, target = self._source, self._target
        num_bytes = largest = 0
        max_bytes = (self._transfer.bucket_mib or BUCKET_MIB) * MIB
        source.group.call("export_open", source.role, dtype, verify)
        target.group.call("load_open", target.role, version)
        while bucket := source.group.call("export_next", source.role, max_bytes)[0]:
            size = sum(t.numel() * t.element_size() for t in bucket.values())
            num_bytes, largest = num_bytes + size, max(largest, size)
            target.group.call("load_next", target.role, bucket)
        sent: Mapping[str, str] = source.group.call("export_close", source.role)[0]
        answers: list[Mapping[str, Any]] = target.group.call("load_close", target.role)
        # A rollout rank loads one bucket, has one in its queue and one that waits for a place there.
        return Sent(sent, num_bytes, largest), [Received(answer, 3 * largest) for answer in answers]
