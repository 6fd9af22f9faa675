"""SFT and GRPO on recorded rollouts: a mixture whose experts and rows veomni spreads over two ranks reports what fsdp2 reports,
which computes all experts on one; and what it exports is what it computes.

fsdp2 asks for a newer transformers than VeOmni; here it is declared again without that, for the comparison alone.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

if importlib.util.find_spec("veomni") is None:  # not imported here: it would log all it does
    pytest.skip("veomni is not installed (it has an environment of its own)", allow_module_level=True)

import torch
from frozen_rollouts import STEPS, Recording, record, replay
from fsdp2_beside_veomni import fsdp2_beside
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
from rlctl.trainers.run import RunResult
from rlctl.verify.tiny import TinyModel, write_tiny

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
"""Relative; absolute for what is a difference already (a KL, a mean of advantages), where it is under :data:`SMALL`."""
SMALL = 1e-2
ROOT = Path(__file__).parents[1]
TOKENIZER = Path(rlctl_cli.__file__).parent / "recipes" / "quickstart" / "model"
AXES = {"usp": 2, "ep": 2}
VEOMNI = ["actor.backend=veomni", "runtime.nproc=2", "actor.parallel.usp=2", "actor.parallel.ep=2"]
GRPO = [
    f"model.tokenizer={TOKENIZER}",
    "reward.components=[{name: contains, args: {text: '1'}}]",
    "data.task.args.length=3",
    "data.train_batch_size=8",
    "rollout.n=4",
    "actor.ppo_mini_batch_size=4",
    "actor.use_kl_loss=true",
    "actor.kl_loss_coef=0.1",
    "actor.entropy_coeff=0.01",
    # Several micro-batches a step, of unequal lengths.
    "actor.max_tokens_per_device=96",
]
SFT = [
    f"model.tokenizer={TOKENIZER}",
    "trainer.type=sft",
    "data.task.args.length=3",
    "data.train_batch_size=8",
    "actor.max_tokens_per_device=48",
    "trainer.test_freq=2",
]
DIFFER_BY_DESIGN = (
    "timing_s/",
    "perf/",
    "sync/",
    "global_seqlen/",
    "training/unix_time",
    "actor/num_micro_batches",
    "critic/num_micro_batches",
)
SAMPLED_LIVE = ("val/score", "val/response")
ABSOLUTE = ("training/rollout_probs_diff_", "actor/ppo_kl")


@dataclass(frozen=True)
class Reference:
    """What fsdp2 computes in one process."""

    start: Path
    grpo: RunResult
    recording: Recording
    sft: RunResult


@pytest.fixture(scope="module")
def with_fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with fsdp2_beside(tmp_path_factory.mktemp("site")):
        yield


@pytest.fixture(scope="module")
def reference(with_fsdp2: None, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("same")
    start = write_tiny(TinyModel("qwen3_moe", num_experts=4), folder / "models")
    grpo, recording = record(folder / "grpo", start, *GRPO)
    assert any(0 < m["critic/score/mean"] < 1 and m["actor/grad_norm"] > 0 for m in grpo.history)
    assert all(m["actor/num_steps"] == 2 and m["actor/num_micro_batches"] > 2 for m in grpo.history)
    sft, _ = record(folder / "sft", start, *SFT)
    return Reference(start, grpo, recording, sft)


def gaps(one: RunResult, many: RunResult) -> dict[str, float]:
    """Largest gap of each metric over all steps, as :data:`TOLERANCE` measures it."""
    assert len(one.history) == len(many.history) == STEPS
    found: dict[str, float] = {}
    for x, y in zip(one.history, many.history, strict=True):
        names = {n for n in x if not n.startswith(DIFFER_BY_DESIGN)}
        assert names == {n for n in y if not n.startswith(DIFFER_BY_DESIGN)}
        for name in names:
            if name.startswith(SAMPLED_LIVE) or (math.isnan(x[name]) and math.isnan(y[name])):
                continue
            scale = 1.0 if name.startswith(ABSOLUTE) else max(abs(x[name]), SMALL)
            found[name] = max(found.get(name, 0.0), abs(x[name] - y[name]) / scale)
    return found


def assert_same(one: RunResult, many: RunResult, *expected: str) -> None:
    found = gaps(one, many)
    assert set(expected) <= set(found), sorted(found)
    print(max((gap, name) for name, gap in found.items()))
    assert max(found.values()) < TOLERANCE, sorted(found.items(), key=lambda kv: -kv[1])[:8]
    engines = json.loads((many.path / "manifest.json").read_text())["engines"]
    assert (engines["actor"]["backend"], engines["actor"]["axes"]) == ("veomni", AXES)


def test_grpo_on_spread_experts_and_rows_reports_what_fsdp2_does(reference: Reference, tmp_path: Path) -> None:
    grpo = replay(tmp_path / "grpo", reference.start, reference.recording, *GRPO, *VEOMNI)
    assert_same(
        reference.grpo, grpo, "actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/kl_loss", "actor/ppo_kl",
        "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max",
    )  # fmt: skip


def test_sft_on_spread_experts_and_rows_reports_what_fsdp2_does(reference: Reference, tmp_path: Path) -> None:
    sft = replay(tmp_path / "sft", reference.start, {}, *SFT, *VEOMNI)
    assert_same(reference.sft, sft, "train/loss", "train/grad_norm", "val/loss")
    before, after = (load_file(d / "model.safetensors") for d in (reference.start, sft.path / "export"))
    assert before.keys() == after.keys()
    experts = [name for name in after if ".experts." in name]
    assert len(experts) == 2 * 4 * 3  # layers, experts, matrices
    assert all(not torch.equal(before[name], after[name]) for name in experts), "experts of both ranks were trained"

    from transformers import AutoModelForCausalLM

    rows = batch()
    model = AutoModelForCausalLM.from_pretrained(sft.path / "export", dtype=torch.float32).eval()
    wanted: list[torch.Tensor] = []
    with torch.no_grad():
        for ids in rows.split_items(rows.items["input_ids"]):
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
            wanted.append(log_probs.gather(1, ids[1:, None])[:, 0])
    section = ModelConfig(path=str(sft.path / "export"), init="pretrained", tokenizer=str(TOKENIZER))
    group = WorkerGroup("main", ProcessTransport(tmp_path / "logs"), boots(2), Worker)
    try:
        group.start()
        axes = {"dp_shard": 1, **AXES}
        engine = RemoteEngine.build(group, BuildSpec("ref", "train", "veomni", section.model_dump(), {}, axes))
        scored = engine.infer_batch(rows, MicroBatchPlan(max_rows=2))["log_probs"]
        engine.export_directory(tmp_path / "again", section)
    finally:
        group.close()
    for found, expected in zip(rows.split_items(scored), wanted, strict=True):
        assert (found[1:] - expected).abs().max() < 1e-5
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == after.keys()
    assert all(torch.equal(again[name], value) for name, value in after.items())


def test_a_seed_draws_for_veomni_the_weights_that_fsdp2_draws(
    with_fsdp2: None, reference: Reference, tmp_path: Path
) -> None:
    drawn: list[dict[str, torch.Tensor]] = []
    for name, extra in {"fsdp2": ["actor.backend=fsdp2"], "veomni": VEOMNI}.items():
        # Too small a step to move anything in float32.
        still = ["actor.optim={lr: 1.0e-60, weight_decay: 0.0}", "trainer.total_training_steps=1", "trainer.seed=5"]
        run = replay(tmp_path / name, reference.start, {}, *SFT, "model.init=random", *still, *extra)
        drawn.append(load_file(run.path / "export" / "model.safetensors"))
    assert drawn[0].keys() == drawn[1].keys()
    assert all(torch.equal(value, drawn[1][name]) for name, value in drawn[0].items())
