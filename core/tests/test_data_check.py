"""The data check: what it finds, what it only warns of, and that it needs no model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.load import ResolvedConfig
from rlctl.config.schema import DataConfig, ModelConfig, RunConfig
from rlctl.data.check import check_data, check_files
from rlctl.data.columns import Row
from rlctl.data.dry_run import dry_run
from rlctl.data.lengths import fit_rows, model_positions
from rlctl.data.prompts import PromptEncoder
from rlctl.data.report import DataReport, describe_lengths
from rlctl.data.rewards import RewardScorer
from rlctl.data.rewards.text import FunctionReward
from rlctl.data.rows import load_rows
from rlctl.data.tokenizer import load_tokenizer
from rlctl.errors import DataError

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

CHATML = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a character tokenizer (no capital letters) and a config of 64 positions; no weights."""
    path = tmp_path_factory.mktemp("model")
    characters = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=:,.? #\n"
    vocab = {
        token: place
        for place, token in enumerate(["<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", *characters])
    }
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    special = [tokenizers.AddedToken(token, special=True, normalized=False) for token in list(vocab)[:5]]
    made.add_special_tokens(special)
    made.save(str(path / "tokenizer.json"))
    names = {
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    return path


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(start: int, count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(start, start + count)]


def run(model: Path, data: dict[str, Any], /, **sections: Any) -> DataReport:
    limits = {"max_prompt_length": 32, "max_response_length": 16, "train_batch_size": 2}
    config = RunConfig.model_validate({"model": {"path": str(model)}, "data": {**limits, **data}, **sections})
    return check_data(ResolvedConfig(config, {}, model, "test.yaml"), None)


def kinds(report: DataReport) -> list[str]:
    return [fault.kind for fault in report.faults]


def warned(report: DataReport) -> list[str]:
    return [fault.kind for fault in report.warnings]


def test_clean_data(model: Path, tmp_path: Path) -> None:
    files = {
        "train_files": [write(tmp_path / "a.jsonl", *sums(0, 6))],
        "val_files": [write(tmp_path / "b.jsonl", *sums(10, 3))],
    }
    report = run(model, files)
    assert report.ok
    assert report.warnings == []
    assert {name: split.rows for name, split in report.splits.items()} == {"train": 6, "val": 3}
    lengths = report.splits["val"].lengths["prompt"]
    assert (lengths.unit, lengths.count, lengths.min, lengths.max) == ("tokens", 3, 6, 6)
    assert report.reward is not None
    assert (report.reward.rows, report.reward.truth, report.reward.empty) == (9, 1.0, 0.0)
    report.raise_for_faults()


def test_each_fault_is_found_and_all_are_told_at_once(model: Path, tmp_path: Path) -> None:
    rows = [
        *sums(0, 3),
        {"prompt": " ", "answer": "1"},
        {"prompt": "1+" * 20, "answer": "2"},
        {"prompt": "q", "answer": "not a number"},
        *sums(0, 1),
    ]
    train = write(tmp_path / "a.jsonl", *rows)
    with open(train, "a") as file:
        file.write('{"prompt": "cut o')
    val = write(tmp_path / "b.jsonl", *sums(2, 2), {"prompt": "UPPER", "answer": "1"})
    report = run(model, {"train_files": [train], "val_files": [val]}, reward={"components": [{"name": "number"}]})
    assert sorted(kinds(report)) == ["empty_prompt", "json", "leakage", "overlong", "reward"]
    by_kind = {fault.kind: fault for fault in report.faults}
    assert by_kind["json"].where.endswith("a.jsonl:8")
    assert by_kind["empty_prompt"].where.endswith("a.jsonl:4")
    assert by_kind["empty_prompt"].index == 3
    assert (by_kind["overlong"].index, by_kind["overlong"].count) == (4, 1)
    assert "(rows 4)" in by_kind["overlong"].what
    assert "holds no number" in by_kind["reward"].what
    assert by_kind["reward"].index == 5
    assert by_kind["leakage"].count == 1
    assert sorted(warned(report)) == ["duplicate", "unknown_token"]
    assert all(fault.next for fault in (*report.faults, *report.warnings))
    with pytest.raises(DataError, match="not usable") as caught:
        report.raise_for_faults()
    assert len(caught.value.details) == 5
    json.dumps(report.to_json(), allow_nan=False)


def test_leakage_can_be_left_out_by_name(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *sums(0, 4))
    report = run(model, {"train_files": [file], "val_files": [file]})
    assert kinds(report) == ["leakage"]
    assert report.faults[0].count == 4
    report.raise_for_faults(ignore=["leakage"])
    with pytest.raises(DataError):
        report.raise_for_faults()


def test_filtered_rows_are_a_warning_unless_none_is_left(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *sums(0, 4), {"prompt": "9" * 40, "answer": "1"})
    report = run(model, {"train_files": [file], "overlong_prompts": "filter"})
    assert report.ok
    assert warned(report) == ["overlong"]
    short = run(model, {"train_files": [file], "overlong_prompts": "filter", "max_prompt_length": 2})
    assert "overlong" in kinds(short)


def test_fewer_rows_than_a_batch(model: Path, tmp_path: Path) -> None:
    report = run(model, {"train_files": [write(tmp_path / "a.jsonl", *sums(0, 3))], "train_batch_size": 8})
    assert kinds(report) == ["size"]
    assert report.faults[0].next.startswith("data.train_batch_size=3")


def test_rows_that_the_model_has_no_positions_for(model: Path, tmp_path: Path) -> None:
    """By the longest prompt that there is, not by the limit of prompts, as a run finds it before it loads a model."""
    file = write(tmp_path / "a.jsonl", *sums(0, 3))
    longest = run(model, {"train_files": [file]}).splits["train"].lengths["prompt"].max
    exact = {"train_files": [file], "max_prompt_length": 60, "max_response_length": 64 - longest}
    assert run(model, exact).ok
    report = run(model, {**exact, "max_response_length": 65 - longest})
    assert kinds(report) == ["positions"]
    assert f"longer than the model's 64 positions ({longest} + {65 - longest} tokens)" in report.faults[0].what
    assert report.faults[0].next.startswith(f"data.max_response_length={64 - longest}")
    section = ModelConfig(path=str(model))
    for response, fits in ((64 - longest, True), (65 - longest, False)):
        data = DataConfig(train_files=(file,), max_prompt_length=60, max_response_length=response)
        rows, encoder = load_rows(data, "train"), PromptEncoder(load_tokenizer(section), data)
        if fits:
            assert len(fit_rows(rows, encoder, data, positions=model_positions(section))) == len(rows)
        else:
            with pytest.raises(DataError, match="longer than the model's 64 positions"):
                fit_rows(rows, encoder, data, positions=model_positions(section))


def test_sft_needs_responses_and_counts_whole_rows(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a b", "response": "c" * 60}, {"prompt": "d", "response": "e"}]
    report = run(model, {"train_files": [write(tmp_path / "a.jsonl", *rows)]}, trainer={"type": "sft"})
    assert kinds(report) == ["overlong"]
    assert report.faults[0].index == 1
    assert report.reward is None
    assert report.splits["train"].lengths["response"].max == 61
    bare = run(
        model, {"train_files": [write(tmp_path / "b.jsonl", *({"prompt": c} for c in "abc"))]}, trainer={"type": "sft"}
    )
    assert kinds(bare) == ["encode"] * 3
    assert "no response to train on" in bare.faults[0].what


def test_pairs_are_measured_side_by_side(model: Path, tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "cd"}
    rows = [pair, {**pair, "rejected": "c" * 60}, {**pair, "prompt": "b"}]
    file = write(tmp_path / "a.jsonl", *rows)
    report = run(model, {"train_files": [file]}, trainer={"type": "dpo"})
    assert kinds(report) == ["overlong"]
    assert "rows 1 (rejected); the longest has 62 tokens" in report.faults[0].what
    assert report.reward is None
    lengths = report.splits["train"].lengths
    assert (lengths["prompt"].max, lengths["chosen"].max, lengths["rejected"].max) == (1, 2, 61)
    left = run(model, {"train_files": [file], "overlong_prompts": "filter"}, trainer={"type": "dpo"})
    assert left.ok
    assert warned(left) == ["overlong"]
    # A reward model is read one token further.
    sized = {"train_files": [file], "overlong_prompts": "filter", "max_prompt_length": 2, "max_response_length": 2}
    assert run(model, sized, trainer={"type": "dpo"}).ok
    assert kinds(run(model, sized, trainer={"type": "rm"})) == ["overlong"]
    broken = write(tmp_path / "b.jsonl", pair, {**pair, "rejected": "b"}, pair)
    assert kinds(run(model, {"train_files": [broken]}, trainer={"type": "rm"})) == ["pair"]


def test_warm_start_measures_the_answers_too(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *sums(0, 4))
    report = run(model, {"train_files": [file]}, warm_start={"steps": 1, "batch_size": 8})
    assert report.ok
    assert warned(report) == ["size"]
    assert report.splits["train"].lengths["response"].max == 2


def test_an_environment_begins_before_the_first_answer(model: Path, tmp_path: Path) -> None:
    """So prompts are measured there, by the check as by a run; with the words of the environment over the positions too."""
    says = [("user", "a"), ("assistant", "calc[1]"), ("user", "b" * 30), ("assistant", "1")]
    chat = {"messages": [{"role": role, "content": text} for role, text in says], "answer": "1"}
    file = write(tmp_path / "a.jsonl", chat, {**chat, "answer": "2"})
    world = tmp_path / "world.py"
    world.write_text(
        "class W:\n    def __init__(self, words=1): self.words = words\n"
        "    def reset(self, row): return 'a' * self.words\n    def step(self, text): return None, 1.0, True\n"
    )
    section = ModelConfig(path=str(model), chat_template=CHATML)
    data = DataConfig(train_files=(file,), max_prompt_length=8, max_response_length=56, train_batch_size=2)
    rows, encoder = load_rows(data, "train"), PromptEncoder(load_tokenizer(section), data)
    with pytest.raises(DataError, match="2 rows are too long"):
        fit_rows(rows, encoder, data, positions=64)
    assert fit_rows(rows, encoder, data, talks=True, positions=64) == rows

    def check(words: int, response: int) -> DataReport:
        return run(
            model,
            {"train_files": [file], "max_prompt_length": 8, "max_response_length": response},
            model=section.model_dump(),
            rollout={"environment": {"name": f"{world}:W", "args": {"words": words}}},
            reward={"components": [{"name": "environment"}]},
        )

    report = check(1, 56)
    # The rows are the same conversation.
    assert kinds(report) == []
    assert report.splits["train"].lengths["prompt"].max == 4
    beyond = check(5, 57)
    assert kinds(beyond) == ["environment"]
    assert "longer than the model's 64 positions" in beyond.faults[0].what
    assert "8 + 57 tokens" in beyond.faults[0].what


def test_answers_that_cannot_be_given(model: Path, tmp_path: Path) -> None:
    rows = [*sums(0, 3), {"prompt": "long", "answer": "7" * 20}]
    report = run(model, {"train_files": [write(tmp_path / "a.jsonl", *rows)]})
    assert report.ok
    assert warned(report) == ["answer_length"]
    assert "(rows 3)" in report.warnings[0].what


def test_templates_that_refuse_rows_and_prompts_that_are_templated_already(model: Path, tmp_path: Path) -> None:
    chats = [
        {"prompt": [{"role": "user", "content": "a"}], "answer": "1"},
        {"prompt": [{"role": "tool", "content": "b"}], "answer": "1"},
        {"prompt": "<|im_start|>c", "answer": "1"},
    ]
    section = {"path": str(model), "chat_template": CHATML}
    report = run(model, {"train_files": [write(tmp_path / "a.jsonl", *chats)]}, model=section)
    assert kinds(report) == ["encode"]
    assert "no tools here" in report.faults[0].what
    assert report.faults[0].index == 1
    assert warned(report) == ["templated"]


def test_a_missing_file_and_a_missing_tokenizer_are_faults_of_one_report(tmp_path: Path) -> None:
    report = run(tmp_path, {"train_files": [str(tmp_path / "no.jsonl")]})
    assert kinds(report) == ["file", "tokenizer"]
    assert "there is no data file" in report.faults[0].what


# ---- the reward ---------------------------------------------------------------------------------------------------
def test_a_broken_function_is_a_fault_of_its_rows_and_soon_stops(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(solution_str):\n    return 1 / len(solution_str)\n")
    name = f"{tmp_path / 'mine.py'}:score"
    file = write(tmp_path / "a.jsonl", *sums(0, 20))
    report = run(model, {"train_files": [file]}, reward={"components": [{"name": name}]})
    assert kinds(report) == ["reward"] * 5
    assert "return 1 / len(solution_str)" in report.faults[0].what
    assert "mine.py, line 2" in report.faults[0].next
    missing = run(model, {"train_files": [file]}, reward={"components": [{"name": f"{tmp_path / 'mine.py'}:scor"}]})
    assert kinds(missing) == ["reward"]


def test_answers_count_in_the_form_that_a_reward_wants(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *sums(0, 4))
    for component in (
        {"name": "number", "args": {"hashes_only": True}},
        {"name": "contains"},
        {"name": "exact_match"},
    ):
        report = run(model, {"train_files": [file]}, reward={"components": [component]})
        assert report.ok, component
        assert report.reward is not None
        assert report.reward.truth == 1.0


def test_rows_without_a_known_answer_are_not_judged_by_it() -> None:
    rows = [Row(0, "x", "p", None, None, "set")]
    run = dry_run(rows, RewardScorer([("own", 1.0, FunctionReward(lambda item: 0.25, compares=True))]), limit_s=5)
    assert run.faults == []
    rows = [Row(0, "x", "p", "1", None, "set")]
    run = dry_run(rows, RewardScorer([("own", 1.0, FunctionReward(lambda item: 0.25, compares=True))]), limit_s=5)
    assert [fault.what for fault in run.faults] == ["its own answer '1' scores 0.25 under the reward own"]


def test_a_reward_that_does_not_prefer_answers_is_a_warning(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *sums(0, 4))
    wants = {"name": "format", "args": {"tags": ["think"]}}
    report = run(model, {"train_files": [file]}, reward={"components": [wants]})
    assert report.ok
    assert warned(report) == ["reward_flat"]


def test_the_dry_run_keeps_its_time_limit(model: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ndef score(solution_str):\n    time.sleep(0.2)\n    return 1.0\n")
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {
                "train_files": [write(tmp_path / "a.jsonl", *sums(0, 200))],
                "train_batch_size": 2,
                "max_prompt_length": 32,
            },
            "reward": {"components": [{"name": f"{tmp_path / 'slow.py'}:score"}]},
        }
    )
    report = check_data(ResolvedConfig(config, {}, model, "x"), None, reward_limit_s=1.0)
    assert "reward_time" in warned(report)
    assert report.reward is not None
    assert 1 <= report.reward.rows < 50


# ---- bare files ---------------------------------------------------------------------------------------------------
def test_bare_directory(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", *sums(0, 4))
    write(tmp_path / "test.jsonl", *sums(3, 2))
    report = check_files(str(tmp_path), DataConfig(train_files=(str(tmp_path),)))
    assert kinds(report) == ["leakage"]
    assert report.splits["train"].lengths["prompt"].unit == "characters"
    assert report.splits["val"].rows == 2


def test_bare_files_need_neither_torch_nor_transformers(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *sums(0, 4))
    code = (
        "import sys\nfrom rlctl.config.schema import DataConfig\nfrom rlctl.data.check import check_files\n"
        "report = check_files(sys.argv[1], DataConfig(train_files=(sys.argv[1],)))\n"
        "assert report.ok\nprint([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_progress_is_told_by_phase(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *sums(0, 600))
    told: list[tuple[str, int, int | None]] = []
    check_files(file, DataConfig(train_files=(file,)), lambda *event: told.append(event))
    assert told[0] == ("reading train", 0, None)
    assert ("reading train", 512, None) in told


def test_length_statistics() -> None:
    stats = describe_lengths([3, 1, 2, 10], "tokens")
    assert stats is not None
    assert (stats.count, stats.mean, stats.p50, stats.p95, stats.min, stats.max) == (4, 4.0, 2, 3, 1, 10)
    assert stats.histogram[0] == (1, 1, 1)
    assert sum(rows for _, _, rows in stats.histogram) == 4
    wide = describe_lengths(range(100, 1100), "tokens")
    assert wide is not None
    assert wide.histogram == tuple((100 + 100 * i, 199 + 100 * i, 100) for i in range(10))
    assert wide.p95 == 1049
    assert describe_lengths([], "tokens") is None
