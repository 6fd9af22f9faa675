"""A rollout that rests: what it gives back, and in which order it comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlctl.config.schema import RolloutConfig
from rlctl.roles.rollout import RolloutRole


class Recorder:
    """A rollout engine, and a training engine that syncs to it: what they were asked, in order."""

    def __init__(self, *, frees: bool) -> None:
        self.asked: list[str] = []
        self._frees = frees

    def release(self, *parts: str) -> bool:
        self.asked.append(f"release {' '.join(parts)}")
        return self._frees

    def resume(self, *parts: str) -> bool:
        self.asked.append(f"resume {' '.join(parts)}")
        return True

    def sync_to(self, *_: Any, **__: Any) -> Any:
        self.asked.append("sync")
        return SimpleNamespace(how="copy")

    def generate(self, *_: Any) -> list[Any]:
        self.asked.append("generate")
        return []


def role(engine: Recorder, *, free: bool) -> RolloutRole:
    return RolloutRole(cast(Any, engine), RolloutConfig(free_cache_engine=free), 8)


def test_the_weights_come_back_before_a_sync_and_the_cache_after_it() -> None:
    engine = Recorder(frees=True)
    rollout = role(engine, free=True)
    for _ in range(2):
        rollout.sample([[1]], 0)
        assert rollout.rest() is None
        assert rollout.rest() is None  # it rests already
        rollout.sync(cast(Any, engine))
    assert engine.asked == 2 * ["generate", "release weights kv", "resume weights", "sync", "resume kv"]


@pytest.mark.parametrize("mode", ["sample", "greedy", "validate"])
def test_who_samples_wakes_all_of_it(mode: str) -> None:
    engine = Recorder(frees=True)
    rollout = role(engine, free=True)
    rollout.rest()
    getattr(rollout, mode)([[1]], 0)
    assert engine.asked == ["release weights kv", "resume weights kv", "generate"]


def test_an_engine_that_frees_nothing_is_told_of_once() -> None:
    engine = Recorder(frees=False)
    rollout = role(engine, free=True)
    told = []
    for _ in range(3):
        told.append(rollout.rest())
        rollout.sync(cast(Any, engine))
    assert [note is not None for note in told] == [True, False, False]
    assert engine.asked == 3 * ["release weights kv", "sync"]


def test_without_the_switch_nothing_rests() -> None:
    engine = Recorder(frees=True)
    rollout = role(engine, free=False)
    assert rollout.rest() is None
    rollout.sync(cast(Any, engine))
    assert engine.asked == ["sync"]
