"""Ranks in processes: what travels, where they live, and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import runtime_toys
import torch
from runtime_toys import Double, all_gone, gone, toy_group

from rlctl.errors import RlctlError
from rlctl.runtime.group import Limits, WorkerGroup
from rlctl.runtime.wire import WireError

ENDS_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory):
    made = toy_group(2, log_dir=tmp_path_factory.mktemp("logs"), TOY_VARIABLE="here")
    made.start()
    yield made
    made.close()


def test_a_rank_is_a_process_of_its_own(group: WorkerGroup) -> None:
    pids = {h.pid for h in group.hellos}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert [h.rank for h in group.hellos] == [0, 1]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TOY_VARIABLE", "OMP_NUM_THREADS")
    first, second = group.call("environment", names)
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert (second["LOCAL_RANK"], second["WORLD_SIZE"], second["LOCAL_WORLD_SIZE"]) == ("1", "2", "2")
    assert first["TOY_VARIABLE"] == "here"
    assert int(first["OMP_NUM_THREADS"] or 0) >= 1
    # A session of its own: a terminal's Ctrl-C does not reach it.
    assert first["sid"] == first["pid"] != str(os.getsid(0))
    assert group.call("first") == 0


def test_a_worker_without_tensors_needs_no_torch() -> None:
    fresh = toy_group(1)
    fresh.start()
    assert fresh.call("imported", "torch") == [False]
    fresh.close()


@pytest.mark.parametrize("size", [0, 10, 70_000, 5_000_000])
def test_tensors_travel_both_ways(group: WorkerGroup, size: int) -> None:
    sent = {"a": torch.arange(size), "b": (torch.ones(3, dtype=torch.bfloat16), [1.5, float("nan")])}
    for got in group.call("echo", sent):
        assert torch.equal(got["a"], sent["a"])
        assert torch.equal(got["b"][0], sent["b"][0])
        got["a"][:1] = 7  # a copy of one's own
    assert size == 0 or sent["a"][0] == 0


def test_records_of_an_allowed_package_travel_and_run_there(group: WorkerGroup) -> None:
    assert group.call("apply", Double(5), 4) == [20, 20]


def test_what_is_no_record_is_refused_before_anything_is_sent() -> None:
    group = toy_group(1)
    group.start()
    with pytest.raises(WireError, match=r"the function .*lambda") as error:
        group.call("apply", lambda value: value, 1)
    assert "frozen dataclass with __call__" in str(error.value)
    assert group.closed


def test_an_answer_that_is_no_record_is_refused_with_its_rank() -> None:
    group = toy_group(1)
    group.start()
    with pytest.raises(RlctlError, match=r"object of type lock cannot travel") as error:
        group.call("unsendable")
    assert "raised on rank 0 of pool main during answering unsendable" in str(error.value)


def test_events_arrive_in_order(group: WorkerGroup) -> None:
    heard: list[int] = []
    answers = group._run("talk", [(200,), (0,)], doing="talk", on_event=heard.append)
    assert answers == [200, 0]
    assert heard == list(range(200))


def test_what_a_rank_prints_is_in_its_log(group: WorkerGroup) -> None:
    group.call("first")
    logs = group._transport._log_dir  # type: ignore[attr-defined]
    for rank in (0, 1):
        head, said = (logs / f"rank_{rank}.log").read_text().splitlines()[:2]
        assert head.endswith(f"rank {rank} of 2, pool main")
        assert said == f"hello from rank {rank}"


def test_a_group_that_ends_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_before = len(os.listdir("/proc/self/fd"))
    group = toy_group(2)
    group.start()
    group.call("echo", torch.zeros(1_000_000))
    children = group.call("start_children", False) + group.call("start_children", True)
    goodbye = tmp_path / "goodbye"
    group.call("set_shutdown", str(goodbye))
    ranks = [h.pid for h in group.hellos]
    group.close()
    group.close()
    assert goodbye.read_text() == "bye"
    assert [p for p in [*ranks, *children] if not gone(p)] == []
    assert [p.name for p in tmp_path.iterdir()] == ["goodbye"]
    assert len(os.listdir("/proc/self/fd")) == open_before
    if os.path.isdir("/dev/shm"):
        assert set(os.listdir("/dev/shm")) == shared


def test_a_rank_that_does_not_stop_is_ended() -> None:
    group = toy_group(2, limits=Limits(start_s=60, hang_s=60, grace_s=1, close_s=1))
    group.start()
    group._run("set_shutdown", [("hang",), ("",)], doing="set_shutdown")
    begun = time.monotonic()
    group.close()
    assert 1 <= time.monotonic() - begun < ENDS_WITHIN_S
    assert [h.pid for h in group.hellos if not gone(h.pid)] == []


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("ranks_do", ["hang", "hold"])
def test_a_controller_that_is_ended_leaves_nothing(ranks_do: str, signum: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, runtime_toys.__file__, ranks_do],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    pids = [int(p) for p in process.stdout.readline().split()]
    assert len(pids) == 6
    time.sleep(0.3)  # into the call
    assert [p for p in pids if gone(p)] == []
    process.send_signal(signum)
    assert all_gone(pids, ENDS_WITHIN_S) == []
    assert process.wait(timeout=ENDS_WITHIN_S) == -signum
    deadline = time.monotonic() + ENDS_WITHIN_S
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []
    process.communicate()
