"""`rlctl train` on two processes: a rank that dies leaves a run that resumes, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from runtime_fault_cases import fault_env, fault_site

from rlctl.testing.faults import Fault, FaultKind

pytestmark = pytest.mark.slow

SMALL = [
    "data.train_batch_size=4",
    "rollout.n=4",
    "data.val_batch_size=16",
    "data.task.val_size=16",
    "data.task.train_size=64",
    "data.task.args.length=3",
    "trainer.num_threads=1",
    "trainer.val_before_train=false",
    "trainer.logger=[jsonl]",
    "trainer.save_freq=1",
    "warm_start=null",
    "trainer.total_training_steps=2000",
    "runtime.nproc=2",
]


def left_over(mark: str) -> list[int]:
    """Living processes that were started with ``mark`` in their environment."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def nothing_left(mark: str, within_s: float = 10.0) -> bool:
    """Whether all of :func:`left_over` end by themselves: a guard sees its controller's end only after it."""
    deadline = time.monotonic() + within_s
    while left_over(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def train(tmp_path: Path, env: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rlctl_cli.main", "train", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "scratch"), **env},
        start_new_session=True,
    )


def test_a_dead_rank_leaves_a_run_that_resumes_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    run, mark = tmp_path / "run", f"RLCTL_TEST_MARK={uuid.uuid4().hex}"
    env = {**fault_env(fault_site(tmp_path)), **dict([mark.split("=")])}
    fault = Fault(FaultKind.KILL, 1, hook="rlctl_optimizer_step", occurrence=2)
    broken = train(tmp_path, {**env, **fault.to_env()}, "quickstart", *SMALL, "--run-dir", str(run))
    _, err = broken.communicate(timeout=180)
    assert broken.returncode == 1, err
    assert "Traceback" not in err
    assert "error: rank 1 (dp_shard 1) of pool main died during optimizer step" in err
    assert "killed by SIGKILL" in err
    assert "the call: train_batch of actor with" in err
    assert nothing_left(mark), left_over(mark)
    assert list((tmp_path / "scratch").glob("rlctl*")) == []
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_00000001"]
    assert [p.name for p in run.rglob(".tmp-*")] == []
    assert sorted(p.name for p in (run / "workers" / "main").iterdir()) == ["rank_0.log", "rank_1.log"]

    resumed = train(tmp_path, env, "--resume", str(run))
    assert resumed.stderr is not None
    lines: list[str] = []
    for line in resumed.stderr:
        lines.append(line)
        if re.match(r"step 3/", line):
            break
    assert any("resumed from step 1" in line for line in lines), lines
    ranks = left_over(mark)
    assert len(ranks) >= 3
    begun = time.monotonic()
    # The terminal sends it to its whole foreground group; ranks are not in it.
    os.killpg(resumed.pid, signal.SIGINT)
    _, err = resumed.communicate(timeout=60)
    assert resumed.returncode == 128 + signal.SIGINT
    assert "Traceback" not in err
    assert time.monotonic() - begun < 30
    assert nothing_left(mark), left_over(mark)
    assert list((tmp_path / "scratch").glob("rlctl*")) == []
    assert json.loads((run / "manifest.json").read_text())["status"] == "interrupted"
