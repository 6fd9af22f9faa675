"""`rlctl train` on two ranks when one is killed, the controller is stopped, or the controller is killed: the run directory
stays whole and goes on, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_train_interrupts import SMALL, start, wait_for

pytestmark = pytest.mark.slow

ENDS_WITHIN_S = 30
RANKS = [
    "quickstart",
    *SMALL,
    "warm_start=null",
    "reward.components=[{name: contains, args: {text: '1'}}]",
    "runtime.nproc=2",
    "trainer.save_freq=1",
    "trainer.total_training_steps=2000",
]


def pids_of_ranks(run: Path) -> list[int]:
    runtime = json.loads((run / "manifest.json").read_text())["runtime"]
    return [rank["pid"] for pool in runtime["pools"].values() for rank in pool["ranks"]]


def alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie does not."""
    found: list[int] = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def all_gone(pids: list[int], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not alive(pids)


def last_step(run: Path) -> int:
    return max(int(p.name[5:]) for p in run.glob("checkpoints/step_*"))


def goes_on(run: Path) -> None:
    """A resume of two steps on two ranks ends well."""
    done = last_step(run)
    command = [
        sys.executable,
        "-m",
        "rlctl_cli.main",
        "train",
        "--resume",
        str(run),
        f"trainer.total_training_steps={done + 2}",
    ]
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert resumed.returncode == 0, resumed.stderr
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "done"
    assert manifest["resumes"][-1]["step"] == done
    steps = [json.loads(line)["training/global_step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, done + 3))


def refuses_other_ranks(run: Path) -> None:
    """Before a rank is started, and without a mark on the run."""
    before = (run / "manifest.json").read_bytes()
    command = [sys.executable, "-m", "rlctl_cli.main", "train", "--resume", str(run), "--nproc", "1"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 1, refused.stderr
    assert "resume with --nproc 2" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (run / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("launcher", ["process", "ray"])
def test_a_killed_rank_ends_the_run_and_costs_no_step_that_was_saved(tmp_path: Path, launcher: str) -> None:
    if launcher == "ray":
        pytest.importorskip("ray", reason="ray is not installed (rlctl-core[ray])")
    run = tmp_path / "run"
    process = start(run, *RANKS, f"runtime.launcher={launcher}")
    wait_for(process, "step 2/")
    pids = pids_of_ranks(run)
    assert len(pids) == 2
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert time.monotonic() - began < ENDS_WITHIN_S
    assert process.returncode == 1
    assert "rank 1 (dp_shard 1) of pool main died" in err
    assert "SIGKILL" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert all_gone([*pids, process.pid])
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert "rank 1" in manifest["error"]
    if launcher == "process":
        refuses_other_ranks(run)
    goes_on(run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_controller(tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    process = start(run, *RANKS)
    wait_for(process, "step 2/")
    pids = pids_of_ranks(run)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (130 if number is signal.SIGINT else -number)
    assert all_gone(pids)
    if number is signal.SIGINT:
        assert json.loads((run / "manifest.json").read_text())["status"] == "interrupted"
