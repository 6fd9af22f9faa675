"""Reading rows: the shapes that are read as they are, column mappings, and the place of each fault."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlctl.config.schema import ColumnsConfig, DataConfig
from rlctl.data.readers import split_files
from rlctl.data.rows import collect_rows, load_rows
from rlctl.errors import DataError

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


def write(path: Path, *rows: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def data_of(*files: str, **settings: object) -> DataConfig:
    return DataConfig.model_validate({"train_files": files, **settings})


# ---- shapes -------------------------------------------------------------------------------------------------------
def test_verl_row(tmp_path: Path) -> None:
    (row,) = load_rows(data_of(write(tmp_path / "a.jsonl", VERL)), "train")
    assert row.prompt == ({"role": "user", "content": "What is 1 + 1?"},)
    assert (row.answer, row.ground_truth, row.response) == ("2", "2", None)
    assert row.data_source == "openai/gsm8k"
    assert row.extra == {"ability": "math", "split": "train", "index": 0}
    assert row.prompt_text == "user: What is 1 + 1?"


def test_plain_row_keeps_other_columns_and_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path / "mine.jsonl", {"prompt": "1+1", "answer": 2, "level": 3}, {"prompt": "1+2", "answer": 3, "level": 4}
    )
    rows = load_rows(data_of("mine.jsonl"), "train")
    assert [(r.index, r.source, r.prompt, r.answer, r.ground_truth) for r in rows] == [
        (0, "mine.jsonl:1", "1+1", "2", 2),
        (1, "mine.jsonl:2", "1+2", "3", 3),
    ]
    assert rows[0].data_source == "mine"
    assert rows[1].extra == {"level": 4}


def test_gsm8k_row_splits_the_answer_from_the_response(tmp_path: Path) -> None:
    text = "She sold 48/2 = <<48/2=24>>24.\n#### 1,072"
    file = write(tmp_path / "gsm8k" / "train.jsonl", {"question": "How many?", "answer": text})
    (row,) = load_rows(data_of(file), "train")
    assert (row.prompt, row.answer, row.ground_truth, row.response) == ("How many?", "1,072", "1,072", text)
    assert row.data_source == "gsm8k"


def test_question_with_a_plain_answer(tmp_path: Path) -> None:
    (row,) = load_rows(data_of(write(tmp_path / "a.jsonl", {"question": "q", "answer": "a"})), "train")
    assert (row.answer, row.response) == ("a", None)


def test_chat_rows(tmp_path: Path) -> None:
    turns = [("system", "s"), ("user", "u1"), ("assistant", "a1"), ("user", "u2"), ("assistant", "a2")]
    messages = [{"role": role, "content": text} for role, text in turns]
    open_end = {"messages": messages[:4]}
    rows = load_rows(data_of(write(tmp_path / "a.jsonl", {"messages": messages}, open_end)), "train")
    assert rows[0].prompt == tuple(messages[:4])
    assert rows[0].response == "a2"
    assert rows[0].messages == tuple(messages)
    assert rows[1].prompt == tuple(messages[:4])
    assert rows[1].response is None


@pytest.mark.parametrize("column", ["response", "completion"])
def test_prompt_and_response(tmp_path: Path, column: str) -> None:
    (row,) = load_rows(data_of(write(tmp_path / "a.jsonl", {"prompt": "p", column: "r"})), "train")
    assert (row.prompt, row.response, row.answer) == ("p", "r", None)


def test_conversational_completion(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "u"}]
    one = {"prompt": prompt, "completion": [{"role": "assistant", "content": "a"}]}
    two = {
        "prompt": prompt,
        "completion": [{"role": "assistant", "content": "a"}, *prompt, {"role": "assistant", "content": "b"}],
    }
    rows = load_rows(data_of(write(tmp_path / "a.jsonl", one, two)), "train")
    assert (rows[0].prompt, rows[0].response, rows[0].messages) == (tuple(prompt), "a", None)
    assert rows[1].response == "b"
    assert rows[1].messages is not None
    assert [m["content"] for m in rows[1].messages] == ["u", "a", "u", "b"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(72, "72"), (72.0, "72"), (0.5, "0.5"), (True, "True"), ([1, "a"], '[1, "a"]'), ({"é": 1}, '{"é": 1}')],
)
def test_ground_truth_of_any_type_keeps_its_type_and_gets_a_text(tmp_path: Path, value: object, text: str) -> None:
    (row,) = load_rows(data_of(write(tmp_path / "a.jsonl", {"prompt": "p", "answer": value})), "train")
    assert row.answer == text
    assert row.ground_truth == value


def test_mapped_columns_and_dotted_paths(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl", {"problem": "p", "meta": {"key": {"final": "7"}}, "solution": "so 7", "origin": "MATH"}
    )
    columns = {"prompt": "problem", "answer": "meta.key.final", "response": "solution", "data_source": "origin"}
    (row,) = load_rows(data_of(file, columns=columns), "train")
    assert (row.prompt, row.answer, row.response, row.data_source) == ("p", "7", "so 7", "MATH")


def test_mapped_column_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"problem": "p", "answer": "1"})
    with pytest.raises(DataError) as caught:
        load_rows(data_of(file, columns=ColumnsConfig(prompt="probelm")), "train")
    assert caught.value.found == "problem, answer"
    assert caught.value.next == "data.columns.prompt=problem"


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"problem": "p"}, "data.columns.prompt=problem"),
        ({"promt": "p"}, "data.columns.prompt=promt"),
        ({"conversations": [{"role": "user", "content": "x"}]}, "data.columns.messages=conversations"),
        ({"zzz": 1}, "data.columns.prompt=COLUMN"),
    ],
)
def test_no_known_prompt_column_says_which_mapping_would_do(
    tmp_path: Path, row: dict[str, object], advice: str
) -> None:
    with pytest.raises(DataError) as caught:
        load_rows(data_of(write(tmp_path / "a.jsonl", row)), "train")
    assert caught.value.next == advice
    assert caught.value.found == ", ".join(row)


# ---- files and splits ---------------------------------------------------------------------------------------------
def test_directory_gives_both_splits(tmp_path: Path) -> None:
    write(tmp_path / "set" / "train.jsonl", {"prompt": "a", "answer": "1"})
    write(tmp_path / "set" / "test.jsonl", {"prompt": "b", "answer": "2"})
    data = data_of(str(tmp_path / "set"))
    assert [r.prompt for r in load_rows(data, "train")] == ["a"]
    assert [(r.prompt, r.data_source) for r in load_rows(data, "val")] == [("b", "set")]


def test_validation_goes_before_test_and_shards_are_joined(tmp_path: Path) -> None:
    for name in ("train-00001-of-00002", "train-00000-of-00002", "test", "validation"):
        write(tmp_path / "data" / f"{name}.jsonl", {"prompt": name})
    assert [Path(f).stem for f in split_files([str(tmp_path)], "train")] == [
        "train-00000-of-00002",
        "train-00001-of-00002",
    ]
    assert [Path(f).stem for f in split_files([str(tmp_path)], "val")] == ["validation"]


def test_no_validation_data_is_an_empty_list(tmp_path: Path) -> None:
    assert load_rows(data_of(write(tmp_path / "a.jsonl", {"prompt": "a"})), "val") == []


def test_max_samples_counts_over_files(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", *({"prompt": f"a{i}"} for i in range(3)))
    two = write(tmp_path / "b.jsonl", *({"prompt": f"b{i}"} for i in range(3)))
    rows = load_rows(data_of(one, two, train_max_samples=4), "train")
    assert [(r.index, r.prompt) for r in rows] == [(0, "a0"), (1, "a1"), (2, "a2"), (3, "b0")]


def test_parquet_equals_jsonl(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    other = {**VERL, "prompt": [{"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": "u"}]}
    pq.write_table(pa.Table.from_pylist([VERL, other]), tmp_path / "a.parquet")
    from_parquet = load_rows(data_of(str(tmp_path / "a.parquet")), "train")
    from_jsonl = load_rows(data_of(write(tmp_path / "a.jsonl", VERL, other)), "train")
    assert [(r.prompt, r.answer, r.data_source, r.extra) for r in from_parquet] == [
        (r.prompt, r.answer, r.data_source, r.extra) for r in from_jsonl
    ]
    assert from_parquet[1].source.endswith("a.parquet row 1")


def test_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"prompt": "a"})
    with pytest.raises(DataError, match="there is no data file") as caught:
        load_rows(data_of(str(tmp_path / "trian.jsonl")), "train")
    assert "train.jsonl" in str(caught.value.found)


def test_directory_without_the_split_lists_what_it_has(tmp_path: Path) -> None:
    write(tmp_path / "numbers.jsonl", {"prompt": "a"})
    with pytest.raises(DataError, match="no file of the train split") as caught:
        load_rows(data_of(str(tmp_path)), "train")
    assert caught.value.found == "numbers.jsonl"


def test_unknown_ending(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\n")
    with pytest.raises(DataError, match="ending"):
        load_rows(data_of(str(tmp_path / "a.csv")), "train")


def test_hub_entry_needs_a_split_and_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError) as caught:
        load_rows(data_of("hf:openai/gsm8k/main"), "train")
    assert caught.value.next == "hf:openai/gsm8k/main:train"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError) as caught:
        load_rows(data_of("hf:openai/gsm8k/main:train[:10]"), "train")
    assert caught.value.next == "pip install 'rlctl-core[hub]'"


class FakeHub:
    """Stands in for the datasets library, which downloads: answers one dataset, and fails as the library does."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, str]] = []

    def load_dataset(self, path: str, config: str | None, split: str) -> list[dict[str, str]]:
        self.asked.append((path, config, split))
        if (path, config) in (("openai/gsm8k", "main"), ("glue", "sst2")):
            return [{"prompt": f"{split} row", "answer": "1"}]
        raise ConnectionError(f"cannot reach the hub for {path}\nand more lines")


def test_hub_entry_reads_owner_name_config_and_name_config(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub()
    monkeypatch.setitem(sys.modules, "datasets", hub)  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    (row,) = load_rows(data_of("hf:openai/gsm8k/main:train[:1]"), "train")
    assert (row.prompt, row.data_source, row.source) == (
        "train[:1] row",
        "openai/gsm8k/main",
        "hf:openai/gsm8k/main:train[:1] row 0",
    )
    (row,) = load_rows(data_of("hf:glue/sst2:test"), "train")
    assert hub.asked[-2:] == [("glue/sst2", None, "test"), ("glue", "sst2", "test")]
    with pytest.raises(DataError, match="could not be loaded") as caught:
        load_rows(data_of("hf:no/such:train"), "train")
    assert caught.value.found == "ConnectionError: cannot reach the hub for no/such"


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError) as caught:
        load_rows(data_of(str(tmp_path / "a.parquet")), "train")
    assert caught.value.next == "pip install 'rlctl-core[data]'"


# ---- faults -------------------------------------------------------------------------------------------------------
GOOD = b'{"prompt": "p", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        (b'{"prompt": "p", "answ', "json", "cut off"),
        (b'{"prompt": "p" "answer": "a"}', "json", "is not JSON"),
        (b'{"prompt": "p"} {"prompt": "q"}', "json", "Extra data at column 17"),
        (b"[1, 2]", "json", "holds a list, not an object"),
        (b"7", "json", "holds a number"),
        (b'{"prompt": "\xff", "answer": "a"}', "encoding", "byte 13 of the line (0xff) is not UTF-8"),
        (b'{"prompt": "\\ud800", "answer": "a"}', "encoding", "surrogate"),
        (b'{"prompt": "p", "answer": ' + b"9" * 5000 + b"}", "json", "too long"),
        (b'{"prompt": "p", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "json", "nested too deeply"),
        (b'{"answer": "a"}', "columns", "no 'prompt'"),
        (b'{"promt": "p", "answer": "a"}', "columns", "did you mean 'promt'?"),
        (b'{"prompt": null, "answer": "a"}', "columns", "prompt is null"),
        (b'{"prompt": 7, "answer": "a"}', "type", "prompt is a number"),
        (b'{"prompt": {"a": 1}, "answer": "a"}', "type", "prompt is an object"),
        (b'{"prompt": "  ", "answer": "a"}', "empty_prompt", "empty"),
        (b'{"prompt": [], "answer": "a"}', "messages", "empty list"),
        (b'{"prompt": ["hi"], "answer": "a"}', "messages", "prompt[0] is a string"),
        (b'{"prompt": [{"role": "human", "content": "x"}], "answer": "a"}', "messages", "role 'human'"),
        (b'{"prompt": [{"from": "human", "value": "x"}], "answer": "a"}', "messages", "from/value"),
        (b'{"prompt": [{"role": "user", "content": 3}], "answer": "a"}', "messages", "content is a number"),
        (b'{"prompt": [{"role": "user", "content": [{"text": "x"}]}], "answer": "a"}', "messages", "list of parts"),
        (b'{"prompt": "p", "answer": NaN}', "type", "not a usable answer"),
        (b'{"prompt": "p", "answer": 1e999}', "type", "not a usable answer"),
    ],
)
def test_a_faulty_line_is_named_by_file_and_line_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, kind: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(GOOD + GOOD + line + b"\n" + GOOD)
    rows, faults = collect_rows(data_of("a.jsonl"), "train")
    assert [r.index for r in rows] == [0, 1, 3]
    (fault,) = faults
    assert (fault.kind, fault.where) == (kind, "a.jsonl:3")
    assert words in fault.what
    assert fault.next
    with pytest.raises(DataError) as caught:
        load_rows(data_of("a.jsonl"), "train")
    assert "a.jsonl:3: " in caught.value.details[0]
    assert caught.value.next == fault.next


def test_gsm8k_file_with_a_row_that_has_no_final_answer(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl", {"question": "q", "answer": "x #### 1"}, {"question": "q", "answer": "just words"}
    )
    _, faults = collect_rows(data_of(file), "train")
    assert faults[0].where.endswith("a.jsonl:2")
    assert "no final answer after ####" in faults[0].what


def test_bom_crlf_and_blank_lines_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + b"\r\n  \n" + GOOD.strip())
    rows = load_rows(data_of(str(tmp_path / "a.jsonl")), "train")
    assert [(r.prompt, r.source.rpartition(":")[2]) for r in rows] == [("p", "1"), ("p", "4")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no rows"),
        (b"\n\n", "no rows"),
        (GOOD.decode().encode("utf-16"), "UTF-16"),
        (b'[{"prompt": "p"}]', "JSON array"),
        (b'[\n{"prompt": "p"}\n]', "JSON array"),
        (b'{\n"prompt": "p"\n}\n', "several lines"),
    ],
)
def test_a_file_of_another_form_is_one_fault(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    rows, faults = collect_rows(data_of(str(tmp_path / "a.jsonl")), "train")
    assert rows == []
    assert len(faults) == 1
    assert words in faults[0].what


def test_many_faults_are_counted_and_ten_are_shown(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"{\n" * 25)
    with pytest.raises(DataError, match="25 faults in the train data") as caught:
        load_rows(data_of(str(tmp_path / "a.jsonl")), "train")
    assert len(caught.value.details) == 11
    assert caught.value.details[-1] == "... and 15 more"


def test_reading_stops_at_a_thousand_faults_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"\n' * 5000)
    _, faults = collect_rows(data_of(str(tmp_path / "a.jsonl")), "train")
    assert len(faults) == 1001
    assert "stopped after 1000 faults" in faults[-1].what


# ---- real rows ----------------------------------------------------------------------------------------------------
def gsm8k_directory() -> Path:
    """Where GSM8K's rows lie: beside the repository, or in it."""
    root = Path(__file__).parents[2]
    for place in (root / "shared" / "data" / "gsm8k", root.parent / "shared" / "data" / "gsm8k"):
        if (place / "train.jsonl").is_file():
            return place
    pytest.skip("no GSM8K rows at shared/data/gsm8k in or beside the repository")


def test_real_gsm8k() -> None:
    data = data_of(str(gsm8k_directory()))
    train, val = load_rows(data, "train"), load_rows(data, "val")
    assert (len(train), len(val)) == (7473, 1319)
    assert (train[0].answer, train[0].data_source) == ("72", "gsm8k")
    assert all(row.response is not None and row.response.endswith(f"#### {row.answer}") for row in train)
    assert not {row.prompt for row in train} & {row.prompt for row in val}
