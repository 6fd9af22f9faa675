"""Shaped rewards, the KL in them, the entropy's weight and the rollout check in whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_trainers_rl import lines, train, weights

from rlctl.errors import GuardError
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers import rewards
from rlctl.trainers.rl import RLTrainer

NOTHING = ["reward.components=[{name: contains, args: {text: 'zzz'}}]", "warm_start=null", "trainer.test_freq=0"]
COPIED = ["rollout.share_weights=false", "rollout.engine.dtype=bfloat16"]
TWO = "trainer.total_training_steps=2"


def steps(result) -> list[dict[str, float]]:
    return lines(result.path / "metrics.jsonl")[1:]


def test_steps_without_an_advantage_measure_the_gap_too(tmp_path) -> None:
    """All rewards are equal, so that no row is trained on: the update sees nothing, and the check must."""
    for found in steps(train(tmp_path, *NOTHING, *COPIED)):
        assert found["actor/rows_with_gradient"] == 0.0
        assert 0 < found["training/rollout_probs_diff_mean"] <= found["training/rollout_probs_diff_max"]


def test_steps_without_an_advantage_guard_the_gap_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(RLTrainer, "compare", lambda self, batch, log_probs: None)  # the first step's look at every row
    with pytest.raises(GuardError, match="rollout and trainer disagree"):
        train(tmp_path, *NOTHING, *COPIED, "guards.rollout_probs_diff_mean_max=1e-9")


def test_where_no_token_is_trained_it_is_said_that_nothing_is_compared(tmp_path, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(NullReporter, "message", lambda self, text: said.append(text))
    monkeypatch.setattr(rewards, "truncated", lambda rollout: torch.ones(len(rollout.completions), dtype=torch.bool))
    masked = [*NOTHING[1:], TWO, "algorithm.mask_truncated_completions=true"]
    for found in steps(train(tmp_path, *masked, "actor.skip_zero_advantage=false")):
        assert found["actor/rows_with_gradient"] == 0.0
        assert found["actor/grad_norm"] == 0.0
        assert "training/rollout_probs_diff_mean" not in found
    assert [text.partition(":")[0] for text in said if "not compared" in text] == ["step 1", "step 2"]


def test_the_kl_in_the_reward_trains_and_is_what_the_metrics_say(tmp_path) -> None:
    """At the first step policy and reference are one: the KL is nothing. Later it is taken from the rewards."""
    kl = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.5", "algorithm.kl_penalty=k3"]
    run = train(tmp_path, *NOTHING[1:], TWO, *kl, "actor.optim.lr=0.01", "actor.ppo_mini_batch_size=2", name="kl")
    first, second = steps(run)
    assert first["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-9)
    assert first["critic/rewards/mean"] == pytest.approx(first["critic/score/mean"], abs=1e-6)
    assert second["actor/reward_kl_penalty"] > 1e-4
    assert second["critic/rewards/mean"] < second["critic/score/mean"]
    assert second["actor/reward_kl_penalty_coeff"] == 0.5
    assert "timing_s/ref" in second
    assert "actor/kl_loss" not in second
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    assert [key for key in second if f"`{key}`" not in page and not key.startswith("val/score/")] == []


def test_the_loss_has_the_entropy_s_weight_of_each_step(tmp_path) -> None:
    """Below the target the weight rises by the step to its bound, from nothing; the loss is what the metrics say of it."""
    control = "actor.entropy_ctrl={type: additive, target_entropy: 50.0, step: 0.04, max_coeff: 0.05}"
    run = steps(train(tmp_path, *NOTHING, control, "actor.optim.weight_decay=0"))
    assert [line["actor/entropy_coeff"] for line in run] == pytest.approx([0.0, 0.04, 0.05])
    for line in run:
        assert line["actor/rows_with_gradient"] == 1.0
        assert line["actor/pg_loss"] == 0.0
        assert line["actor/loss"] == pytest.approx(-line["actor/entropy_coeff"] * line["actor/entropy"], abs=1e-6)
    assert run[0]["actor/grad_norm"] == 0.0 < run[1]["actor/grad_norm"]


def test_a_baseline_is_on_the_scale_of_the_rewards(tmp_path) -> None:
    """remax: without a mean to subtract, doubling every reward and halving them by their deviation must cancel."""
    remax = [*NOTHING[1:], TWO, "algorithm.adv_estimator=remax", "reward.normalize=running_std"]
    plain = train(tmp_path, *remax, name="plain")
    doubled = train(tmp_path, *remax, "reward.source_weights={sort_digits: 2}", name="doubled")
    a, b = weights(plain.path), weights(doubled.path)
    assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-6
    assert steps(plain)[0]["critic/advantages/max"] > 0
