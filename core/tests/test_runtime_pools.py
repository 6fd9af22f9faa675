"""Pools of a run: one without a role is refused, or neither started nor counted; each is ended whatever another does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from test_runtime_remote_engine import fake

from rlctl import device as devices
from rlctl.batch import pack
from rlctl.config.load import ResolvedConfig
from rlctl.config.schema import ActorConfig, RunConfig
from rlctl.device import Device
from rlctl.errors import RlctlError
from rlctl.microbatch import MicroBatchPlan
from rlctl.plugins import PluginSet
from rlctl.roles.actor import ActorRole
from rlctl.roles.budget import SkipBudget
from rlctl.runtime import collectives
from rlctl.runtime.pools import Pools
from rlctl.runtime.records import Boot, RankPlace
from rlctl.testing.fake_transport import CannedTransport
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers import setup


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, "data": {"train_files": ["rows.jsonl"]}, **sections})


class Ranks(CannedTransport):
    """Notes what it is started with; ``fault`` is raised when it is ended."""

    def __init__(self, size: int, fault: BaseException | None = None) -> None:
        super().__init__([RankPlace(r, r, size, True) for r in range(size)])
        self.boots: list[Boot] = []
        self.ended = False
        self._fault = fault

    def start(self, boots: Sequence[Boot]) -> None:
        self.boots = list(boots)
        super().start(boots)

    def close(self, grace_s: float) -> None:
        self.ended = True
        if self._fault is not None:
            raise self._fault


class ToyPools(Pools):
    def __init__(self, config: RunConfig, faults: dict[str, BaseException] | None = None) -> None:
        super().__init__(config, PluginSet(), Device("cuda", "nvidia"))
        self.ranks = {name: Ranks(n, (faults or {}).get(name)) for name, n in config.runtime.sizes().items()}

    def _transport(self, pool: str) -> Ranks:
        return self.ranks[pool]


APART = {"runtime": {"pools": {"a": {"nproc": 2}, "b": {"nproc": 1}}}, "actor": {"pool": "a"}, "rollout": {"pool": "b"}}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"runtime": {"pools": {"gen": {"nproc": 2}}}}, "runtime.pools has gen, where no role lives"),
        ({**APART, "runtime": {**APART["runtime"], "nproc": 4}}, "runtime.nproc is 4, and no role lives"),
        ({"runtime": {"pools": {"../gen": {}}}, "rollout": {"pool": "../gen"}}, "pools has '../gen'"),
    ],
)
def test_pools_that_nothing_would_run_in_are_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(**sections)


def test_only_pools_with_a_role_count() -> None:
    """An empty main pool takes neither a device nor a share of the throughput."""
    pools = ToyPools(config(**APART))
    assert pools.num_ranks == 3
    pools.group("b")
    assert [boot.local_rank for boot in pools.ranks["b"].boots] == [2]
    assert config(**APART, trainer={"type": "sft"}).pools_used() == {"a": 2}
    # A reference without a KL does not take part.
    look = {"runtime": {"nproc": 2, "pools": {"look": {}}}, "ref": {"pool": "look"}}
    assert config(**look).pools_used() == {"main": 2}
    assert config(**look, actor={"use_kl_loss": True}).pools_used() == {"main": 2, "look": 1}


def test_the_only_rank_of_a_later_pool_takes_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(devices, "set_device", lambda device, local_rank: taken.append(local_rank))
    pools = ToyPools(config(**APART))
    pools.group("b")
    collectives.join(pools.ranks["b"].boots[0], Device("cuda", "nvidia"))
    assert taken == [2]


def test_every_pool_is_ended_when_one_cannot_be() -> None:
    for stuck in ("a", "b"):
        pools = ToyPools(config(**APART), {stuck: OSError("stuck")})
        pools.group("a")
        pools.group("b")
        with pytest.raises(OSError, match="stuck"):
            pools.close()
        assert all(pools.ranks[name].ended for name in ("a", "b"))


def test_a_pool_that_is_interrupted_as_it_starts_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlctl.runtime.group import WorkerGroup

    start = WorkerGroup.start

    def interrupted(group: WorkerGroup) -> None:
        start(group)
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkerGroup, "start", interrupted)
    pools = ToyPools(config(**APART))
    with pytest.raises(KeyboardInterrupt):
        pools.group("a")
    pools.close()
    assert pools.ranks["a"].ended


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_of_nothing_has_no_largest_difference(world_size: int) -> None:
    """All advantages zero: the step is taken, and reports no maximum, which would be that of no token."""
    batch = pack(
        {"input_ids": [[1, 2, 3], [4, 5]], "loss_mask": [[False, True, True], [False, True]]},
        dtypes={"loss_mask": torch.bool},
    )
    zeros = torch.zeros(batch.num_items)
    batch = batch.with_items(advantages=zeros, rollout_log_probs=zeros - 1)
    with fake(world_size, {}) as engine:
        actor = ActorRole(engine, ActorConfig(), MicroBatchPlan(max_rows=2), 8, SkipBudget(0))
        nothing = actor.update(batch, 2, set(), torch.Generator())
        some = actor.update(batch, 2, {0}, torch.Generator())
    assert "training/rollout_probs_diff_max" not in nothing
    assert all(map(torch.isfinite, map(torch.tensor, nothing.values())))
    assert some["training/rollout_probs_diff_max"] >= some["training/rollout_probs_diff_mean"] > 0


@pytest.mark.parametrize(
    ("seen", "launcher", "refused"), [(2, "process", True), (3, "process", False), (2, "ray", False)]
)
def test_too_few_devices_for_all_pools_are_seen_before_one_starts(
    monkeypatch: pytest.MonkeyPatch, seen: int, launcher: str, refused: bool
) -> None:
    monkeypatch.setattr(devices, "is_available", lambda device: True)
    monkeypatch.setattr(devices, "device_count", lambda device: seen)
    apart = {**APART, "runtime": {**APART["runtime"], "launcher": launcher}}
    pools = ToyPools(config(**apart))
    context = setup.Context(
        ResolvedConfig(config(**apart), {}, Path(), "toy"), PluginSet(), Device("cuda", "nvidia"), NullReporter(), pools
    )
    with pytest.raises(RlctlError) as caught:  # without plugins no backend answers: the next check
        setup.check_roles(context, context.config.model)
    assert ("more ranks than this host has cuda devices" in str(caught.value)) is refused
    assert not any(ranks.boots for ranks in pools.ranks.values())
