"""``model.lora``: who can train adapters, what else it asks of a configuration, and when the base model is the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlctl.config.load import load_config
from rlctl.config.problems import InvalidConfigError
from rlctl.config.schema_lora import random_base_words, reference_is_base
from rlctl.plugins import PluginSet

Write = Callable[..., str]

BASE = (
    "model: {path: org/tiny, lora: {}}\ndata: {task: {name: sort_digits}}\nactor: {backend: plain}\n"
    "rollout: {backend: sampler}\n"
)


def said(plugins: PluginSet, path: str, *overrides: str) -> list[str]:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(path, overrides, {}, plugins)
    return [str(problem) for problem in caught.value.problems]


def test_a_backend_without_adapters_is_refused_with_those_that_have_them(plugins: PluginSet, run_file: Write) -> None:
    [words] = said(plugins, run_file(BASE), "actor.backend=grid")
    assert words.startswith("model.lora (")
    assert "grid trains no adapters, wanted a backend that does: fsdp2, plain. Set actor.backend=plain" in words
    assert load_config(run_file(BASE), ["actor.backend=grid", "model.lora=null"], {}, plugins).config.model.lora is None


def test_a_critic_has_adapters_of_its_own_section_alone(plugins: PluginSet, run_file: Write) -> None:
    gae = ["algorithm.adv_estimator=gae", "critic.backend=grid"]
    load_config(run_file(BASE), gae, {}, plugins)
    [words] = said(plugins, run_file(BASE), *gae, "critic.model={path: org/judge, lora: {}}")
    assert words.startswith("critic.model.lora (")
    assert "Set critic.backend=plain" in words


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.lora.target_modules=[]", "names no layer: set it to all-linear"),
        ("model.lora.target_modules=[1]", "found a list of 1, wanted text or a list of texts"),
        ("model.lora.target_modules=3", "found 3, wanted text or a list of texts"),
        ("model.lora.rank=0", "at least 1"),
        ("model.lora.alpha=0", "more than 0"),
        ("model.lora.dropout=1.0", "less than 1"),
        ("model.lora.r=4", "Keys of model.lora: rank, alpha"),
        ("model.lora_rank=4", "In rlctl this is model.lora.rank"),
    ],
)
def test_a_wrong_value_is_one_problem_in_words(override: str, words: str, plugins: PluginSet, run_file: Write) -> None:
    [problem] = said(plugins, run_file(BASE), override)
    assert words in problem


def test_a_teacher_has_no_adapters(plugins: PluginSet, run_file: Write) -> None:
    [words] = said(plugins, run_file(BASE), "distillation={}", "teacher={model: {path: org/big, lora: {}}}")
    assert "teacher.model.lora has nothing to do" in words


@pytest.mark.parametrize(
    ("overrides", "base"),
    [
        ([], False),  # nothing asks for a reference
        (["actor.use_kl_loss=true"], True),
        (["algorithm.use_kl_in_reward=true"], True),
        (["actor.use_kl_loss=true", "ref.engine.param_offload=true"], True),
        (["actor.use_kl_loss=true", "model.lora=null"], False),
        (["actor.use_kl_loss=true", "ref.backend=grid"], False),
        (["actor.use_kl_loss=true", "runtime.pools.other.nproc=1", "ref.pool=other"], False),
        (["actor.use_kl_loss=true", "trainer.device=cuda", "runtime.nproc=2", "ref.parallel.usp=2"], False),
    ],
)
def test_the_reference_is_the_base_where_both_live_together(
    overrides: list[str], base: bool, plugins: PluginSet, run_file: Write
) -> None:
    assert reference_is_base(load_config(run_file(BASE), overrides, {}, plugins).config) is base


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], None),
        (["model.init=random"], "set model.path to trained ones"),
        (["model.init=random", "model.lora=null"], None),
        (["model.init=random", "warm_start.steps=5"], "or warm_start.lora=false"),
        (["model.init=random", "warm_start={steps: 5, lora: false}"], None),
    ],
)
def test_adapters_on_random_weights_are_spoken_of(
    overrides: list[str], said: str | None, plugins: PluginSet, run_file: Write
) -> None:
    words = random_base_words(load_config(run_file(BASE), overrides, {}, plugins).config)
    assert (words is None) if said is None else (words is not None and said in words)
