"""Dynamic sampling in whole runs: what is trained on, where the search ends, and that it is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_trainers_rl import lines, train

from rlctl.errors import GuardError
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.evaluation import ScoredRollout
from rlctl.trainers.rl import RLTrainer

# Random weights, so that some prompts have samples with a 1 and others none.
BARE = ["warm_start=null", "trainer.test_freq=0", "trainer.total_training_steps=2", "rollout.n=3"]


@pytest.fixture
def trained(monkeypatch) -> list[ScoredRollout]:
    """Every rollout that a step packs."""
    seen: list[ScoredRollout] = []
    real = RLTrainer.pack

    def watch(self, rollout):
        seen.append(rollout)
        return real(self, rollout)

    monkeypatch.setattr(RLTrainer, "pack", watch)
    return seen


@pytest.fixture
def said(monkeypatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(NullReporter, "message", lambda self, text: texts.append(text))
    return texts


def groups(rollout: ScoredRollout) -> list[list[float]]:
    out: list[list[float]] = [[] for _ in rollout.prompts]
    for completion, score in zip(rollout.completions, rollout.scores, strict=True):
        out[completion.prompt_index].append(score)
    return out


def test_a_step_trains_on_prompts_with_a_signal_alone(tmp_path, trained, said) -> None:
    found = lines(train(tmp_path, *BARE, "algorithm.filter_groups={metric: contains}").path / "metrics.jsonl")[1:]
    assert len(trained) == len(found) == 2
    for rollout, line in zip(trained, found, strict=True):
        assert len(rollout.prompts) == len(rollout.rows) == 4
        assert all(len(scores) == 3 and len(set(scores)) > 1 for scores in groups(rollout))
        assert line["actor/rows_with_gradient"] == 1.0
        sampled, constant, surplus = (
            line[f"dynamic_sampling/prompts_{kind}"] for kind in ("sampled", "constant", "surplus")
        )
        assert sampled - constant - surplus == 4
        assert sampled == 4 * line["train/num_gen_batches"]
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    assert [key for key in found[0] if f"`{key}`" not in page] == []
    assert sum(line["dynamic_sampling/prompts_constant"] for line in found) > 0, "else this shows nothing"
    assert max(line["train/num_gen_batches"] for line in found) > 1
    assert not [text for text in said if "ended the search" in text]


def test_the_bound_ends_the_search_in_words_and_the_step_trains_on_what_there_is(tmp_path, trained, said) -> None:
    bound = "algorithm.filter_groups={metric: score, max_num_gen_batches: 2}"
    found = lines(train(tmp_path, *BARE, bound, "data.gen_batch_size=2").path / "metrics.jsonl")[1:]
    ended = [text for text in said if "max_num_gen_batches=2 ended the search" in text]
    short = [rollout for rollout in trained if len(rollout.prompts) < 4]
    assert len(ended) == len(short) > 0
    assert f"trains on {len(short[0].prompts)} of 4 prompts, the others of 4 have samples of one score" in ended[0]
    for rollout, line in zip(trained, found, strict=True):
        assert line["train/num_gen_batches"] == 2
        assert all(len(set(scores)) > 1 for scores in groups(rollout))
        assert line["actor/grad_norm"] > 0


def test_a_step_without_any_signal_stops_the_run_in_words(tmp_path) -> None:
    nothing = "reward.components=[{name: contains, args: {text: 'zzz'}}]"
    with pytest.raises(GuardError, match="no prompt of 2 generation batches has samples that differ") as caught:
        train(tmp_path, *BARE, nothing, "algorithm.filter_groups={max_num_gen_batches: 2}")
    assert "8 prompts, scores from 0 to 0" in str(caught.value)
