"""GRPO with vLLM in the controller's own environment and the actor in the base environment, which has no vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed (rlctl-plugin-vllm; it has an environment of its own)")
pytest.importorskip("rlctl_cli", reason="the command and its recipe are not installed (rlctl)")

BASE = Path(__file__).parents[3] / ".venv"
if not (BASE / "bin" / "python").exists():
    pytest.skip("there is no base environment in .venv (make test makes it)", allow_module_level=True)

pytestmark = pytest.mark.slow

SMALL = [
    "data.train_batch_size=4",
    "rollout.n=4",
    "data.task.val_size=4",
    "data.task.train_size=64",
    "data.task.args={length: 3}",
    "trainer.num_threads=1",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.save_best=false",
    "trainer.logger=[jsonl]",
    "warm_start=null",
    "actor.entropy_coeff=0.1",
    "reward.components=[{name: contains, args: {text: '1'}}]",
    "rollout.engine.kv_cache_mib=64",
    "rollout.engine.max_num_seqs=64",
]


def test_an_actor_of_the_base_environment_and_vllm_stay_one_policy(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "rlctl_cli.main", "train", "quickstart", "--rollout", "vllm", *SMALL]
    done = subprocess.run(
        [*command, f"actor.python={BASE}", "--run-dir", str(run)],
        capture_output=True,
        text=True,
        timeout=540,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [m["training/rollout_probs_diff_mean"] for m in steps]
    assert len(gaps) == 2
    assert all(0 <= gap < 1e-4 for gap in gaps), gaps
    assert all(m["sync/bytes"] > 0 and m["actor/grad_norm"] > 0 for m in steps)
    manifest = json.loads((run / "manifest.json").read_text())
    assert {role: engine["pool"] for role, engine in manifest["engines"].items()} == {
        "actor": "actor",
        "rollout": "main",
    }
    pools = manifest["runtime"]["pools"]
    assert pools["actor"]["python"] == str(BASE / "bin" / "python")
    assert pools["main"]["python"] == sys.executable
    versions = {name: pool["versions"]["transformers"] for name, pool in pools.items()}
    assert versions["actor"] != versions["main"], "tensors and records travel, whatever the packages"
