"""Rollout correction in the loop: a rollout whose log-probs are off, and what the update makes of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlctl.algorithms.losses import IS_WEIGHTS
from rlctl.batch import PackedBatch
from rlctl.config.load import load_config
from rlctl.engine import Engine
from rlctl.plugins import load_plugins
from rlctl.roles.actor import ActorRole
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.critic import CriticStage
from rlctl.trainers.run import Runner, RunResult

TINY = [
    "data.train_batch_size=4",
    "rollout.n=4",
    "data.task.val_size=4",
    "data.task.train_size=16",
    "data.task.args={length: 3}",
    "trainer.num_threads=1",
    "trainer.total_training_steps=1",
    "trainer.logger=[jsonl]",
    "warm_start=null",
    "reward.components=[{name: contains, args: {text: '1'}}]",
    "guards.rollout_probs_diff_mean_max=1",
]
SHIFTS = (0.0, 0.3, -0.8, 0.05, 2.5, -1.5, 0.0)
"""Nats that the rollout is off by, by the token's place in its response; 2.5 and -1.5 are to be rejected."""
Train = Callable[..., tuple[RunResult, list[PackedBatch]]]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """A run of one step whose rollouts are off by ``shifts``, and the mini-batches that it was trained on."""

    def go(
        *overrides: str, shifts: tuple[float, ...] = SHIFTS, name: str = "run"
    ) -> tuple[RunResult, list[PackedBatch]]:
        honest, step, seen = Engine.generate, ActorRole._step, list[PackedBatch]()

        def off(self, request, on_done=None):
            return [
                replace(c, log_probs=[p + shifts[i % len(shifts)] for i, p in enumerate(c.log_probs)])
                for c in honest(self, request, on_done)
            ]

        def watched(self, mini, *, first):
            seen.append(mini)
            return step(self, mini, first=first)

        plugins = load_plugins()
        resolved = load_config("quickstart", [*TINY, *overrides], plugins=plugins)
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "generate", off)
            patched.setattr(ActorRole, "_step", watched)
            result = Runner(resolved, plugins, NullReporter(), run_dir=tmp_path / name).execute()
        return result, seen

    return go


def rows(batch: PackedBatch, name: str) -> list[list]:
    return [part.tolist() for part in batch.items[name].tensor_split(batch.cu_seqlens[1:-1])]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_and_rejections_reach_the_loss(train: Train, level: str) -> None:
    on = [
        f"algorithm.rollout_correction.rollout_is={level}",
        "algorithm.rollout_correction.rollout_is_threshold=1.2",
        "algorithm.rollout_correction.rollout_rs=token",
        "algorithm.rollout_correction.rollout_rs_threshold=3.0",
        "algorithm.rollout_correction.rollout_rs_threshold_lower=0.25",
        "actor.skip_zero_advantage=false",
    ]
    result, [mini] = train(*on)
    old, rollout, advantages = (rows(mini, name) for name in ("old_log_probs", "rollout_log_probs", "advantages"))
    # What was sampled: every place with a log-prob of the rollout, rejected or not.
    sampled = [[number != 0 for number in row] for row in rollout]
    ratios = [
        [math.exp(a - b) if s else 0.0 for a, b, s in zip(*row, strict=True)]
        for row in zip(old, rollout, sampled, strict=True)
    ]
    kept = [[0.25 <= ratio <= 3 for ratio in row] for row in ratios]
    assert rows(mini, "loss_mask") == kept
    everything, trained = sum(map(sum, sampled)), sum(map(sum, kept))
    lost = everything - trained
    assert lost > 0
    # Advantages were made before: a rejected token has its row's.
    assert any(a for row in zip(advantages, sampled, kept, strict=True) for a, s, k in zip(*row, strict=True) if s > k)
    weights = ratios if level == "token" else [[math.prod(r for r in row if r)] * len(row) for row in ratios]
    # One optimizer step: the policy is still the old one, the loss of a token is minus its weighed advantage.
    terms = [
        [(-a * min(w, 1.2), -a) for a, w, k in zip(*row, strict=True) if k]
        for row in zip(advantages, weights, kept, strict=True)
    ]
    want, unweighed = (sum(term[i] for row in terms for term in row) / trained for i in (0, 1))
    found = result.last
    assert found["actor/pg_loss"] == pytest.approx(want, abs=1e-6)
    assert abs(want - unweighed) > 1e-3  # else this shows nothing
    assert found["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(lost / everything)
    assert found["rollout_corr/rollout_is_max"] == pytest.approx(1.2)
    assert found["actor/grad_norm"] > 0
    # Compared is every sampled token, also those that are rejected.
    gaps = [
        abs(math.exp(a) - math.exp(b))
        for row in zip(old, rollout, sampled, strict=True)
        for a, b, s in zip(*row, strict=True)
        if s
    ]
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)

    if level == "token":
        cut, [parts] = train(*on, "actor.max_tokens_per_device=32", "data.max_prompt_length=16", name="cut")
        assert cut.last["actor/num_micro_batches"] > 1
        assert cut.last["actor/pg_loss"] == pytest.approx(want, abs=1e-6)
        assert torch.equal(parts.items["loss_mask"], mini.items["loss_mask"])


def test_a_critic_learns_from_rejected_tokens_too(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    learn, taught = CriticStage.learn, list[PackedBatch]()

    def watched(self, batch, generator):
        taught.append(batch)
        return learn(self, batch, generator)

    monkeypatch.setattr(CriticStage, "learn", watched)
    rejection = "algorithm.rollout_correction={rollout_rs: token, rollout_rs_threshold: 3.0}"
    result, [mini] = train(rejection, "algorithm.adv_estimator=gae", "actor.skip_zero_advantage=false")
    share = result.last["rollout_corr/rollout_rs_masked_fraction"]
    assert 0 < share < 1
    whole = int(taught[0].items["loss_mask"].sum())
    assert int(mini.items["loss_mask"].sum()) == round(whole * (1 - share))


def test_rejected_tokens_have_no_gradient(train: Train) -> None:
    """All of them: nothing moves, whatever else is in the loss."""
    result, [mini] = train(
        "algorithm.rollout_correction={rollout_rs: token, rollout_rs_threshold: 2.0}",
        "actor.entropy_coeff=0.1",
        shifts=(3.0, -3.0),
    )
    assert result.last["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert result.last["actor/grad_norm"] == 0.0
    assert mini.is_padding
    assert abs(result.last["training/rollout_probs_diff_mean"]) > 0.01


def test_without_the_section_nothing_is_weighed_or_recomputed(train: Train) -> None:
    result, [mini] = train("guards.rollout_logprob_check=false")
    assert not [name for name in result.last if name.startswith("rollout_corr/")]
    assert not {IS_WEIGHTS, "old_log_probs"} & set(mini.items)
    assert "timing_s/old_log_prob" not in result.last


def test_bypass_saves_the_pass_and_trains_against_the_rollout(train: Train) -> None:
    bypass = ["algorithm.rollout_correction.bypass_mode=true", "guards.rollout_logprob_check=false"]
    result, minis = train(*bypass, "actor.ppo_mini_batch_size=2", "actor.skip_zero_advantage=false")
    assert len(minis) == 2
    for mini in minis:
        assert torch.equal(mini.items["old_log_probs"], mini.items["rollout_log_probs"])
    assert "timing_s/old_log_prob" not in result.last
    assert not [name for name in result.last if name.startswith("rollout_corr/")]
    assert result.last["actor/pg_clipfrac"] > 0  # the ratio to the rollout, which is off by more than the clip


def test_every_metric_is_documented(train: Train) -> None:
    everything = (
        "algorithm.rollout_correction={rollout_is: geometric, rollout_is_threshold_lower: 0.1, rollout_rs: sequence, "
        "rollout_rs_threshold: 50, rollout_token_veto_threshold: 0.01}"
    )
    result, _ = train(everything)
    written = {name for name in result.last if name.startswith("rollout_corr/")}
    page = (Path(__file__).resolve().parents[1] / "docs" / "metrics.md").read_text()
    assert written == set(re.findall(r"`(rollout_corr/\w+)`", page))
