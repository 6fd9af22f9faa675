"""`rlctl train quickstart --backend megatron` on two tensor parallel ranks: a rank dies in a step, and the resumed run reports
and trains what one that was never broken does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from runtime_fault_cases import ENDS_WITHIN_S, fault_env, fault_site
from safetensors.torch import load_file
from test_train_interrupts import wait_for

from rlctl.testing.faults import Fault, FaultKind

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.slow

SMALL = [
    "data.train_batch_size=4",
    "rollout.n=4",
    "data.val_batch_size=16",
    "data.task.val_size=16",
    "data.task.train_size=64",
    "data.task.args.length=3",
    "trainer.num_threads=1",
    "trainer.total_training_steps=3",
    "trainer.save_freq=2",
    "trainer.val_before_train=false",
    "trainer.logger=[jsonl]",
    "warm_start={steps: 4, batch_size: 32, stop_at_score: null, optim: {lr: 1.0e-3}}",
    "reward.components=[{name: contains, args: {text: '1'}}]",
    "actor.optim.lr=1e-3",
    "actor.parallel.tp=2",
]
CLOCK = ("timing_s/", "perf/", "sync/seconds", "training/unix_time")


def train(*arguments: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rlctl_cli.main", "train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return err


def numbers(run: Path) -> list[dict[str, float]]:
    """Every metric that is no time or memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(CLOCK)} for line in lines]


def test_a_rank_that_dies_in_a_step_costs_the_quickstart_nothing_that_was_saved(tmp_path: Path) -> None:
    quickstart = ["quickstart", *SMALL, "--backend", "megatron", "--nproc", "2"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    err = finish(train(*quickstart, "--run-dir", str(whole)))
    assert "(megatron, 2 ranks by process, tp=2)" in err
    assert "Warning" not in err
    steps = numbers(whole)
    assert [m["training/global_step"] for m in steps] == [1, 2, 3]
    assert max(m["actor/grad_norm"] for m in steps) > 0
    assert max(m["training/rollout_probs_diff_max"] for m in steps) < 1e-5
    # The module of split ranks is no Hugging Face model: the rollout takes a copy.
    assert all(m["sync/bytes"] > 0 for m in steps)

    # The warm start enters it four times, the steps before the third twice.
    fault = Fault(FaultKind.KILL, 1, phase="forward and backward", occurrence=7)
    env = {**fault_env(fault_site(tmp_path)), **fault.to_env()}
    process = train(*quickstart, "--run-dir", str(broken), **env)
    wait_for(process, "step 2/")
    begun = time.monotonic()
    _, err = process.communicate(timeout=240)
    assert time.monotonic() - begun < ENDS_WITHIN_S
    assert process.returncode == 1
    assert "error: rank 1 (tp 1) of pool main died during forward and backward (" in err, err
    assert "killed by SIGKILL" in err
    assert "mini-batch of this rank: 4 rows," in err, err  # the others have no advantage
    assert "the call: train_batch of actor with 4 rows" in err
    assert "Traceback" not in err
    assert json.loads((broken / "manifest.json").read_text())["status"] == "failed"

    assert "resumed from step 2" in finish(train("--resume", str(broken)))
    assert numbers(broken) == steps
    a, b = (load_file(run / "export" / "model.safetensors") for run in (whole, broken))
    assert all(torch.equal(value, b[name]) for name, value in a.items())
    from rlctl_cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["report", str(broken)])
    assert ended.value.code in (0, None)
    assert (broken / "report.html").is_file()
