"""What must not change a run's numbers: a pause and resume, and how validation is cut into batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlctl.config.load import load_config
from rlctl.errors import RlctlError
from rlctl.plugins import load_plugins
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.rl import RLTrainer
from rlctl.trainers.run import Runner, RunResult

TINY = [
    "data.train_batch_size=4",
    "rollout.n=4",
    "data.val_batch_size=16",
    "data.task.val_size=16",
    "data.task.train_size=10",
    "data.task.args={length: 3}",
    "trainer.num_threads=1",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.logger=[jsonl]",
    "warm_start={steps: 8, batch_size: 10, optim: {lr: 1.0e-3}}",
    "reward.components=[{name: contains, args: {text: '1'}}]",
    "actor.optim.lr=1e-3",
]
OFF_POLICY = ["actor.ppo_epochs=2", "actor.ppo_mini_batch_size=2"]
VARIANTS = {
    "several epochs, a KL in loss and reward, scaled rewards": [
        *OFF_POLICY,
        "actor.use_kl_loss=true",
        "actor.kl_loss_coef=0.1",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.05, target_kl: 0.01, horizon: 50}",
        "algorithm.adv_estimator=dr_grpo",
        "algorithm.rollout_correction={rollout_is: sequence, rollout_rs: token, rollout_rs_threshold: 2}",
        "reward.normalize=running",
        "reward.normalize_by=data_source",
    ],
    "the rollout's own log-probs, dynamic sampling": [
        *OFF_POLICY,
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.filter_groups={max_num_gen_batches: 4}",
        "data.gen_batch_size=3",
    ],
    "a schedule, a weight of the entropy that follows": [
        "actor.optim.lr_scheduler_type=cosine",
        "actor.optim.lr_warmup_steps=2",
        "actor.entropy_coeff=0.01",
        "actor.entropy_ctrl={type: sac, target_entropy: 3.0, step: 0.2}",
    ],
    "sft": ["trainer.type=sft", "warm_start=null"],
}
FOLLOWS = {
    "several epochs, a KL in loss and reward, scaled rewards": "actor/reward_kl_penalty_coeff",
    "the rollout's own log-probs, dynamic sampling": "train/num_gen_batches",
    "a schedule, a weight of the entropy that follows": "actor/entropy_coeff",
}
"""What each step says of a variant's memory; were it the same in all steps, a resume could lose it unseen."""


def train(run: Path, *overrides: str, resume: bool = False) -> RunResult:
    plugins = load_plugins()
    resolved = load_config("quickstart", [*TINY, *overrides], plugins=plugins)
    where = {"resume": run} if resume else {"run_dir": run}
    return Runner(resolved, plugins, NullReporter(), **where).execute()


def numbers(run: Path) -> list[dict[str, float]]:
    """Every metric that is no time or memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clock = ("timing_s/", "perf/", "sync/seconds", "training/unix_time")
    return [{k: v for k, v in line.items() if not k.startswith(clock)} for line in lines]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pause_changes_no_number(tmp_path, variant, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = VARIANTS[variant]
    train(whole, *settings)

    class PulledPlugError(Exception):
        pass

    honest = Runner._step

    def unplugged(self, trainer, step):
        if step == 4:
            raise PulledPlugError
        return honest(self, trainer, step)

    monkeypatch.setattr(Runner, "_step", unplugged)
    with pytest.raises(PulledPlugError):
        train(broken, *settings)
    monkeypatch.setattr(Runner, "_step", honest)
    train(broken, *settings, resume=True)  # from step 2: step 3 is done again
    assert numbers(broken) == numbers(whole)
    a, b = weights(whole), weights(broken)
    assert all(torch.equal(a[name], b[name]) for name in a)
    if variant in FOLLOWS:
        assert len({line[FOLLOWS[variant]] for line in numbers(whole)[1:]}) > 1


def test_one_seed_is_one_run(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(tmp_path / name, f"trainer.seed={seed}")
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b") != numbers(tmp_path / "c")
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_greedy_validation_does_not_depend_on_its_batches(tmp_path):
    scores = []
    for size in (16, 5, 1):
        result = train(tmp_path / str(size), f"data.val_batch_size={size}", "trainer.test_freq=1")
        scores.append([{k: v for k, v in m.items() if k.startswith("val/")} for _, m in result.validation])
    assert scores[0] == scores[1] == scores[2]
    assert len({m["val/score/mean"] for m in scores[0]}) > 1  # else this shows nothing


def test_temperature_reaches_both_sides(tmp_path):
    """The rollout samples at it and the trainer scores at it: their log-probs agree, and the entropy is another one."""
    once = ["trainer.total_training_steps=1", "actor.skip_zero_advantage=false"]
    cool = train(tmp_path / "cool", "rollout.temperature=0.5", *once)
    warm = train(tmp_path / "warm", *once)
    assert cool.last["training/rollout_probs_diff_max"] < 1e-5
    assert cool.last["actor/entropy"] < 0.9 * warm.last["actor/entropy"]


def test_a_copy_in_the_rollouts_own_dtype_is_what_was_sent(tmp_path):
    """Fingerprints are of the converted weights; the checks of warm start and run stay on."""
    warm = "warm_start={steps: 1, batch_size: 4, eval_freq: 1, stop_at_score: 2.0}"
    copied = ["rollout.share_weights=false", "rollout.engine.dtype=bfloat16", "trainer.total_training_steps=1", warm]
    gap = train(tmp_path / "run", *copied).last["training/rollout_probs_diff_mean"]
    assert 0 < gap < 0.02


def test_the_first_step_guards_the_gap_of_every_row(tmp_path, monkeypatch):
    """Also that of rows whose advantages are zero, which the update leaves out and does not measure."""
    monkeypatch.setattr(RLTrainer, "rows_with_gradient", lambda self, batch, advantages: set())
    copied = ["rollout.share_weights=false", "rollout.engine.dtype=bfloat16", "trainer.total_training_steps=1"]
    strict = ["warm_start=null", "guards.rollout_probs_diff_mean_max=1e-9"]
    with pytest.raises(RlctlError, match="rollout"):
        train(tmp_path / "run", *copied, *strict)
