"""Edges of a run: no gradient at all, data smaller than a batch, nothing to validate on, a disk that is full."""

from __future__ import annotations

import json
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlctl.config.load import load_config
from rlctl.errors import CheckpointError, DataError, GuardError
from rlctl.plugins import load_plugins
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.run import Runner, RunResult

TINY = [
    "data.train_batch_size=2",
    "rollout.n=2",
    "data.val_batch_size=8",
    "data.task.val_size=8",
    "data.task.train_size=8",
    "data.task.args={length: 3}",
    "trainer.num_threads=1",
    "trainer.total_training_steps=2",
    "trainer.logger=[jsonl]",
    "warm_start=null",
]


def train(run: Path, *overrides: str) -> RunResult:
    plugins = load_plugins()
    resolved = load_config("quickstart", [*TINY, *overrides], plugins=plugins)
    return Runner(resolved, plugins, NullReporter(), run_dir=run).execute()


def test_a_run_without_any_gradient_says_so_and_moves_nothing(tmp_path):
    never = "reward.components=[{name: contains, args: {text: ZZZ}}]"
    result = train(tmp_path / "a", never, "actor.optim.weight_decay=0")
    assert [m["actor/rows_with_gradient"] for m in result.history] == [0.0, 0.0]
    assert [m["actor/grad_norm"] for m in result.history] == [0.0, 0.0]
    # Nothing was trained, so nothing was measured there.
    assert not {"actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac"} & set(result.last)
    longer = train(tmp_path / "b", never, "actor.optim.weight_decay=0", "trainer.total_training_steps=3")
    a, b = (load_file(r.path / "export" / "model.safetensors") for r in (result, longer))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_epochs_follow_each_other_when_steps_outnumber_the_rows(tmp_path):
    result = train(tmp_path / "run", "trainer.total_training_steps=9")
    assert result.steps == 9
    assert result.last["training/epoch"] == 2.0  # 9 batches of 2 from 8 rows


@pytest.mark.parametrize("extreme", ["data.max_response_length=1", "data.train_batch_size=1"])
def test_the_smallest_sizes_train(tmp_path, extreme):
    result = train(tmp_path / "run", extreme, "reward.components=[{name: length, args: {target: 1}}]")
    assert result.steps == 2
    if "response" in extreme:
        assert result.last["response_length/max"] == 1.0


def test_a_warm_start_batch_larger_than_the_data_is_made_smaller_and_said(tmp_path):
    told: list[str] = []

    class Telling(NullReporter):
        def message(self, text: str) -> None:
            told.append(text)

    plugins = load_plugins()
    resolved = load_config("quickstart", [*TINY, "warm_start={steps: 2, batch_size: 9}"], plugins=plugins)
    Runner(resolved, plugins, Telling(), run_dir=tmp_path / "run").execute()
    assert "warm_start.batch_size=9 is more than the data has: 8 rows a step" in told


def test_a_score_to_stop_at_needs_rows_to_score(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"s:{a}1=", "answer": f"1{a}"}) + "\n" for a in range(2, 6)))
    with pytest.raises(DataError, match="stop_at_score needs validation rows"):
        train(
            tmp_path / "run", "data.task=null", f"data.train_files=[{rows}]",
            "warm_start={steps: 2, batch_size: 2, stop_at_score: 0.5, eval_freq: 1}",
        )  # fmt: skip


def test_a_negative_score_to_stop_at_is_compared_only_once_it_was_measured(tmp_path):
    train(tmp_path / "run", "warm_start={steps: 4, batch_size: 2, stop_at_score: -2.0, eval_freq: 3}")
    lines = (tmp_path / "run" / "warm_start" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 3


def test_a_shift_by_one_between_sampled_and_trained_positions_stops_the_first_step(tmp_path, monkeypatch):
    from dataclasses import replace

    from rlctl.engine import Engine

    honest = Engine.generate

    def shifted(self, request, on_done=None):
        # Rotated by one token: lengths stay, alignment does not.
        done = honest(self, request, on_done)
        return [replace(c, log_probs=[*c.log_probs[1:], c.log_probs[0]]) for c in done]

    monkeypatch.setattr(Engine, "generate", shifted)
    with pytest.raises(GuardError, match="disagree"):
        # A little training first: an untrained model gives every token nearly the same probability.
        train(tmp_path / "run", "warm_start={steps: 60, batch_size: 8, optim: {lr: 1.0e-3}}", "data.train_batch_size=8")


def test_a_models_files_are_as_readable_as_the_rest_of_the_run(tmp_path):
    export = train(tmp_path / "run", "trainer.total_training_steps=1").path / "export"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in export.iterdir()}
    assert len(modes) == 1


def test_a_directory_that_is_removed_meanwhile_is_one_plain_error(tmp_path, monkeypatch):
    import shutil

    from rlctl.trainers.rl import RLTrainer

    honest = RLTrainer.step

    def removing(self, step):
        shutil.rmtree(tmp_path / "run")
        return honest(self, step)

    monkeypatch.setattr(RLTrainer, "step", removing)
    with pytest.raises(CheckpointError, match="was removed"):
        train(tmp_path / "run")


@pytest.mark.parametrize("limit_bytes", [100_000, 6_000_000])
def test_a_full_disk_is_one_plain_error(tmp_path, limit_bytes):
    """The smaller limit meets the best weights, the larger one the checkpoint with its optimizer state."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "rlctl_cli.main", "train", "quickstart", *TINY, "-q", "--run-dir", str(run)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "was not written" in done.stderr or "were not written" in done.stderr
    assert "free disk space" in done.stderr
    assert json.loads((run / "manifest.json").read_text())["status"] == "failed"
    assert [p.name for p in run.rglob(".tmp-*")] == []
