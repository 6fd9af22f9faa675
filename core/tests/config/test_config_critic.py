"""The critic's section: made by its estimator, following the actor, refused where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlctl.config.load import load_config
from rlctl.config.problems import InvalidConfigError, Problem
from rlctl.config.schema import RunConfig
from rlctl.plugins import PluginSet

Write = Callable[..., str]

BASE = """\
model: {path: org/tiny}
data: {task: {name: sort_digits}, train_batch_size: 32}
actor: {backend: grid, max_tokens_per_device: 4096, parallel: {tp: 2}, engine: {pipeline_chunks: 2}}
rollout: {backend: sampler, n: 1}
runtime: {nproc: 2}
algorithm: {adv_estimator: gae}
"""


def problems_of(plugins: PluginSet, path: str, *overrides: str, **flags: Any) -> tuple[Problem, ...]:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(path, overrides, flags, plugins)
    return tuple(caught.value.problems)


def test_choosing_gae_makes_a_critic_that_follows_the_actor(plugins: PluginSet, run_file: Write) -> None:
    resolved = load_config(run_file(BASE), plugins=plugins)
    critic = resolved.config.critic
    assert critic is not None
    assert (critic.backend, critic.engine, critic.parallel.tp) == ("grid", {"pipeline_chunks": 2}, 2)
    assert (critic.max_tokens_per_device, critic.pool) == (4096, "")
    assert (critic.optim.lr, resolved.config.actor.optim.lr) == (1e-5, 1e-6)
    assert (critic.value_clip, critic.ppo_epochs, critic.ppo_mini_batch_size, critic.warmup_steps) == (
        0.5,
        None,
        None,
        0,
    )
    assert critic.model is None
    assert resolved.origins["critic.backend"] == "as actor.backend"
    assert resolved.origins["critic.parallel.tp"] == "as actor.parallel.tp"
    # A resumed run with other sizes: the critic goes on to follow.
    again = load_config(run_file(resolved.to_yaml(), "again.yaml"), ["actor.parallel.tp=1"], plugins=plugins).config
    assert again.critic is not None
    assert (again.critic.backend, again.critic.parallel.tp, again.critic.optim.lr) == ("grid", 1, 1e-5)


def test_other_estimators_and_sft_make_none(plugins: PluginSet, run_file: Write) -> None:
    grpo = ["algorithm.adv_estimator=grpo", "rollout.n=2"]
    assert load_config(run_file(BASE), grpo, plugins=plugins).config.critic is None
    assert load_config(run_file(BASE), ["trainer.type=sft"], plugins=plugins).config.critic is None


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (
            ["algorithm.adv_estimator=grpo", "rollout.n=2", "critic.value_clip=0.2"],
            "algorithm.adv_estimator",
            "set it to gae, or take critic",
        ),
        (["trainer.type=sft", "critic={}"], "critic", "critic has nothing to do in SFT"),
        (
            ["critic.warmup_steps=8", "trainer.total_training_steps=8"],
            "critic.warmup_steps",
            "critic.warmup_steps is 8, and the run has 8 steps (trainer.total_training_steps): the actor would never be trained",
        ),
        (["critic.ppo_mini_batch_size=5"], "data.train_batch_size", "not a multiple of critic.ppo_mini_batch_size 5"),
        (
            ["critic.pool=nowhere", "critic.parallel.tp=1"],
            "critic.pool",
            "runtime.pools={nowhere: {nproc: 1}} makes it",
        ),
        (["critic.max_tokens_per_device=8"], "critic.max_tokens_per_device", "cannot hold one row"),
        (["critic.value_clip=0"], "critic.value_clip", "wanted a number, more than 0"),
        (["algorithm.gamma=1.5"], "algorithm.gamma", "at most 1"),
        (["algorithm.lam=-1"], "algorithm.lam", "at least 0"),
        (
            ["algorithm.adv_estimator=grpo", "rollout.n=2", "algorithm.lam=0.9"],
            "algorithm.lam",
            "grpo does not read it (gae does)",
        ),
        (["critic.parallel.tp=1"], "critic.parallel", "Leave critic.parallel out"),
        (["critic.cliprange_value=0.5"], "critic.cliprange_value", "In rlctl this is critic.value_clip"),
        (["critic.engine.kernel=fast"], "critic.engine.kernel", "a key of plain, and critic.backend is grid"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_launch(
    plugins: PluginSet, run_file: Write, overrides: list[str], path: str, words: str
) -> None:
    [problem] = problems_of(plugins, run_file(BASE), *overrides)
    assert problem.path == path
    assert words in str(problem)


def test_distillation_without_task_rewards_has_nothing_for_a_critic(plugins: PluginSet, run_file: Write) -> None:
    taught = BASE + "teacher: {model: {path: org/big}}\n"
    [problem] = problems_of(plugins, run_file(taught), "distillation={}")
    assert "without distillation.use_task_rewards nothing learns from its advantages" in problem.what
    both = load_config(run_file(taught), ["distillation={use_task_rewards: true}"], plugins=plugins).config
    assert both.critic is not None


def test_a_backend_without_value_models_is_refused_with_those_that_have_them(
    plugins: PluginSet, run_file: Write
) -> None:
    text = BASE.replace("actor: {backend: grid, ", "actor: {backend: plain, ").replace(
        "engine: {pipeline_chunks: 2}", ""
    )
    text = text.replace("parallel: {tp: 2}, ", "")
    [problem] = problems_of(plugins, run_file(text))
    assert problem.path == "actor.backend"
    assert problem.what == "plain has no value_model, which a critic is"
    assert problem.wanted == "one of fsdp2, grid, megatron, veomni"
    assert problem.hint == "set critic.backend=grid"
    [problem] = problems_of(plugins, run_file(BASE), "critic.backend=plain")
    assert problem.path == "critic.backend"
    mixed = load_config(run_file(text), ["critic={backend: grid, parallel: {tp: 2}}"], plugins=plugins).config
    assert mixed.critic is not None
    assert (mixed.actor.backend, mixed.critic.backend) == ("plain", "grid")


def test_the_backend_flag_moves_the_critic_too(plugins: PluginSet, run_file: Write) -> None:
    text = BASE.replace(
        "actor: {backend: grid, max_tokens_per_device: 4096, parallel: {tp: 2}, engine: {pipeline_chunks: 2}}",
        "actor: {backend: plain}",
    )
    for more in ("", "critic: {backend: plain}\n", "critic: {value_clip: null}\n"):
        config = load_config(run_file(text + more), [], {"backend": "grid"}, plugins).config
        assert config.critic is not None
        assert (config.actor.backend, config.critic.backend) == ("grid", "grid")


def test_a_critic_has_a_pool_of_its_own(plugins: PluginSet, run_file: Write) -> None:
    pools = ["runtime.pools={judge: {nproc: 1}}", "critic.pool=judge", "critic.parallel.tp=1"]
    config = load_config(run_file(BASE), pools, plugins=plugins).config
    assert config.pools_used() == {"main": 2, "judge": 1}
    [problem] = problems_of(plugins, run_file(BASE), "runtime.pools={judge: {nproc: 1}}")
    assert "where no role lives" in problem.what


def test_a_configuration_made_by_hand_asks_for_the_section() -> None:
    with pytest.raises(ValueError, match="gae needs a critic: add critic"):
        RunConfig.model_validate(
            {"model": {"path": "x"}, "data": {"task": {"name": "sort_digits"}}, "algorithm": {"adv_estimator": "gae"}}
        )
