"""The stage that makes rewards of scores: what the configuration says in which order, and what it remembers."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlctl.algorithms.lookup import builtin
from rlctl.algorithms.rewards.running import Moments
from rlctl.batch import GROUP, PackedBatch, pack
from rlctl.config.schema import RunConfig
from rlctl.data.columns import Row
from rlctl.data.dry_run import dry_run
from rlctl.data.rewards import RewardInput, RewardResult, RewardScorer
from rlctl.data.rewards.sources import require_sources
from rlctl.data.rewards.text import FunctionReward
from rlctl.data.sampler import BatchSampler
from rlctl.errors import DataError, GuardError
from rlctl.generation import Completion, FinishReason
from rlctl.records import AlgorithmKind
from rlctl.trainers import sampling
from rlctl.trainers.advantages import AdvantageStage
from rlctl.trainers.entropy import EntropyStage
from rlctl.trainers.evaluation import ScoredRollout
from rlctl.trainers.rewards import RewardStage
from rlctl.trainers.rl import RLTrainer, StepTimer, _component_means
from rlctl.trainers.sampling import prompts_with_signal

BASE = {"model": {"path": "m"}, "data": {"task": {"name": "sum"}, "max_response_length": 10}}


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({**BASE, **sections})


def stage(**sections: Any) -> RewardStage:
    made = config(**sections)
    return RewardStage(made.reward, made.algorithm, made.data.max_response_length)


def rollout(scores: list[float], sources: list[str] | None = None, lengths: list[int] | None = None) -> ScoredRollout:
    """One prompt a completion; those of 10 tokens are cut."""
    lengths = lengths or [2] * len(scores)
    sources = sources or ["a"] * len(scores)
    rows = [Row(i, f"r:{i}", "p", "1", None, source) for i, source in enumerate(sources)]
    done = [
        Completion(i, 0, [1] * n, [-1.0] * n, FinishReason.LENGTH if n == 10 else FinishReason.STOP)
        for i, n in enumerate(lengths)
    ]
    return ScoredRollout(rows, [[0]] * len(rows), done, [""] * len(rows), [RewardResult(s) for s in scores])


def batch(made: ScoredRollout, kl: float = 0.0) -> PackedBatch:
    """Each row a prompt token and its completion; the old policy is ``kl`` nats above the reference everywhere."""
    lengths = [1 + len(c.token_ids) for c in made.completions]
    return pack(
        {
            "loss_mask": [[False] + [True] * (n - 1) for n in lengths],
            "old_log_probs": [[-1.0] * n for n in lengths],
            "ref_log_probs": [[-1.0 - kl] * n for n in lengths],
        },
        rows={GROUP: [c.prompt_index for c in made.completions]},
        dtypes={"loss_mask": torch.bool},
    )


def test_rewards_are_shaped_in_the_order_of_the_page() -> None:
    """Penalty, factor of the source, deviation, bounds."""
    one = stage(
        reward={
            "overlong_buffer": {"len": 4, "penalty_factor": 2.0},
            "source_weights": {"b": 3.0},
            "normalize": "running_std",
            "clip_max": 1.0,
        }
    )
    made = rollout([1.0, 1.0, 1.0], ["a", "b", "b"], [2, 10, 8])
    unscaled = torch.tensor([1.0, 3.0 * (1 - 2), 3.0 * (1 - 1)]).double()
    assert torch.equal(one.unscaled(made), unscaled)
    assert torch.allclose(one.shape(made), (unscaled / unscaled.std()).clamp(max=1.0))
    assert stage().shape(made).tolist() == [1.0, 1.0, 1.0]


def test_each_source_has_its_own_scale() -> None:
    one = stage(reward={"normalize": "running", "normalize_by": "data_source"})
    found = one.shape(rollout([0.0, 2.0, 100.0, 300.0], ["a", "a", "b", "b"]))
    assert found.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5] * 2)
    together = stage(reward={"normalize": "running"}).shape(rollout([0.0, 2.0, 100.0, 300.0], ["a", "a", "b", "b"]))
    assert together[0] != pytest.approx(found[0])


@given(scores=st.lists(st.floats(-10, 10), min_size=1, max_size=8), order=st.randoms(use_true_random=False))
def test_rows_may_come_in_any_order(scores: list[float], order: Any) -> None:
    settings = {"reward": {"normalize": "running", "clip_min": -1.0}}
    places = list(range(len(scores)))
    order.shuffle(places)
    plain = stage(**settings).shape(rollout(scores))
    mixed = stage(**settings).shape(rollout([scores[i] for i in places]))
    torch.testing.assert_close(mixed, plain[places], rtol=1e-9, atol=1e-9)


def test_a_baseline_is_scaled_and_not_learnt_from() -> None:
    one = stage(reward={"normalize": "running"})
    made = rollout([0.0, 2.0])
    one.shape(made)
    before = one.state_dict()
    assert one.shape(rollout([3.0]), learn=False).tolist() == pytest.approx([2 / 2**0.5])
    assert one.state_dict() == before


def test_the_kl_is_taken_from_each_token_and_its_coefficient_follows() -> None:
    kl = {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.1, "horizon": 10}}
    one = stage(algorithm=kl, data={**BASE["data"], "train_batch_size": 2}, rollout={"n": 2})
    made = rollout([1.0, 0.0], lengths=[2, 3])
    found = one.inputs(batch(made, kl=0.5), made, one.shape(made))
    assert found["token_rewards"].tolist() == pytest.approx([0, -0.05, 0.95, 0, -0.05, -0.05, -0.05])
    assert found["scores"].tolist() == pytest.approx([0.9, -0.15])
    assert one.metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert one.metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert one.metrics["critic/rewards/mean"] == pytest.approx(0.375)
    assert one.coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))
    fixed = stage(algorithm={**kl, "kl_ctrl": {"kl_coef": 0.1}})
    fixed.inputs(batch(made, kl=0.5), made, fixed.shape(made))
    assert fixed.coef == 0.1


def test_a_resumed_control_says_whose_coefficient_goes_on() -> None:
    def made(coef: float, kind: str = "adaptive") -> RewardStage:
        return stage(algorithm={"use_kl_in_reward": True, "kl_ctrl": {"type": kind, "kl_coef": coef}})

    one = made(0.1)
    one._control(0.1, 1.0, 8)
    state = json.loads(json.dumps(one.state_dict()))
    assert made(0.1).load_state_dict(state) == []
    assert made(0.3, "fixed").load_state_dict(state) == [], "the configuration counts"
    other = made(0.3)
    (note,) = other.load_state_dict(state)
    assert "kl_coef was 0.1 and is 0.3" in note
    assert f"the checkpoint's {one.coef:g}" in note
    assert other.coef == one.coef
    said: list[str] = []
    trainer: Any = SimpleNamespace(
        sampler=SimpleNamespace(load_state_dict=lambda state: None),
        rollout=SimpleNamespace(version=0),
        ahead=None,
        actor=SimpleNamespace(budget=SimpleNamespace(in_a_row=0)),
        critic=None,
        rewards=made(0.3),
        entropy=EntropyStage(config().actor),
        context=SimpleNamespace(reporter=SimpleNamespace(message=said.append)),
    )
    RLTrainer.load_state_dict(trainer, {"sampler": {}, "rollout_version": 1, "rewards": state})
    assert said == [note]


def test_rewards_that_float32_cannot_hold_are_refused_by_setting_and_row() -> None:
    made = rollout([0.0, 2.0], ["a", "b"])
    for sections, words in (
        ({"source_weights": {"b": 1e308}}, r"r:1 .row 1. is too large after reward.source_weights"),
        ({"overlong_buffer": {"len": 4, "penalty_factor": 1e40}}, r"after reward.overlong_buffer"),
    ):
        with pytest.raises(GuardError, match=words):
            stage(reward=sections).shape(rollout([0.0, 2.0], ["a", "b"], [2, 10]))
    one = stage(reward={"normalize": "running_std"})
    one.moments[""] = Moments(2, 0.0, 1e-16)
    with pytest.raises(GuardError, match=r"after reward.normalize"):
        one.shape(rollout([0.0, 3e38]), learn=False)
    one = stage(algorithm={"use_kl_in_reward": True, "kl_penalty": "mse"})
    with pytest.raises(GuardError, match=r"after algorithm.kl_penalty mse"):
        one.inputs(batch(made, kl=1e30), made, one.shape(made))


def test_a_component_that_float32_cannot_hold_is_refused_by_name_and_row() -> None:
    def score(*values: float, weight: float = 1.0) -> list[RewardResult]:
        named = [(f"c{i}", weight, FunctionReward(lambda item, v=v: v)) for i, v in enumerate(values)]
        return RewardScorer(named).score([Row(3, "r:4", "p", "1", None, "a")], ["x"], ["stop"], [1])

    for large in (1e40, -1e40, 10**400):
        with pytest.raises(DataError, match=r"reward 'c1' is too large for r:4 .row 3."):
            score(1.0, large)
    with pytest.raises(DataError, match=r"weighted sum of reward.components is too large for r:4 .row 3."):
        score(1.0, 2.0, weight=1e308)
    largest = torch.finfo(torch.float32).max
    assert score(largest)[0].score == largest


def filtering(made: ScoredRollout, metric: str, estimator: str) -> Any:
    """What :func:`prompts_with_signal` looks at of a trainer."""
    whole = config(algorithm={"adv_estimator": estimator, "filter_groups": {"metric": metric}})
    advantages = AdvantageStage(
        builtin(AlgorithmKind.ADVANTAGE, estimator), whole.algorithm, [("x", 1.0), ("y", 1.0), ("idle", 0.0)]
    )
    rewards = RewardStage(whole.reward, whole.algorithm, 10)
    return SimpleNamespace(context=SimpleNamespace(config=whole), rewards=rewards, advantages=advantages, ahead=None)


@pytest.mark.parametrize("metric", ["reward", "score"])
def test_prompts_whose_components_differ_teach_gdpo_though_their_sum_agrees(metric: str) -> None:
    values = [(1, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 5), (0, 0, 0), (1, 0, 0)]
    made = rollout([float(x + y) for x, y, _ in values])
    done = [replace(c, prompt_index=i // 2) for i, c in enumerate(made.completions)]
    scored = [RewardResult(float(x + y), {"x": x, "y": y, "idle": z}) for x, y, z in values]
    made = ScoredRollout(made.rows[:3], made.prompts[:3], done, made.texts, scored)
    for estimator, wanted in (("gdpo", [0, 2]), ("grpo", [2])):
        trainer = filtering(made, metric, estimator)
        section = trainer.context.config.algorithm.filter_groups
        assert prompts_with_signal(trainer, section, made) == wanted


def test_a_metric_that_no_row_has_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rollout([0.0, 1.0])
    made = replace(made, rewards=[RewardResult(s, {"exact_match": s, "exact_match/part": 0.0}) for s in made.scores])
    monkeypatch.setattr(sampling, "_sample", lambda *_: sampling._Batch(made, 0.0))
    for metric, words in (
        ("exact_match/prat", "no row has the reward component exact_match/prat"),
        ("exact_match/part", "no prompt of 10 generation batches has samples that differ in their exact_match/part"),
    ):
        with pytest.raises(GuardError, match=words):
            sampling.gather(filtering(made, metric, "grpo"), 1, StepTimer())


def test_a_truncated_row_keeps_its_reward_and_no_token() -> None:
    one = stage(algorithm={"mask_truncated_completions": True, "use_kl_in_reward": True})
    made = rollout([1.0, 0.5], lengths=[2, 10])
    masked = one.mask(batch(made, kl=1.0), made)
    assert masked.items["loss_mask"].tolist() == [False, True, True] + [False] * 11
    found = one.inputs(masked, made, one.shape(made))
    assert found["scores"].tolist() == pytest.approx([1.0 - 0.002, 0.5])
    assert found["token_rewards"][3:].abs().max() == 0.0
    every = one.mask(batch(rollout([1.0], lengths=[10])), rollout([1.0], lengths=[10]))
    found = one.inputs(every, rollout([1.0], lengths=[10]), torch.tensor([1.0]).double())
    assert found["scores"].tolist() == [1.0]
    assert "actor/reward_kl_penalty" not in one.metrics


def test_what_it_remembers_passes_through_json_bit_by_bit() -> None:
    settings = {
        "reward": {"normalize": "running", "normalize_by": "data_source"},
        "algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.3}},
    }
    one, made = stage(**settings), rollout([0.1, 0.7, 0.3], ["a", "b", "b"])
    one.inputs(batch(made, kl=0.3), made, one.shape(made))
    other = stage(**settings)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert (other.kl_coef, other.moments) == (one.kl_coef, one.moments)
    assert other.kl_coef is not None
    assert other.coef != 0.3
    fresh = stage(**settings)
    fresh.load_state_dict({})
    assert fresh.coef == 0.3


# ---- rewards by source ------------------------------------------------------------------------------------------------


def scorer(sources: dict[str, list[str]]) -> RewardScorer:
    one, two = (FunctionReward(lambda item, v=v: v) for v in (1.0, 10.0))
    return RewardScorer([("one", 1.0, one), ("two", 0.5, two)], sources)


def score(made: RewardScorer, source: str) -> RewardResult:
    return made.score_one(RewardInput(Row(0, "r:1", "p", "1", None, source), "", "stop", 1))


def test_a_component_scores_the_rows_of_its_sources() -> None:
    made = scorer({"one": ["a"], "two": []})
    assert score(made, "a") == RewardResult(6.0, {"one": 1.0, "two": 10.0})
    assert score(made, "b") == RewardResult(5.0, {"two": 10.0})
    with pytest.raises(DataError, match="no reward is for r:1"):
        score(scorer({"one": ["a"], "two": ["a"]}), "b")


def test_what_is_reported_of_a_component_is_of_the_rows_that_it_scores() -> None:
    made = rollout([1.0, 5.0, 6.0])
    scored = [score(scorer({"one": ["a"], "two": ["b"]}), source) for source in ("a", "b", "b")]
    assert _component_means(replace(made, rewards=scored)) == {"one": 1.0, "two": 10.0}


def test_the_dry_run_of_the_data_check_asks_each_component_for_its_own_rows() -> None:
    rows = [Row(i, f"r:{i}", "p", "1", None, source) for i, source in enumerate(("a", "b"))]
    found = dry_run(rows, scorer({"one": ["a"], "two": ["b"]}), limit_s=60).report
    assert found.components == {"one": 0.5, "two": 5.0}
    assert found.truth == (1.0 + 0.5 * 10.0) / 2


def test_a_generation_batch_larger_than_the_data_is_named_as_such() -> None:
    with pytest.raises(DataError, match="fewer rows than one batch") as caught:
        BatchSampler(4, 8, setting="data.gen_batch_size")
    assert "data.gen_batch_size=4" in str(caught.value)


def test_sources_and_rows_must_know_each_other() -> None:
    rows = [Row(i, f"r:{i}", "p", "1", None, source) for i, source in enumerate(("gsm8k", "code"))]

    def look(**reward: Any) -> None:
        require_sources(config(reward=reward).reward, rows)

    look()
    look(components=[{"name": "number", "sources": ["gsm8k"]}, {"name": "math"}])
    with pytest.raises(DataError, match="no row has the data_source 'gsm8'") as caught:
        look(components=[{"name": "number", "sources": ["gsm8"]}, {"name": "math"}])
    assert "did you mean 'gsm8k'?" in str(caught.value)
    with pytest.raises(DataError, match="source_weights names"):
        look(source_weights={"cod": 2.0})
    with pytest.raises(DataError, match="rows of data_source code have no reward"):
        look(components=[{"name": "number", "sources": ["gsm8k"]}])


# ---- what the configuration refuses ------------------------------------------------------------------------------------

ADAPTIVE = {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive"}}
GROUPS = {"filter_groups": {}}
TWICE = [{"name": "number"}, {"name": "number"}]
SFT = {"trainer": {"type": "sft"}}
TEACHER = {"teacher": {"model": {"path": "t"}}, "distillation": {}}
REFUSED = {
    "bounds": ({"reward": {"clip_min": 1.0, "clip_max": 1.0}}, "is not below reward.clip_max"),
    "no scale": ({"reward": {"normalize_by": "data_source"}}, "reward.normalize is none"),
    "buffer": ({"reward": {"overlong_buffer": {"len": 11}}}, "more than data.max_response_length 10"),
    "kl off": ({"algorithm": {"kl_ctrl": {"kl_coef": 0.5}}}, "algorithm.use_kl_in_reward is false"),
    "kl kind off": ({"algorithm": {"kl_penalty": "k3"}}, "algorithm.kl_penalty is of the KL in the reward"),
    "fixed": ({"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"target_kl": 1.0}}}, "set adaptive"),
    "zero": ({"algorithm": {**ADAPTIVE, "kl_ctrl": {"type": "adaptive", "kl_coef": 0}}}, "start above 0"),
    "gdpo": ({"algorithm": {**ADAPTIVE, "adv_estimator": "gdpo"}}, "nothing with algorithm.adv_estimator gdpo"),
    "one sample": (
        {"algorithm": {**GROUPS, "adv_estimator": "reinforce_plus_plus"}, "rollout": {"n": 1}},
        "filter_groups compares the samples",
    ),
    "no such metric": ({"algorithm": {"filter_groups": {"metric": "acc"}}}, "the components exact_match"),
    "one batch takes all": (
        {
            "algorithm": {**ADAPTIVE, "kl_ctrl": {"type": "adaptive", "horizon": 20}},
            "data": {**BASE["data"], "train_batch_size": 50},
            "rollout": {"n": 2},
        },
        "would take the whole coefficient away",
    ),
    "no such number": (
        {"reward": {"components": TWICE}, "algorithm": {"filter_groups": {"metric": "number_7"}}},
        "number_7, and there are reward, score and the components number, number_2",
    ),
    "no part of a reward": ({"algorithm": {"filter_groups": {"metric": "reward/x"}}}, "the components exact_match"),
    "sft groups": ({**SFT, "algorithm": GROUPS}, "algorithm.filter_groups has nothing to do in SFT"),
    "sft kl": ({**SFT, "algorithm": ADAPTIVE}, "algorithm.kl_ctrl has nothing to do in SFT"),
    "sft kl in the reward": ({**SFT, "algorithm": ADAPTIVE}, "algorithm.use_kl_in_reward has nothing to do in SFT"),
    "sft correction": ({**SFT, "algorithm": {"rollout_correction": {}}}, "rollout_correction has nothing to do in SFT"),
    "sft entropy": ({**SFT, "actor": {"entropy_ctrl": {"type": "sac"}}}, "actor.entropy_ctrl has nothing to do in SFT"),
    "sft shaping": ({**SFT, "reward": {"clip_max": 1.0}}, "reward.clip_max has nothing to do in SFT"),
    "sft batch": (
        {**SFT, "data": {**BASE["data"], "gen_batch_size": 8}},
        "data.gen_batch_size has nothing to do in SFT",
    ),
    "generation batch": (
        {"data": {**BASE["data"], "gen_batch_size": 8}},
        "gen_batch_size is of algorithm.filter_groups",
    ),
    "groups, teacher": ({**TEACHER, "algorithm": GROUPS}, "filter_groups does nothing without distillation.use_task"),
    "teacher": ({**TEACHER, "reward": {"clip_max": 1.0}}, "nothing without distillation.use_task_rewards"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_would_do_nothing_are_refused(name: str) -> None:
    sections, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        config(**sections)


def test_the_kl_in_the_reward_needs_a_reference_and_its_pool() -> None:
    pools = {"runtime": {"pools": {"other": {"nproc": 1}}}, "ref": {"pool": "other"}}
    made = config(algorithm={"use_kl_in_reward": True}, **pools)
    assert made.needs_reference
    assert "other" in made.pools_used()
    assert not config().needs_reference
    assert "other" not in config(**pools).pools_used()
