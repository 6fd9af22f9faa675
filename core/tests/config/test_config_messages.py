"""Plain words: type errors, near names, other projects' names, YAML that cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlctl.config.document import dotted
from rlctl.config.foreign import FOREIGN
from rlctl.config.load import load_config
from rlctl.config.problems import InvalidConfigError, Problem
from rlctl.config.schema_paths import walk
from rlctl.errors import ConfigError, RlctlError
from rlctl.plugins import PluginSet

Write = Callable[..., str]

BASE = (
    "model: {path: org/tiny}\ndata: {task: {name: sort_digits}}\nactor: {backend: plain}\nrollout: {backend: sampler}\n"
)


def one_problem(plugins: PluginSet, path: str, *overrides: str) -> Problem:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(path, overrides, plugins=plugins)
    assert len(caught.value.problems) == 1, caught.value
    return caught.value.problems[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.seed=1.5", "found 1.5, wanted a whole number, at least 0"),
        (
            "trainer.seed='5'",
            "found the text '5', wanted a whole number, at least 0. Write 5, without quotes or separators",
        ),
        ("trainer.seed=null", "found null (nothing), wanted a whole number, at least 0"),
        ("trainer.seed=true", "found true, wanted a whole number, at least 0"),
        ("data.train_batch_size=99999999999", "wanted a whole number, at least 1 and at most 2147483647"),
        ("actor.optim.lr=-1", "found -1, wanted a number, more than 0"),
        ("actor.optim.lr=.inf", "found inf, wanted a number, more than 0"),
        ("actor.optim.betas=[0.9]", "found a list of 1, wanted a list of 2"),
        ("actor.optim.betas=[0.9, 1.5]", "actor.optim.betas[1] (override actor.optim.betas=[0.9, 1.5]): found 1.5"),
        ("data.shuffle=yes", "wanted true or false. Write true, without quotes"),
        ("data.shuffle=1", "found 1, wanted true or false"),
        ("actor.loss_agg_mode=token_mean", "Did you mean token-mean?"),
        ("trainer.device=gpu", "wanted one of auto, cpu, cuda, npu"),
        ("actor={backend: plain, a: 1}", "actor.a (override actor={backend: plain, a: 1}): unknown key"),
        ("actor.optim=3", "found 3, wanted a section with keys such as name, lr, betas, eps"),
        ("actor.optim=null", "Write optim: {} or take the line out"),
        ("runtime.pools={c: null}", "wanted a section. Write c: {} or take the line out"),
        ("model.config=[1]", "found a list of 1, wanted a mapping, or null"),
        ("reward.components=[]", "found an empty list, wanted at least 1 in a list of sections"),
        ("reward.components=[3]", "reward.components[0] (override reward.components=[3]): found 3, wanted a section"),
        ("reward.components=[{weight: 1}]", "reward.components[0].name"),
        ("data.prompt_template='{x}'", "the template needs {prompt} and no other field"),
        ("data.train_files={a: b}", "found a mapping with a, wanted a list of texts"),
        ("actor.parallel.dp_shard=0", "set -1 (what the others leave) or at least 1"),
    ],
)
def test_wrong_values_in_plain_words(override: str, words: str, plugins: PluginSet, run_file: Write) -> None:
    text = str(one_problem(plugins, run_file(BASE), override))
    assert words in text
    assert f"override {override}" in text


def test_numbers_where_text_is_wanted_are_told_to_be_quoted(plugins: PluginSet, run_file: Write) -> None:
    path = run_file(BASE + "trainer: {experiment_name: 123}\n")
    assert "wanted text, or null. Put it in quotes: experiment_name: '123'" in str(one_problem(plugins, path))


def test_a_word_where_a_list_is_wanted_is_told_the_brackets(plugins: PluginSet, run_file: Write) -> None:
    path = run_file(BASE + "trainer: {logger: jsonl}\n")
    assert "Write logger: [jsonl]" in str(one_problem(plugins, path))


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("lr", "did you mean actor.optim.lr or critic.optim.lr?"),
        ("actor.lr", "did you mean actor.optim.lr or critic.optim.lr?"),
        ("actor.optim.learning_rate", "in rlctl this is actor.optim.lr"),
        ("actor.optim.wieght_decay", "did you mean actor.optim.weight_decay?"),
        ("Trainer", "did you mean trainer?"),
        ("rollout.tempreature", "did you mean rollout.temperature?"),
        ("actor.train_batch_size", "did you mean data.train_batch_size?"),
        ("actor.ppo_micro_batch_size_per_gpu", "in rlctl this is actor.micro_batch_size_per_device"),
        ("actor.ppo_max_token_len_per_gpu", "in rlctl this is actor.max_tokens_per_device"),
        ("ref.log_prob_max_token_len_per_gpu", "in rlctl this is ref.max_tokens_per_device"),
        ("rollout.tensor_model_parallel_size", "in rlctl this is rollout.parallel.tp"),
        ("actor.parallel.tensor_model_parallel_size", "in rlctl this is actor.parallel.tp"),
        ("ref.ulysses_sequence_parallel_size", "in rlctl this is ref.parallel.usp"),
        ("algorithm.kl_coef", "in rlctl this is actor.kl_loss_coef"),
        ("num_generations", "in rlctl this is rollout.n"),
        ("max_completion_length", "in rlctl this is data.max_response_length"),
        ("per_device_train_batch_size", "in rlctl this is actor.micro_batch_size_per_device"),
        ("actor.use_dynamic_bsz", "a token budget is what switches dynamic batches on"),
        ("zzzz", "keys of the file: model, data, actor"),
        ("actor.optim.zzzz", "keys of actor.optim: name, lr, betas"),
    ],
)
def test_unknown_keys_lead_to_the_right_one(key: str, hint: str, plugins: PluginSet, run_file: Write) -> None:
    problem = one_problem(plugins, run_file(BASE), f"{key}=1")
    assert problem.path == key
    assert problem.what == "unknown key"
    assert hint in problem.hint


def test_every_hint_of_another_project_names_a_key_that_exists() -> None:
    known = {dotted(loc) for loc, _ in walk()}
    for name, (path, _) in FOREIGN.items():
        for role in ("actor", "ref") if path.startswith("ROLE") else ("",):
            assert path.replace("ROLE", role) in known, name


def test_a_foreign_name_in_the_rollout_is_not_sent_to_a_key_the_rollout_lacks(
    plugins: PluginSet, run_file: Write
) -> None:
    known = {dotted(loc) for loc, _ in walk()}
    from rlctl.config.foreign import our_path

    for name in FOREIGN:
        found = our_path(name, ("rollout",))
        assert found is not None
        assert found[0] in known, (name, found)


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        (b"", "", "the file is empty"),
        (b"# only a comment\n", "", "the file is empty"),
        (b"- a\n- b\n", ":1", "does not hold a configuration"),
        (b"just words\n", ":1", "does not hold a configuration"),
        (b"model: {path: a\n", ":2", "expected ',' or '}'"),
        (b"model:\n\tpath: a\n", ":2", "a tab stands where YAML wants spaces"),
        (b"model: a: b\n", ":1", "mapping values are not allowed"),
        (b"model: *nothing\n", ":1", "undefined alias"),
        (b"model: {path: a}\n---\nmodel: {path: b}\n", ":2", "a second YAML document"),
        (b"model: {path: caf\xe9}\n", ":1", "not UTF-8"),
        (b"a: 1\nb: \xff\xfe\n", ":2", "not UTF-8"),
        ("model: {path: a}".encode("utf-16"), ":1", "not UTF-8"),
        (b"a: 1\nb: \x07\n", ":2", "a control character"),
        (b'a: "\\Uffffffff"\n', "", "no character"),
        (b"a: " + b"[" * 2000 + b"]" * 2000, ":1", "more than 50 levels"),
        (b"a: &x [*x]\n", ":1", "contains itself"),
        (b"a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
         b"d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e]\n",
         ":1", "expand to more than"),
        (b"a: " + b"x" * 600_000, "", "too large"),
    ],
)  # fmt: skip
def test_unreadable_files_name_the_line_and_the_remedy(
    text: bytes, where: str, words: str, plugins: PluginSet, run_file: Write
) -> None:
    path = run_file(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, plugins=plugins)
    assert caught.value.what.startswith(path + where)
    assert words in str(caught.value)
    assert caught.value.next


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer: {seed: 1}\ntrainer: {seed: 2}\n", "the key 'trainer' is there twice, on lines 5 and 6"),
        ("trainer:\n  seed: 1\n  seed: 1\n", "trainer.seed"),
        ("trainer: !!python/object:os.system {a: b}\n", "the tag !!python/object:os.system is not taken"),
        ("trainer: {experiment_name: !!binary aGk=}\n", "the tag !!binary is not taken"),
        ("? [a, b]\n: 1\n", "a key is a list or a mapping"),
        ("trainer: {seed: " + "9" * 5000 + "}\n", "is no int"),
        ("trainer: {seed: 0x" + "f" * 5000 + "}\n", "is no int"),
        ('trainer: {experiment_name: "\\ud800"}\n', "half of a surrogate pair"),
        ("<<: 3\n", "<< does not name a section"),
    ],
)
def test_structural_faults_are_reported_with_the_rest(
    text: str, words: str, plugins: PluginSet, run_file: Write
) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(run_file(BASE + text), ["rollout.n=1"], plugins=plugins)
    assert words in str(caught.value)
    assert "rollout.n" in {problem.path for problem in caught.value.problems}


def test_a_directory_a_missing_file_and_a_name_with_nul_are_answered(plugins: PluginSet, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(BASE)
    with pytest.raises(ConfigError, match="is a directory") as caught:
        load_config(str(tmp_path), plugins=plugins)
    assert caught.value.next == f"name the file, for example {tmp_path / 'a.yaml'}"
    for name in ("x\0y.yaml", "/" + "n" * 5000 + ".yaml", "", "\udcff.yaml"):
        with pytest.raises(ConfigError) as caught:
            load_config(name, plugins=plugins)
        assert caught.value.next


def test_yaml_that_is_merely_unusual_is_taken(plugins: PluginSet, run_file: Write) -> None:
    path = run_file(
        "\ufeffmodel: {path: org/tiny}\n"
        "data: {task: {name: sort_digits, args: {? length : 0x8}}}\n"
        "actor:\n  backend: plain\n  optim: &optim {lr: 1e-5, clip_grad: 0.5}\n"
        "rollout: {backend: sampler, temperature: 7e-1, n: 1_6}\n"
        "warm_start:\n  steps: 3\n  optim:\n    <<: *optim\n    lr: .5\n"
    )
    resolved = load_config(path, plugins=plugins)
    assert resolved.config.data.task is not None
    assert resolved.config.data.task.args == {"length": 8}
    assert resolved.config.rollout.n == 16
    assert resolved.config.rollout.temperature == 0.7
    assert resolved.config.warm_start is not None
    assert (resolved.config.warm_start.optim.lr, resolved.config.warm_start.optim.clip_grad) == (0.5, 0.5)
    assert resolved.origins["warm_start.optim.clip_grad"] == f"{path}:5"
    assert resolved.origins["warm_start.optim.lr"] == f"{path}:11"


def test_no_word_of_the_validating_library_reaches_the_reader(plugins: PluginSet, run_file: Write) -> None:
    wrong = [
        f"{dotted(loc)}={value}" for loc, _ in walk() if 0 not in loc for value in ("{q: [1]}", "[[]]", "1.5", "zz")
    ]
    for override in wrong:
        try:
            load_config(run_file(BASE), [override], plugins=plugins)
        except RlctlError as error:
            text = str(error).lower()
            assert not any(word in text for word in ("pydantic", "input should", "value error", "json_", "https:")), (
                text
            )


def test_what_hangs_on_a_refused_section_is_not_said_to_lack_it(plugins: PluginSet, run_file: Write) -> None:
    text = BASE + "algorithm: {filter_groups: {}}\n"
    problem = one_problem(plugins, run_file(text), "rollout.n=1", "data.gen_batch_size=4")
    assert problem.path == "rollout.n"


def test_a_word_that_is_no_finite_number_is_not_advised(plugins: PluginSet, run_file: Write) -> None:
    assert "quotes" not in str(one_problem(plugins, run_file(BASE), "actor.optim.lr=nan"))


@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        ("python3 -m venv X makes one", "python3 -m venv"),
        ("rlctl plugins lists what is installed", "rlctl plugins"),
        ("chmod +x X", "chmod"),
        ("actor.pool=gen", "actor.pool"),
        ("forward_kl_topk and jsd_topk take it", "forward_kl_topk"),
        ("gae needs a critic", "gae needs"),
        ("tp splits it", "tp splits"),
        ("megatron: has it", "megatron:"),
        ("did you mean X?", "Did you mean X?"),
    ],
)
def test_a_literal_keeps_its_first_letter(hint: str, shown: str) -> None:
    assert f": wrong. {shown}" in str(Problem("a.b", "run.yaml:1", "wrong", hint=hint))


def test_what_is_wrong_with_an_environment_and_what_mends_it(
    plugins: PluginSet, run_file: Write, tmp_path: Path
) -> None:
    """Named by its directory, or as a run's configuration keeps it: by the interpreter in it."""
    path = run_file(BASE)

    def problem(name: Path) -> Problem:
        found = one_problem(plugins, path, f"rollout.python={name}")
        assert "did you mean" not in found.hint
        return found

    root = tmp_path / "ve"
    python = root / "bin" / "python"
    for name in (root, python):
        gone = problem(name)
        assert gone.what == "there is no such environment"
        assert gone.hint == f"python3 -m venv {root} makes one; {python} -m pip install PLUGIN fills it"
    python.parent.mkdir(parents=True)
    assert str(python) in problem(root).hint
    python.symlink_to(tmp_path / "old" / "python")
    for name in (root, python):
        dangling = problem(name)
        assert dangling.what == f"{python} is a link to {tmp_path}/old/python, which is gone"
        assert f"python3 -m venv --clear {root} " in dangling.hint
    python.unlink()
    python.write_text("")
    for name in (root, python):
        assert problem(name).what == f"{python} is no executable file"
        assert problem(name).hint.startswith(f"chmod +x {python}")
    near = one_problem(plugins, path, f"rollout.python={tmp_path / 'vee'}")
    assert near.hint == f"did you mean {root}?"
    near = one_problem(plugins, path, f"rollout.python={tmp_path / 'vee' / 'bin' / 'python'}")
    assert near.hint == f"did you mean {root}?"
