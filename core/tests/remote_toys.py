"""Engines over many ranks that answer at once, and batches in which every mix-up of rows shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlctl.batch import PackedBatch, pack
from rlctl.microbatch import MicroBatchPlan
from rlctl.runtime.group import WorkerGroup
from rlctl.runtime.records import Boot, BuildSpec, RankPlace
from rlctl.runtime.remote import RemoteEngine
from rlctl.runtime.worker import Worker
from rlctl.testing.fake_transport import CannedTransport
from rlctl.topology import Topology

PLAN = MicroBatchPlan(max_rows=2)


def canned(dp_size: int, tp: int = 1, echo: str | None = "input_ids", **engine: Any) -> RemoteEngine:
    """Ranks whose scores of a token are the token itself."""
    topology = Topology(dp_size * tp, dp_shard=dp_size, tp=tp)
    places = [RankPlace(r, topology.dp_rank(r), dp_size, topology.is_collector(r)) for r in range(topology.world_size)]
    boots = [Boot(rank=r, world_size=len(places)) for r in range(len(places))]
    group = WorkerGroup("canned", CannedTransport(places, echo), boots, Worker)
    group.start()
    spec = BuildSpec("actor", "train", "none", {}, {}, {})
    return RemoteEngine.build(group, spec, **engine)


def numbered(lengths: Sequence[int], groups: Sequence[int] | None = None) -> PackedBatch:
    """Every token has an id of its own, so that any mix-up shows."""
    at, rows = 1, []
    for n in lengths:
        rows.append(list(range(at, at + n)))
        at += n
    masks = [[t > 0 for t in range(n)] for n in lengths]
    batch = pack({"input_ids": rows, "loss_mask": masks}, dtypes={"loss_mask": torch.bool})
    return batch if groups is None else batch.with_rows(group=torch.tensor(groups))
