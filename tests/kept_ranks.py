"""Two processes that serve many runs, one after the other: starting them costs more than a tiny run's training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rlctl.runtime.group import WorkerGroup
from rlctl.runtime.pools import Pools
from rlctl.trainers import setup

ROLES = ("rollout", "ref", "teacher", "actor", "warm_start", "teacher_training")


@contextmanager
def kept_ranks() -> Iterator[list[int]]:
    """Every run on several processes takes over those of the first run of its size; their ids, once they run."""
    kept: dict[int, WorkerGroup] = {}
    pids: list[int] = []

    class Kept(Pools):
        def group(self, pool: str) -> WorkerGroup:
            size = self.size(pool)
            if size == 1:
                return super().group(pool)
            if size not in kept:
                kept[size] = super().group(pool)
                pids.extend(hello.pid for hello in kept[size].hellos)
            self._groups[pool] = kept[size]
            return kept[size]

        def close(self) -> None:
            for pool, group in list(self._groups.items()):
                if group in kept.values():
                    for role in ROLES:
                        group.call("drop", role)
                    del self._groups[pool]
            super().close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "Pools", Kept)
        yield pids
    for group in kept.values():
        group.close()
