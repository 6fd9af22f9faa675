"""Rollouts that are sampled one step ahead: how old they are, that a run repeats and resumes, and what is left when one ends."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlctl.checkpoint import list_checkpoints
from rlctl.config.load import load_config
from rlctl.errors import ConfigError, RlctlError
from rlctl.plugins import load_plugins
from rlctl.roles.actor import ActorRole
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.ahead import Flight
from rlctl.trainers.run import Runner, RunResult

pytestmark = pytest.mark.slow

OWN_POOL = ("rollout.pool=gen", "runtime.pools={gen: {nproc: 1}}")
# An entropy term moves every step, so that nothing has to be learnt for the policy to change.
SETTINGS = (
    "warm_start=null",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.val_before_train=false",
    "trainer.logger=[jsonl]",
    "trainer.num_threads=1",
    "data.task.val_size=4",
    "data.train_batch_size=4",
    "rollout.n=4",
    "actor.entropy_coeff=0.5",
    "actor.optim.lr=0.01",
    "trainer.max_staleness=1",
    *OWN_POOL,
)
CLOCK = ("timing_s/", "perf/", "sync/seconds", "sync/peak_bytes", "training/unix_time")
ROOT = Path(__file__).parents[1]


def runner(folder: Path, *overrides: str, resume: bool = False) -> Runner:
    plugins = load_plugins()
    resolved = load_config("quickstart", [*SETTINGS, *overrides], plugins=plugins)
    where: dict[str, Any] = {"resume": folder} if resume else {"run_dir": folder}
    return Runner(resolved, plugins, NullReporter(), **where)


def numbers(result: RunResult) -> list[str]:
    """Each step's metrics as text (one may rightly be nan), without clocks."""
    return [str({k: v for k, v in m.items() if not k.startswith(CLOCK)}) for m in result.history]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened in which order: ``sample N`` as batch N begins, ``update`` as an optimizer step begins."""
    events: list[str] = []
    begin, step = Flight.begin, ActorRole._step

    def beginning(self: Flight, sample: Callable[[], Any]) -> None:
        events.append(f"sample {sum(e.startswith('sample') for e in events) + 1}")
        begin(self, sample)

    def stepping(self: ActorRole, mini: Any, *, first: bool) -> Any:
        events.append("update")
        return step(self, mini, first=first)

    monkeypatch.setattr(Flight, "begin", beginning)
    monkeypatch.setattr(ActorRole, "_step", stepping)
    return events


def test_batches_are_sampled_beside_the_update_and_a_resumed_run_goes_on_as_an_unbroken_one(
    tmp_path: Path, watched: list[str]
) -> None:
    whole = runner(tmp_path / "whole").execute()
    # The next batch is under way before each update, but not over a checkpoint or the end.
    assert watched == ["sample 1", "sample 2", "update", "update", "sample 3", "sample 4", "update", "update"]
    assert [m["training/staleness_max"] for m in whole.history] == [0, 1, 0, 1]
    gaps = [m["training/rollout_probs_diff_mean"] for m in whole.history]
    # Said by the policy itself: rows of the policy that learns from them have its probabilities, older ones others.
    assert max(gaps[0], gaps[2]) < 1e-6
    assert min(gaps[1], gaps[3]) > 1e-3
    assert all(m["perf/time_per_gen"] > 0 and m["perf/gen_throughput"] > 0 for m in whole.history)
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert all(
        f"`{name}`" in page for name in ("training/staleness_mean", "training/staleness_max", "perf/time_per_gen")
    )

    broken = tmp_path / "broken"
    shutil.copytree(whole.path, broken)
    shutil.rmtree(dict(list_checkpoints(broken))[4])
    resumed = runner(broken, resume=True).execute()
    assert numbers(resumed) == numbers(whole)[2:]
    files = [load_file(run.path / "export" / "model.safetensors") for run in (whole, resumed)]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    assert len(files[0]) > 10


def test_the_ratio_of_stale_rows_is_to_their_own_policy_unless_told_otherwise() -> None:
    own = load_config("quickstart", [*SETTINGS], plugins=load_plugins()).config.algorithm.rollout_correction
    assert own is not None
    assert (own.rollout_is, own.bypass_mode) == (None, True)
    weights = "algorithm.rollout_correction={rollout_is: token}"
    kept = load_config("quickstart", [*SETTINGS, weights], plugins=load_plugins()).config.algorithm.rollout_correction
    assert kept is not None
    assert (kept.rollout_is, kept.bypass_mode) == ("token", False)
    off = load_config("quickstart", [*SETTINGS, "trainer.max_staleness=0"], plugins=load_plugins())
    assert off.config.algorithm.rollout_correction is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("rollout.pool=main", "runtime.pools={}"), "shares the processes of pool main with actor"),
        (("ref.pool=gen", "actor.use_kl_loss=true"), "shares the processes of pool gen with ref"),
        (("algorithm.adv_estimator=remax",), "remax needs a greedy completion"),
        (("trainer.max_staleness=2",), "at most 1"),
    ],
)
def test_what_cannot_be_sampled_ahead_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [*SETTINGS, *overrides], plugins=load_plugins())
    assert words in str(caught.value)


def test_a_checkpoint_in_every_step_is_said_to_leave_nothing_to_sample_ahead(tmp_path: Path) -> None:
    told: list[str] = []
    run = runner(tmp_path / "run", "trainer.save_freq=1", "trainer.total_training_steps=2")
    run.reporter.message = told.append  # type: ignore[method-assign]
    result = run.execute()
    assert [m["training/staleness_max"] for m in result.history] == [0, 0]
    assert any("trainer.max_staleness does nothing here" in text for text in told)
    # Both pools have one rank, and neither is called "one process".
    assert any("pools main 1, gen 1 by process)" in text for text in told), told


def test_dynamic_sampling_draws_ahead_too(tmp_path: Path, watched: list[str]) -> None:
    more = (
        "algorithm.filter_groups.metric=score",
        "algorithm.filter_groups.max_num_gen_batches=8",
        "data.train_batch_size=2",
    )
    varied = "reward.components=[{name: contains, args: {text: '1'}}]"
    result = runner(tmp_path / "run", *more, varied, "trainer.save_freq=0").execute()
    batches = [int(m["train/num_gen_batches"]) for m in result.history]
    assert sum(batches) == sum(event.startswith("sample") for event in watched)
    assert [m["training/staleness_max"] for m in result.history] == [0, 1, 1, 1]
    # A second batch of one step has that step's own weights.
    fresh = [m for m in result.history[1:] if m["train/num_gen_batches"] > 1]
    assert all(m["training/staleness_mean"] == 1 / m["train/num_gen_batches"] for m in fresh)


def test_a_run_that_fails_in_its_update_leaves_no_rollout_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []

    def failing(self: ActorRole, mini: Any, *, first: bool) -> Any:
        raise RuntimeError("an update that fails")

    monkeypatch.setattr(ActorRole, "_step", failing)
    run = runner(tmp_path / "run", "data.max_response_length=100", "rollout.n=64")
    groups = run.context.pools._groups
    with pytest.raises(RuntimeError, match="an update that fails"):
        run.execute()
    pids += [hello.pid for group in groups.values() for hello in group.hellos]
    assert len(pids) == 2
    assert not [pid for pid in pids if alive(pid)]


def test_a_rollout_that_dies_while_nobody_waits_is_told(
    tmp_path: Path, watched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner(tmp_path / "run")
    step = ActorRole._step

    def killing(self: ActorRole, mini: Any, *, first: bool) -> Any:
        os.kill(run.context.pools._groups["gen"].hellos[0].pid, signal.SIGKILL)
        return step(self, mini, first=first)

    monkeypatch.setattr(ActorRole, "_step", killing)
    with pytest.raises(RlctlError) as caught:
        run.execute()
    assert "gen" in str(caught.value)
    assert "SIGKILL" in str(caught.value)


def alive(pid: int, within_s: float = 5.0) -> bool:
    """True where the process is still there after that time."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True
