"""Processes that serve many runs, one after the other: starting them costs more than a tiny run's training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rlctl.runtime.group import WorkerGroup
from rlctl.runtime.pools import Pools
from rlctl.trainers import setup

ROLES = ("rollout", "ref", "critic", "teacher", "actor", "warm_start", "teacher_training")


@contextmanager
def kept_ranks(least: int = 2) -> Iterator[list[int]]:
    """Every run takes over the processes that an earlier one has started for a pool of that name and size.

    Args:
        least: pools of fewer ranks are left to the run.

    Yields:
        the ids of all kept processes that run so far, pool by pool.
    """
    kept: dict[tuple[str, int], WorkerGroup] = {}
    pids: list[int] = []

    class Kept(Pools):
        def group(self, pool: str) -> WorkerGroup:
            key = pool, self.size(pool)
            if key[1] < least or self.launcher == "inline":
                return super().group(pool)
            if key not in kept:
                kept[key] = super().group(pool)
                pids.extend(hello.pid for hello in kept[key].hellos)
            self._groups[pool] = kept[key]
            return kept[key]

        def close(self) -> None:
            for pool, group in list(self._groups.items()):
                if group in kept.values():
                    del self._groups[pool]
                    if group.closed:  # by an error of the run; the next one starts its own
                        del kept[pool, group.world_size]
                        continue
                    for role in ROLES:
                        group.call("drop", role)
            super().close()

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(setup, "Pools", Kept)
            yield pids
    finally:
        for group in kept.values():
            group.close()
