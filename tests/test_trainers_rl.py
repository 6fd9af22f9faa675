"""The RL and SFT loops end to end on the real FSDP2 backend with a tiny model: what they write, and that they are exact."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlctl.batch import load_batch
from rlctl.config.load import load_config
from rlctl.errors import CheckpointError, GuardError
from rlctl.plugins import load_plugins
from rlctl.records import EvidenceLevel
from rlctl.rundir import RunDirectory
from rlctl.testing.evidence import record_evidence
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.run import Runner, RunResult

ROOT = Path(__file__).resolve().parents[1]
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
    # A few SFT steps teach digits but not sorting: this reward differs within groups, and some groups agree.
    "reward.components=[{name: contains, args: {text: '1'}}]",
]


def train(
    tmp_path: Path, *overrides: str, name: str = "run", resume: Path | None = None, source: str = "quickstart"
) -> RunResult:
    plugins = load_plugins()
    resolved = load_config(source, [*SMALL, *overrides], plugins=plugins)
    target = None if resume else tmp_path / name
    return Runner(resolved, plugins, NullReporter(), run_dir=target, resume=resume).execute()


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> RunResult:
    return train(tmp_path_factory.mktemp("plain"), "actor.skip_zero_advantage=false", "trainer.test_freq=2")


def test_a_run_leaves_what_the_docs_say(plain):
    run = plain.path
    for name in (
        "config.yaml",
        "manifest.json",
        "metrics.jsonl",
        "samples.jsonl",
        "export/config.json",
        "best/config.json",
    ):
        assert (run / name).is_file(), name
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "done"
    assert manifest["engines"]["actor"]["backend"] == "fsdp2"
    steps = [m["training/global_step"] for m in lines(run / "metrics.jsonl")]
    assert steps == [0, 1, 2, 3]
    assert {s["split"] for s in lines(run / "samples.jsonl")} == {"train", "val"}
    assert [step for step, _ in plain.validation] == [0, 2, 3]


@pytest.mark.parametrize("backend", ["fsdp2", "hf"])
def test_the_run_is_the_end_to_end_evidence_of_one_process(plain, backend):
    before = load_file(plain.path / "warm_start" / "export" / "model.safetensors")
    moved = max((before[k] - v).abs().max().item() for k, v in weights(plain.path).items())
    gap = max(m.get("training/rollout_probs_diff_mean", 0.0) for m in plain.history)
    assert moved > 0
    assert gap < 1e-5
    record_evidence(
        f"one-process-cpu-grpo-{backend}",
        backend=backend,
        level=EvidenceLevel.END_TO_END,
        axes={},
        world_size=1,
        device="cpu",
        model_family="llama",
        what="quickstart in small: SFT warm start, three GRPO steps, validation, checkpoint, export that transformers reloads",
        deltas={"rollout_probs_diff_mean": gap, "weights_moved_max": moved},
    )


def test_every_metric_that_a_run_writes_is_documented(plain, tmp_path):
    page = (ROOT / "docs" / "metrics.md").read_text()
    known = set(re.findall(r"`([a-z_]+/[\w/<>]+)`", page))
    assert len(known) > 40
    sft = train(tmp_path, "trainer.type=sft", "warm_start=null")
    for run in (plain, sft):
        written = {key for m in lines(run.path / "metrics.jsonl") for key in m}
        undocumented = {k for k in written if k not in known and not k.startswith(("val/score/", "reward/"))}
        assert not undocumented
    assert "train/loss" in sft.last


def test_export_reloads_with_transformers_and_equals_the_trained_weights(plain):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(plain.path / "export", dtype=torch.float32)
    saved = weights(plain.path)
    own = model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in saved.items())
    start = load_file(plain.path / "warm_start" / "export" / "model.safetensors")
    assert any(not torch.equal(start[name], value) for name, value in saved.items())
    assert AutoTokenizer.from_pretrained(plain.path / "export")("s:72=").input_ids


def test_leaving_out_rows_without_a_gradient_changes_nothing(plain, tmp_path):
    skipping = train(tmp_path, "actor.skip_zero_advantage=true", "trainer.test_freq=2")
    shares = [m["actor/rows_with_gradient"] for m in skipping.history]
    assert min(shares) < 1.0  # else this test shows nothing
    a, b = weights(plain.path), weights(skipping.path)
    assert max((a[k] - b[k]).abs().max().item() for k in a) < 1e-5
    for x, y in zip(plain.history, skipping.history, strict=True):
        assert x["critic/score/mean"] == y["critic/score/mean"]
        assert x["actor/grad_norm"] == pytest.approx(y["actor/grad_norm"], rel=1e-4, abs=1e-7)


def test_micro_batches_change_nothing(plain, tmp_path):
    split = train(tmp_path, "actor.skip_zero_advantage=false", "trainer.test_freq=2", "actor.max_tokens_per_device=32")
    assert split.last["actor/num_micro_batches"] > 1
    a, b = weights(plain.path), weights(split.path)
    # One AdamW step moves a weight by up to lr = 1e-4 whatever the size of its gradient.
    assert max((a[k] - b[k]).abs().max().item() for k in a) < 3e-5
    for x, y in zip(plain.history, split.history, strict=True):
        assert x["actor/grad_norm"] == pytest.approx(y["actor/grad_norm"], rel=1e-4)


def test_copying_weights_to_the_rollout_samples_what_sharing_them_samples(plain, tmp_path):
    copied = train(tmp_path, "rollout.share_weights=false", "actor.skip_zero_advantage=false", "trainer.test_freq=2")
    assert copied.last["sync/bytes"] > 0
    assert plain.last["sync/bytes"] == 0
    for x, y in zip(plain.history, copied.history, strict=True):
        assert x["critic/score/mean"] == y["critic/score/mean"]


def test_several_optimizer_steps_recompute_old_log_probs(tmp_path):
    result = train(tmp_path, "actor.ppo_mini_batch_size=2", "actor.ppo_epochs=2", "actor.optim.lr=1e-3")
    assert result.last["actor/num_steps"] == 4
    assert abs(result.last["actor/ppo_kl"]) > 1e-6  # later steps are off policy
    assert result.last["timing_s/old_log_prob"] > 0


def test_kl_to_the_reference_starts_at_zero_and_grows(tmp_path):
    result = train(tmp_path, "actor.use_kl_loss=true", "actor.kl_loss_coef=0.05", "actor.optim.lr=1e-3")
    values = [m["actor/kl_loss"] for m in result.history]
    assert values[0] == pytest.approx(0.0, abs=1e-6)
    assert values[-1] > 1e-6


def test_bypass_mode_takes_the_rollouts_log_probs(tmp_path):
    result = train(tmp_path, "algorithm.rollout_correction.bypass_mode=true", "actor.ppo_mini_batch_size=2")
    assert "timing_s/old_log_prob" not in result.last
    assert result.last["training/rollout_probs_diff_mean"] < 1e-4


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_every_aggregation_mode_runs_and_reports_a_finite_step(tmp_path, mode):
    result = train(
        tmp_path, f"actor.loss_agg_mode={mode}", "trainer.total_training_steps=1", "actor.entropy_coeff=0.01"
    )
    assert result.last["actor/grad_norm"] > 0
    assert result.last["actor/skipped_steps"] == 0


def test_resume_continues_as_an_unbroken_run_would(tmp_path):
    whole = train(tmp_path, "trainer.save_freq=2", name="whole")
    broken = train(tmp_path, "trainer.save_freq=2", "trainer.total_training_steps=2", name="broken")
    resumed = train(tmp_path, "trainer.save_freq=2", resume=broken.path)
    assert resumed.steps == 3
    a, b = weights(whole.path), weights(resumed.path)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert [m["training/global_step"] for m in lines(resumed.path / "metrics.jsonl")] == [0, 1, 2, 3]


def test_resuming_a_finished_run_says_that_nothing_is_left_and_touches_nothing(tmp_path):
    done = train(tmp_path, "trainer.total_training_steps=1")
    before = {p: p.read_bytes() for p in done.path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match="nothing is left"):
        train(tmp_path, "trainer.total_training_steps=1", resume=done.path)
    assert {p: p.read_bytes() for p in done.path.rglob("*") if p.is_file()} == before
    assert json.loads((done.path / "manifest.json").read_text())["status"] == "done"


def test_a_resume_with_other_settings_is_what_the_next_resume_goes_on_with(tmp_path):
    first = train(tmp_path, "trainer.total_training_steps=1")
    train(tmp_path, "trainer.total_training_steps=2", resume=first.path)
    assert "total_training_steps: 2" in (first.path / "config.yaml").read_text()
    assert "total_training_steps: 1" in (first.path / "config.yaml.bak-1").read_text()


def test_a_directory_in_which_another_process_trains_is_refused(tmp_path):
    done = train(tmp_path, "trainer.total_training_steps=1")
    with RunDirectory.open(done.path).lock(), pytest.raises(CheckpointError, match="another process"):
        train(tmp_path, "trainer.total_training_steps=2", resume=done.path)
    assert json.loads((done.path / "manifest.json").read_text())["status"] == "done"


def test_weights_that_break_stop_the_run_with_a_dump_that_loads(tmp_path):
    with pytest.raises(GuardError, match="not finite"):
        train(tmp_path, "actor.optim.lr=1e30", "trainer.save_freq=1", "trainer.total_training_steps=9")
    run = tmp_path / "run"
    dump = load_batch(str(next(run.glob("nonfinite_step_*.safetensors"))))
    assert {"input_ids", "loss_mask", "advantages", "item_weight"} <= set(dump.items)
    # The first update is what broke the weights; what came after it was skipped and must not push its checkpoint out.
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["step_00000001"]
    assert json.loads((run / "manifest.json").read_text())["status"] == "failed"


def test_a_loss_that_is_no_number_is_never_the_best_and_sft_dumps_too(tmp_path):
    with pytest.raises(GuardError, match="not finite"):
        train(
            tmp_path, "trainer.type=sft", "warm_start=null", "actor.optim.lr=1e39", "trainer.test_freq=1",
            "trainer.save_freq=1", "trainer.total_training_steps=9",
        )  # fmt: skip
    run = tmp_path / "run"
    assert not (run / "best").exists()
    assert load_batch(str(next(run.glob("nonfinite_step_*.safetensors")))).num_rows == 4


def test_a_run_keeps_its_trainer_when_it_is_resumed(plain):
    command = [sys.executable, "-m", "rlctl_cli.main", "train", "--resume", str(plain.path), "trainer.type=sft"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "keeps its trainer" in done.stderr
    assert json.loads((plain.path / "manifest.json").read_text())["status"] == "done"


def test_a_rollout_that_disagrees_with_the_trainer_stops_the_run(tmp_path, monkeypatch):
    from rlctl.engine import Engine

    honest = Engine.generate

    def drifted(self, request, on_done=None):
        from dataclasses import replace

        return [replace(c, log_probs=[p - 0.7 for p in c.log_probs]) for c in honest(self, request, on_done)]

    monkeypatch.setattr(Engine, "generate", drifted)
    with pytest.raises(GuardError, match="disagree"):
        train(tmp_path)
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "failed"
    monkeypatch.setattr(Engine, "generate", honest)


def test_a_run_whose_checkpoints_are_all_damaged_is_left_alone(tmp_path):
    """To begin again from step 0 would put a worse model in the place of the best one, with exit code 0."""
    done = train(tmp_path, "trainer.total_training_steps=1", "trainer.save_freq=1")
    [checkpoint] = (done.path / "checkpoints").iterdir()
    file = max((checkpoint / "engine").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    file.write_bytes(file.read_bytes()[:-100])
    before = {p: p.read_bytes() for p in done.path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match="every checkpoint of this run is damaged") as refused:
        train(tmp_path, "trainer.total_training_steps=2", resume=done.path)
    assert checkpoint.name in str(refused.value.found)
    changed = [p.name for p, body in before.items() if not p.is_file() or p.read_bytes() != body]
    assert set(changed) <= {"manifest.json", "run.log"}, changed
