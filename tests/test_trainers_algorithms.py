"""Estimators and losses in whole runs: what they ask for is made, rows without a gradient are left out rightly, and what a user
writes is what is trained with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))

from test_trainers_rl import lines, train, weights

from rlctl.algorithms.table import ADVANTAGES, POLICY_LOSSES
from rlctl.trainers.rl import RLTrainer

# Without warm start: random weights differ in how often they say 1, and that is enough.
ONE = ["trainer.total_training_steps=1", "warm_start=null", "trainer.test_freq=0"]
TWO_STEPS = ["actor.ppo_mini_batch_size=2"]


def last(result) -> dict[str, float]:
    return lines(result.path / "metrics.jsonl")[-1]


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"grpo", "gae"}))
def test_every_estimator_trains(tmp_path, name) -> None:
    result = train(tmp_path, *ONE, f"algorithm.adv_estimator={name}")
    found = last(result)
    assert found["critic/advantages/max"] > 0
    # Pass@k never says that a sample was worse than nothing, and no sample need be worse than a greedy one.
    assert found["critic/advantages/min"] < 0 or name in ("grpo_passk", "remax")
    assert found["actor/grad_norm"] > 0
    assert ("timing_s/gen_max" in found) == ("greedy_scores" in ADVANTAGES[name].needs)
    assert ("timing_s/old_log_prob" in found) or "sum_p2" not in ADVANTAGES[name].needs
    assert json.loads((result.path / "manifest.json").read_text())["algorithm"] == name


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.keys() - {"vanilla"}))
def test_every_loss_trains(tmp_path, name) -> None:
    found = last(train(tmp_path, *ONE, *TWO_STEPS, f"actor.policy_loss.loss_mode={name}"))
    assert found["actor/num_steps"] == 2
    assert found["actor/grad_norm"] > 0
    assert 0 <= found["actor/pg_clipfrac"] <= 1
    assert "actor/entropy" in found
    assert "actor/ppo_kl" in found


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_are_chosen_before_the_batch_is_cut(tmp_path, name) -> None:
    """Micro-batches change nothing, also with one optimizer step, which needs old log-probs for the choice alone."""
    settings = [*ONE, f"actor.policy_loss.loss_mode={name}"]
    settings += {
        "clip_cov": ["actor.policy_loss.clip_cov_ratio=0.3", "actor.policy_loss.clip_cov_lb=0.01"],
        "kl_cov": ["actor.policy_loss.kl_cov_ratio=0.3", "actor.policy_loss.ppo_kl_coef=5", *TWO_STEPS],
    }[name]
    whole = train(tmp_path, *settings, name="whole")
    small = train(tmp_path, *settings, "actor.micro_batch_size_per_device=3", name="small")
    a, b = weights(whole.path), weights(small.path)
    # One AdamW step moves a weight by up to lr = 1e-4 whatever the size of its gradient.
    assert max(float((a[n] - b[n]).abs().max()) for n in a) < 3e-5
    assert last(small)["actor/grad_norm"] == pytest.approx(last(whole)["actor/grad_norm"], rel=1e-4)
    assert last(small)["actor/num_micro_batches"] > last(whole)["actor/num_micro_batches"]
    if name == "clip_cov":
        assert last(whole)["actor/pg_clipfrac"] > 0
    plain = train(tmp_path, *ONE, *(TWO_STEPS if name == "kl_cov" else ()), name="plain")
    assert last(plain)["actor/grad_norm"] != pytest.approx(last(whole)["actor/grad_norm"], rel=1e-3), "a choice matters"


@pytest.mark.parametrize("name", ["gspo", "kl_cov", "geo_mean"])
def test_rows_are_left_out_only_where_they_have_no_gradient(tmp_path, name) -> None:
    """The step is the same with and without them; a loss that does not vanish with the advantage keeps them all."""
    settings = [*ONE, *TWO_STEPS, f"actor.policy_loss.loss_mode={name}", "actor.loss_agg_mode=seq-mean-token-mean"]
    left_out = train(tmp_path, *settings, name="left_out")
    every = train(tmp_path, *settings, "actor.skip_zero_advantage=false", name="every")
    a, b = weights(left_out.path), weights(every.path)
    assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-6
    share = last(left_out)["actor/rows_with_gradient"]
    assert share == 1.0 if name == "kl_cov" else share < 1.0


def test_a_token_level_estimator_keeps_rows_by_their_tokens(tmp_path, monkeypatch) -> None:
    kept: list[tuple[set[int], torch.Tensor]] = []
    real = RLTrainer.rows_with_gradient

    def watch(self, batch):
        found = real(self, batch)
        kept.append((found, torch.stack([v.abs().max() for v in batch.split_items(batch.items["advantages"])])))
        return found

    monkeypatch.setattr(RLTrainer, "rows_with_gradient", watch)
    train(tmp_path, *ONE, "algorithm.adv_estimator=optimal_token_baseline")
    [(found, largest)] = kept
    assert found == set(largest.nonzero()[:, 0].tolist())
    assert len(found) > 0


def test_the_greedy_baseline_is_the_reward_of_a_greedy_completion(tmp_path, monkeypatch) -> None:
    """remax: one more sample a prompt, scored; the advantage is the difference, for one sample a prompt too."""
    seen = []
    real = RLTrainer.advantage_inputs

    def watch(self, batch, rollout, step, timer):
        batch, inputs = real(self, batch, rollout, step, timer)
        again = self.rollout.greedy(rollout.prompts, 12345)
        texts = [self.encoder.decode(c.token_ids) for c in again]
        seen.append((inputs["greedy_scores"].tolist(), [float("1" in text) for text in texts], rollout))
        return batch, inputs

    monkeypatch.setattr(RLTrainer, "advantage_inputs", watch)
    train(tmp_path, *ONE, "algorithm.adv_estimator=remax", "rollout.n=1", "data.train_batch_size=8")
    [(greedy, wanted, rollout)] = seen
    assert greedy == [wanted[c.prompt_index] for c in rollout.completions]
    assert len(greedy) == 8


OWN = """
import torch


def best_of_batch(scores):
    return torch.where(scores == scores.max(), 1.0, -1.0)


def unclipped(log_probs, old_log_probs, advantages):
    return -advantages * (log_probs - old_log_probs).exp()
"""


def test_a_user_s_estimator_and_loss_train_on_two_ranks_as_on_one(tmp_path) -> None:
    """The file is read on every rank."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    own = [
        *ONE,
        *TWO_STEPS,
        f"algorithm.adv_estimator={path}:best_of_batch",
        f"actor.policy_loss.loss_mode={path}:unclipped",
    ]
    one = train(tmp_path, *own, name="one")
    two = train(tmp_path, *own, "runtime.nproc=2", name="two")
    a, b = weights(one.path), weights(two.path)
    assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-5
    assert last(one)["critic/advantages/min"] == -1.0
    assert last(one)["actor/rows_with_gradient"] == 1.0
    manifest = json.loads((one.path / "manifest.json").read_text())
    assert manifest["algorithm"] == "best_of_batch + unclipped"


def test_the_full_kl_trains_and_is_the_expectation_of_the_estimates(tmp_path) -> None:
    settings = [*TWO_STEPS, "actor.use_kl_loss=true", "actor.kl_loss_coef=0.5", "trainer.total_training_steps=2"]
    full = train(tmp_path, *settings, "actor.kl_loss_type=full", name="full")
    k3 = train(tmp_path, *settings, "actor.kl_loss_type=k3+", name="k3")
    values = [last(r)["actor/kl_loss"] for r in (full, k3)]
    assert all(v > 0 for v in values)
    assert values[0] == pytest.approx(values[1], rel=1.0), "one is an estimate of the other"
    assert load_file(full.path / "export" / "model.safetensors")


def test_the_full_kl_of_a_large_batch_is_refused_in_words(tmp_path, monkeypatch) -> None:
    from rlctl.errors import EngineError
    from rlctl.roles import reference

    monkeypatch.setattr(reference, "WHOLE_GIB", 1e-6)
    with pytest.raises(EngineError, match="the KL over the whole vocabulary does not fit") as caught:
        train(tmp_path, *ONE, "actor.use_kl_loss=true", "actor.kl_loss_type=full")
    assert "kl_loss_type=k3+" in str(caught.value)
