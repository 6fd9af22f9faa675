"""The batch arithmetic, from prompts to optimizer steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.config.schema import RunConfig
from rlctl.microbatch import MicroBatchPlan, min_count
from rlctl.plan.arithmetic import (
    DEFAULT_TOKENS_PER_DEVICE,
    Line,
    MicroBound,
    micro_bound,
    pair_lines,
    rl_lines,
    rows_a_rank,
    scored_tokens,
    sft_lines,
    warm_start_lines,
)

TASK = {"task": {"name": "sort_digits", "train_size": 1000}}


def config(**sections: Any) -> RunConfig:
    values: dict[str, Any] = {"model": {"path": "nowhere"}, "data": TASK}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return RunConfig.model_validate(values)


def values(lines: list[Line]) -> dict[str, int | None]:
    assert len({line.key for line in lines}) == len(lines)
    return {line.key: line.value for line in lines}


def test_the_seeds_of_confusion() -> None:
    """2 prompts, 3 samples, dp 2 (world 4, tp 2): three trajectories a dp rank, and two optimizer steps for two epochs."""
    run = config(data={"train_batch_size": 2}, rollout={"n": 3}, actor={"ppo_epochs": 2})
    found = values(rl_lines(run, dp_size=2, token_ranks=1, num_rows=1000))
    assert found["trajectories"] == 6
    assert found["trajectories_per_dp_rank"] == 3
    assert found["mini_batches"] == 1
    assert found["optimizer_steps_per_step"] == 2
    assert found["global_steps"] == 500
    assert found["optimizer_steps"] == 1000


def test_a_pair_is_two_rows_that_are_read_before_they_train() -> None:
    run = config(data={"train_batch_size": 5}, trainer={"type": "dpo"}, actor={"micro_batch_size_per_device": 2})
    found = values(pair_lines(run, dp_size=2, token_ranks=1, num_rows=1000))
    assert (found["pairs"], found["rows"], found["mini_batch_rows_per_dp_rank"]) == (5, 10, 5)
    assert (found["micro_batches"], found["scoring_passes"], found["optimizer_steps"]) == (3, 2, 200)
    free = config(trainer={"type": "dpo"}, dpo={"loss_type": "simpo"})
    assert values(pair_lines(free, 1, 1, 1000))["scoring_passes"] == 1


def test_a_critic_takes_steps_of_its_own_and_its_warm_up_is_none_of_the_actor_s() -> None:
    sections: dict[str, Any] = {
        "data": {"train_batch_size": 8},
        "actor": {"ppo_mini_batch_size": 4, "ppo_epochs": 2},
        "algorithm": {"adv_estimator": "gae"},
        "trainer": {"total_training_steps": 10},
    }
    for critic, steps, actor_steps in (
        ({}, 40, 40),
        ({"ppo_mini_batch_size": 2, "ppo_epochs": 1, "warmup_steps": 3}, 40, 28),
    ):
        run = config(**sections, critic=critic)
        found = values(rl_lines(run, dp_size=1, token_ranks=1, num_rows=None))
        assert (found["critic_optimizer_steps"], found["optimizer_steps"]) == (steps, actor_steps)
    run = config(**sections, critic={"ppo_epochs": 3, "warmup_steps": 9})
    found = values(rl_lines(run, dp_size=1, token_ranks=1, num_rows=None))
    assert (found["critic_optimizer_steps"], found["optimizer_steps"]) == (60, 4)


def test_every_line_of_an_rl_run() -> None:
    run = config(
        data={"train_batch_size": 256, "max_prompt_length": 1024, "max_response_length": 3072},
        rollout={"n": 8},
        actor={"ppo_mini_batch_size": 64, "ppo_epochs": 2, "max_tokens_per_device": 8192},
        trainer={"total_training_steps": 10},
    )
    lines = rl_lines(run, dp_size=4, token_ranks=2, num_rows=None)
    assert [(line.key, line.value) for line in lines] == [
        ("prompts", 256),
        ("trajectories", 2048),
        ("trajectories_per_dp_rank", 512),
        ("mini_batches", 4),
        ("mini_batch_rows", 512),
        ("mini_batch_rows_per_dp_rank", 128),
        ("micro_batch_tokens", 16384),
        ("micro_batches", 32),
        ("optimizer_steps_per_step", 8),
        ("global_steps", 10),
        ("optimizer_steps", 80),
    ]
    how = {line.key: line.how for line in lines}
    assert how["trajectories"] == "256 prompts x rollout.n 8"
    assert how["mini_batches"] == "256 prompts / actor.ppo_mini_batch_size 64"
    assert how["micro_batch_tokens"] == "actor.max_tokens_per_device 8,192 x 2 ranks that share a row (usp x cp)"
    assert how["micro_batches"] == "128 rows / 4 rows of 4,096 tokens (max_prompt_length + max_response_length)"


def test_rows_that_do_not_divide_are_named() -> None:
    run = config(data={"train_batch_size": 10}, rollout={"n": 3})
    lines = {line.key: line for line in rl_lines(run, dp_size=4, token_ranks=1, num_rows=1000)}
    assert lines["trajectories_per_dp_rank"].value == 8
    assert lines["trajectories_per_dp_rank"].note == "30 is not divisible by dp 4: 2 ranks have 7"
    few = {line.key: line for line in sft_lines(config(trainer={"type": "sft"}, data={"train_batch_size": 3}), 4, 1, 9)}
    assert few["mini_batch_rows_per_dp_rank"].note == (
        "3 is not divisible by dp 4: 1 rank has 0, that is a padding batch of zero weight"
    )
    even = {line.key: line for line in rl_lines(run, dp_size=3, token_ranks=1, num_rows=1000)}
    assert even["trajectories_per_dp_rank"].note == ""


def test_fixed_rows() -> None:
    run = config(data={"train_batch_size": 16}, rollout={"n": 4}, actor={"micro_batch_size_per_device": 6})
    lines = {line.key: line for line in rl_lines(run, dp_size=2, token_ranks=1, num_rows=160)}
    assert (lines["micro_batch_rows"].value, lines["micro_batches"].value) == (6, 6)
    assert lines["micro_batches"].note == "the last one has 2 rows"
    assert lines["global_steps"].value == 10


def test_supervised_runs_and_the_warm_start() -> None:
    run = config(trainer={"type": "sft", "total_epochs": 2}, data={"train_batch_size": 24})
    found = values(sft_lines(run, dp_size=2, token_ranks=1, num_rows=100))
    assert found == {
        "rows": 24, "mini_batch_rows_per_dp_rank": 12, "micro_batch_tokens": 16384, "micro_batches": 1,
        "optimizer_steps_per_step": 1, "global_steps": 8, "optimizer_steps": 8,
    }  # fmt: skip
    assert warm_start_lines(run, 2, 1) == []
    warm = config(warm_start={"steps": 20, "batch_size": 64})
    assert values(warm_start_lines(warm, 2, 1)) == {
        "warm_start_steps": 20, "warm_start_rows": 64, "warm_start_micro_batches": 2,
    }  # fmt: skip


def test_an_unknown_number_of_rows_leaves_the_steps_open() -> None:
    found = values(rl_lines(config(), 1, 1, None))
    assert found["global_steps"] is None
    assert found["optimizer_steps"] is None


def test_the_default_budget_holds_one_row() -> None:
    long = config(data={"max_prompt_length": 30_000, "max_response_length": 10_000})
    assert micro_bound(long.actor, long, 2).max_tokens == 80_000
    assert micro_bound(config().actor, config(), 1).max_tokens == DEFAULT_TOKENS_PER_DEVICE


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40), st.integers(64, 300))
@settings(max_examples=200, deadline=None)
def test_packing_never_needs_more_micro_batches_than_planned(lengths: list[int], budget: int) -> None:
    bound = MicroBound(None, budget, longest=64)
    assert min_count(lengths, MicroBatchPlan(max_tokens=budget)) <= bound.micro_batches(len(lengths))


@given(st.integers(1, 500), st.integers(1, 64))
def test_rows_of_a_rank_differ_by_one_at_most(rows: int, dp: int) -> None:
    most = rows_a_rank(rows, dp)
    assert (most - 1) * dp < rows <= most * dp


@pytest.mark.parametrize(("prompt", "response"), [(4, 3), (1, 5), (8, 1)])
def test_scored_tokens_are_a_bound_that_is_reached(prompt: int, response: int) -> None:
    """Over every way to fill a micro-batch with rows of at least one prompt token."""
    run = config(data={"max_prompt_length": prompt, "max_response_length": response})
    for tokens, rows in itertools.product(range(2, 25), range(1, 5)):
        best = max(
            (
                sum(responses)
                for count in range(1, rows + 1)
                for responses in itertools.combinations_with_replacement(range(1, response + 1), count)
                if sum(responses) + count <= tokens
            ),
            default=0,
        )
        planned = scored_tokens(run, tokens, rows)
        assert best <= planned
        if tokens >= rows * (1 + response):
            assert planned == best
