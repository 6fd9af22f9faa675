"""`rlctl data check`: what it prints, its JSON, its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl_cli.commands.data import is_dataset
from rlctl_cli.main import main


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def invoke(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["data", "check", *args])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_clean_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "mine.jsonl", *({"prompt": "p" * (i + 1), "answer": "a"} for i in range(30)))
    assert invoke("mine.jsonl") == 0
    out = capsys.readouterr().out
    assert "train: 30 rows  mine 30" in out
    assert "prompt characters: mean 15.5, median 15, 95 % 28, longest 30" in out
    assert "█" in out
    assert "mine.jsonl: no fault" in out


def test_faults_by_line_with_remedies_and_exit_code_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(folder / "mine.jsonl", {"prompt": "p", "answer": "a"}, {"prompt": "", "answer": "a"}, {"answer": "a"})
    before = file.read_bytes()
    assert invoke("mine.jsonl") == 1
    out = capsys.readouterr().out
    assert "fault: mine.jsonl:2: the prompt (prompt) is empty" in out
    assert "next: fill it or remove the row" in out
    assert "fault: mine.jsonl:3: the row has no 'prompt'" in out
    assert "mine.jsonl: 2 faults" in out
    assert file.read_bytes() == before
    assert [path.name for path in folder.iterdir()] == ["mine.jsonl"]


def test_json_is_one_object_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "set" / "train.jsonl", {"question": "q", "answer": "x #### 1"}, {"question": "r", "answer": "none"})
    write(folder / "set" / "test.jsonl", {"question": "q", "answer": "x #### 1"})
    assert invoke("set", "--json") == 1
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    assert captured.err == ""
    assert (value["schema"], value["ok"], value["target"]) == (1, False, "set")
    assert [(fault["kind"], fault["index"]) for fault in value["faults"]] == [("answer", 1), ("leakage", 0)]
    assert value["faults"][0]["where"] == "set/train.jsonl:2"
    assert value["splits"]["train"]["lengths"]["prompt"]["histogram"] == [{"from": 1, "to": 1, "rows": 1}]


def test_strict_fails_on_a_warning(folder: Path) -> None:
    write(folder / "mine.jsonl", {"prompt": "p"}, {"prompt": "p"})
    assert invoke("mine.jsonl") == 0
    assert invoke("mine.jsonl", "--strict") == 1


def test_columns_are_mapped_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "mine.jsonl", {"problem": "p", "result": "a"})
    assert invoke("mine.jsonl") == 1
    assert "next: data.columns.prompt=problem" in capsys.readouterr().out
    assert invoke("mine.jsonl", "data.columns.prompt=problem", "data.columns.answer=result") == 0


def test_wrong_overrides(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "mine.jsonl", {"prompt": "p"})
    assert invoke("mine.jsonl", "actor.optim.lr=1") == 2
    assert "overrides of the data section only" in capsys.readouterr().err
    assert invoke("mine.jsonl", "data.columns.promt=x") == 1
    assert "prompt" in capsys.readouterr().err
    assert invoke("mine.jsonl", "data.max_prompt_length=none") == 1


def test_a_missing_dataset_is_a_fault_without_a_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "train.jsonl", {"prompt": "p"})
    assert invoke("tran.jsonl") == 1
    captured = capsys.readouterr()
    assert "there is no data file tran.jsonl" in captured.out
    assert captured.out.splitlines()[-1].startswith("tran.jsonl: 1 fault  (")
    assert "Traceback" not in captured.out + captured.err


def test_more_faults_than_fit_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.jsonl").write_text('{"prompt": "p"}\n' + "{\n" * 50)
    assert invoke("mine.jsonl") == 1
    out = capsys.readouterr().out
    assert out.count("fault: ") == 20
    assert "... and 30 more faults" in out


def test_what_counts_as_a_dataset(folder: Path) -> None:
    write(folder / "set" / "data" / "train.jsonl", {"prompt": "p"})
    (folder / "quickstart").mkdir()
    assert is_dataset("set")
    assert is_dataset("hf:openai/gsm8k/main:train")
    assert is_dataset("no/such.parquet")
    assert not is_dataset("quickstart")
    assert not is_dataset("run.yaml")
    assert not is_dataset("a\0b")


def test_bare_files_load_neither_torch_nor_transformers(folder: Path) -> None:
    write(folder / "mine.jsonl", {"prompt": "p"})
    code = (
        "import sys\nfrom rlctl_cli.main import main\n"
        "try:\n    main(['data', 'check', 'mine.jsonl'])\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_recipe_is_checked_with_its_tokenizer_and_reward(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("rlctl_fsdp")
    sizes = ("data.task.train_size=300", "data.task.val_size=20")
    # It needs no rollout, so that its backend may be missing.
    assert invoke("quickstart", "--json", *sizes, "warm_start.batch_size=32", "rollout.backend=sglang") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["ok"] is True
    assert value["splits"]["train"]["lengths"]["prompt"] == {
        "unit": "tokens", "count": 300, "mean": 11.0, "p50": 11, "p95": 11, "min": 11, "max": 11,
        "histogram": [{"from": 11, "to": 11, "rows": 300}],
    }  # fmt: skip
    assert value["reward"]["truth"] == 1.0
    assert invoke("quickstart", *sizes, "warm_start.batch_size=32", "data.max_prompt_length=8") == 1
    assert "300 rows have more than 8 tokens of prompt" in capsys.readouterr().out
