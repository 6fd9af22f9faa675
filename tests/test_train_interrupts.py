"""Stop signals in every phase of `rlctl train`: the run says interrupted, nothing is left running, and it resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REWARD = """
import time

def score(completion, delay_s):
    time.sleep(delay_s)
    return float("1" in completion)
"""
SMALL = [
    "data.train_batch_size=4",
    "rollout.n=4",
    "data.val_batch_size=16",
    "data.task.val_size=16",
    "data.task.train_size=64",
    "data.task.args={length: 3}",
    "trainer.num_threads=1",
    "trainer.val_before_train=false",
    "trainer.logger=[jsonl]",
    "warm_start.stop_at_score=null",
]
# Phase -> (what the log shows just before, settings that make the phase last). Steps take about 0.1 s, so 2000 of them
# outlast the wait for the signal.
PHASES = {
    "warm start": ("run directory", ["warm_start.steps=5000", "trainer.total_training_steps=3"]),
    "reward": ("step 1/", ["warm_start.steps=2", "trainer.total_training_steps=2000", "DELAY"]),
    "saving": ("step 2/", ["warm_start.steps=2", "trainer.total_training_steps=2000", "trainer.save_freq=1"]),
}


def start(run: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rlctl_cli.main", "train", *overrides, "--run-dir", str(run)]
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # Ignored by whoever runs the tests under nohup, it would stay ignored.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"the run ended without saying {text!r}")


def session_members(leader: int) -> list[int]:
    """Living processes of the session that ``leader`` opened."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                members.append(int(entry.name))
    return members


@pytest.mark.parametrize(
    ("phase", "number"),
    [("warm start", signal.SIGTERM), ("reward", signal.SIGINT), ("saving", signal.SIGHUP)],
)
def test_a_stop_signal_leaves_a_run_that_resumes(tmp_path: Path, phase: str, number: signal.Signals) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    marker, settings = PHASES[phase]
    delay = 0.02 if "DELAY" in settings else 0.0
    component = f"[{{name: '{tmp_path / 'reward.py'}:score', args: {{delay_s: {delay}}}}}]"
    overrides = [
        "quickstart",
        *SMALL,
        f"reward.components={component}",
        *(text for text in settings if text != "DELAY"),
    ]
    run = tmp_path / "run"
    process = start(run, *overrides)
    wait_for(process, marker)
    if phase == "warm start":
        deadline = time.monotonic() + 60
        while not (run / "warm_start").is_dir() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
    process.send_signal(number)
    time.sleep(0.02)
    process.send_signal(number)  # an impatient second one
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert f"interrupted ({number.name})" in err
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "interrupted"
    deadline = time.monotonic() + 10
    while (left := session_members(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    assert [p.name for p in run.rglob(".tmp-*")] == []

    # A resume of a step or two shows that what is on disk is whole.
    done = [int(p.name[5:]) for p in run.glob("checkpoints/step_*")]
    if done:
        assert f"--resume {run} goes on from step {max(done)}" in err
    again = ["--resume", str(run), f"trainer.total_training_steps={max(done, default=0) + 1}", "warm_start.steps=2"]
    command = [sys.executable, "-m", "rlctl_cli.main", "train", *again]
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert resumed.returncode == 0, resumed.stderr
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "done"
    assert manifest["resumes"][0]["step"] == max(done, default=0)
