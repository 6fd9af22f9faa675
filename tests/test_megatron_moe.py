"""A mixture of experts whose experts lie on two ranks: it learns, and what it exports is what it computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runtime_fault_cases import batch, boots
from safetensors.torch import load_file

import rlctl_cli
from rlctl.config.schema import ModelConfig
from rlctl.microbatch import MicroBatchPlan
from rlctl.runtime.group import WorkerGroup
from rlctl.runtime.records import BuildSpec
from rlctl.runtime.remote import RemoteEngine
from rlctl.runtime.transports.process import ProcessTransport
from rlctl.runtime.worker import Worker
from rlctl.verify.tiny import TinyModel, write_tiny

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.slow

TOKENIZER = Path(rlctl_cli.__file__).parent / "recipes" / "quickstart" / "model"
STEPS = 12


def test_experts_on_two_ranks_learn_and_export_what_transformers_reloads(tmp_path: Path) -> None:
    start = write_tiny(TinyModel("qwen3_moe", num_experts=4), tmp_path / "models")
    run = tmp_path / "run"
    command = [
        sys.executable, "-m", "rlctl_cli.main", "train", "quickstart", "--backend", "megatron", "--nproc", "2",
        "--model", str(start), "--run-dir", str(run), "model.init=pretrained", f"model.tokenizer={TOKENIZER}",
        "trainer.type=sft", "warm_start=null", "actor.parallel.ep=2", f"trainer.total_training_steps={STEPS}",
        "actor.optim.lr=1e-2", "data.train_batch_size=16", "actor.max_tokens_per_device=96", "data.task.args.length=3",
        "data.task.train_size=64", "data.task.val_size=4", "trainer.num_threads=1", "trainer.logger=[jsonl]",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["engines"]["actor"]["axes"] == {"dp_shard": 2, "ep": 2}
    assert len({rank["pid"] for rank in manifest["runtime"]["pools"]["main"]["ranks"]}) == 2
    losses = [json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()[-STEPS:]]
    assert losses[-1] < 0.7 * losses[0], losses
    before, after = read(start), read(run / "export")
    assert before.keys() == after.keys()
    experts = [name for name in after if ".experts." in name]
    assert len(experts) == 2 * 4 * 3  # layers, experts, matrices
    assert all(not torch.equal(before[name], after[name]) for name in experts), "experts of both ranks were trained"

    from transformers import AutoModelForCausalLM

    rows = batch()
    model = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32).eval()
    wanted: list[torch.Tensor] = []
    with torch.no_grad():
        for ids in rows.split_items(rows.items["input_ids"]):
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
            wanted.append(log_probs.gather(1, ids[1:, None])[:, 0])
    section = ModelConfig(path=str(run / "export"), init="pretrained", tokenizer=str(TOKENIZER))
    group = WorkerGroup("main", ProcessTransport(tmp_path / "logs"), boots(2), Worker)
    try:
        group.start()
        axes = {"dp_shard": 2, "ep": 2}
        engine = RemoteEngine.build(group, BuildSpec("ref", "train", "megatron", section.model_dump(), {}, axes))
        scored = engine.infer_batch(rows, MicroBatchPlan(max_rows=2))["log_probs"]
        engine.export_directory(tmp_path / "again", section)
    finally:
        group.close()
    for found, expected in zip(rows.split_items(scored), wanted, strict=True):
        assert (found[1:] - expected).abs().max() < 1e-5
    again = read(tmp_path / "again")
    assert again.keys() == after.keys()
    assert all(torch.equal(again[name], value) for name, value in after.items())


def read(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")
