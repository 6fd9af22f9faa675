"""Rows of pairs: the shapes that datasets have them in, what is wrong with them by row, and which fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.schema import DataConfig
from rlctl.data.check import check_files
from rlctl.data.pairs import fit_pairs, sides
from rlctl.data.prompts import PromptEncoder
from rlctl.data.rows import Pair, Row, load_rows
from rlctl.errors import DataError

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

USER = {"role": "user", "content": "2+2?"}


@pytest.fixture(scope="module")
def characters() -> Any:
    """A tokenizer of one id a character; what it does not know is one id."""
    vocab = {token: place for place, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789s:=abc "])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **names)


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def written(folder: Path, *rows: dict[str, Any]) -> DataConfig:
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(train_files=(str(file),))


def read(folder: Path, *rows: dict[str, Any]) -> list[Row]:
    return load_rows(written(folder, *rows), "train", pairs=True)


HH = "\n\nHuman: 2+2?\n\nAssistant: What?\n\nHuman: Four?\n\nAssistant:"


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2="),
        ({"question": "2+2=", "chosen": "4", "rejected": "5"}, "2+2="),
        ({"prompt": [USER], "chosen": [said("4")], "rejected": [said("5")]}, (USER,)),
        ({"prompt": "2+2?", "chosen": [said("4")], "rejected": [said("5")]}, "2+2?"),
        ({"chosen": [USER, said("4")], "rejected": [USER, said("5")]}, (USER,)),
        # UltraFeedback: the prompt stands beside the conversations.
        ({"prompt": "2+2?", "chosen": [USER, said("4")], "rejected": [USER, said("5")], "score_chosen": 8.0}, (USER,)),
        (
            {"chosen": [USER, said("?"), USER, said("4")], "rejected": [USER, said("?"), USER, said("5")]},
            (USER, said("?"), USER),
        ),
        # HH: whole texts, and responses that begin with the same words.
        ({"chosen": f"{HH} It is 4", "rejected": f"{HH} It is 5"}, HH),
        ({"chosen": "two and two make 4", "rejected": "two and two make 5"}, "two and two make "),
        # A line of no dialogue may begin with `user:`.
        ({"chosen": "name: x\nuser: 4", "rejected": "name: x\nuser: 5"}, "name: x\nuser: "),
    ],
)
def test_every_shape_is_one_pair(tmp_path: Path, row: dict[str, Any], prompt: Any) -> None:
    [found] = read(tmp_path, row)
    assert found.prompt == prompt
    assert found.pair is not None
    assert (found.pair.chosen[-1], found.pair.rejected[-1]) == ("4", "5")
    assert (found.answer, found.response) == (None, None)
    assert not {"chosen", "rejected"} & found.extra.keys()
    assert found.extra.get("score_chosen") == row.get("score_chosen")


def test_columns_have_any_name(tmp_path: Path) -> None:
    row = {"x": "2+2=", "good": "4", "bad": "5", "by": 2}
    config = written(tmp_path, row)
    named = {"prompt": "x", "chosen": "good", "rejected": "bad", "margin": "by"}
    mapped = DataConfig.model_validate({"train_files": config.train_files, "columns": named})
    [found] = load_rows(mapped, "train", pairs=True)
    assert found.pair is not None
    assert (found.prompt, found.pair.chosen, found.pair.rejected, found.pair.margin) == ("2+2=", "4", "5", 2.0)
    with pytest.raises(DataError, match="no column of chosen responses"):
        load_rows(config, "train", pairs=True)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a", "chosen": "4", "rejected": "4"}, "chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "4", "rejected": None}, "rejected is null"),
        ({"prompt": "a", "chosen": "4"}, "no 'rejected'"),
        ({"prompt": "a", "chosen": " ", "rejected": "5"}, "chosen has an empty response"),
        ({"prompt": "", "chosen": "4", "rejected": "5"}, "the prompt .prompt. is empty"),
        ({"prompt": "a", "chosen": "4", "rejected": [said("5")]}, "chosen is a string and rejected is a list"),
        ({"prompt": "a", "chosen": [said("4")], "rejected": [said("5"), USER]}, "rejected has assistant, user behind"),
        (
            {"prompt": "a", "chosen": "4", "rejected": "5", "margin": "0.5"},
            r'margin is a string \("0.5"\), not a number',
        ),
        ({"prompt": "a", "chosen": "4", "rejected": "5", "margin": True}, "margin is a boolean"),
        (
            {"prompt": "a", "chosen": "4", "rejected": "5", "margin": 10**400},
            "margin is 1000.*, which float32 does not",
        ),
        (
            {"prompt": "a", "chosen": "4", "rejected": "5", "margin": -1e39},
            r"margin is -1e\+39, which float32 does not",
        ),
        ({"prompt": "a", "chosen": "", "rejected": ""}, "chosen and rejected both have an empty response"),
        ({"chosen": "", "rejected": " "}, "chosen and rejected both have an empty response"),
        ({"prompt": "a", "chosen": [said("")], "rejected": [said("")]}, "chosen and rejected both have an empty"),
        (
            {"chosen": f"{HH} A\n\nHuman: Hm\n\nAssistant: B", "rejected": f"{HH} A\n\nHuman: Eh\n\nAssistant: C"},
            r"chosen has another turn behind the common prompt \(Human:\), and one assistant turn is read",
        ),
        (
            {"chosen": f"{HH} A", "rejected": f"{HH} B\n\nHuman: Eh\n\nAssistant: C"},
            r"rejected has another turn behind the common prompt \(Human:\)",
        ),
        (
            {"chosen": "\n\nHuman: a\n\nAssistant: A", "rejected": "\n\nHuman: b\n\nAssistant: B"},
            r"chosen has another turn behind the common prompt \(Assistant:\)",
        ),
        (
            {"chosen": "USER: a ASSISTANT: A USER: b", "rejected": "USER: a ASSISTANT: B USER: b"},
            r"chosen has another turn behind the common prompt \(USER:\)",
        ),
    ],
)
def test_a_faulty_row_is_named(tmp_path: Path, row: dict[str, Any], what: str) -> None:
    good = {"prompt": "a", "chosen": "4", "rejected": "5"} if "prompt" in row else {"chosen": "a 4", "rejected": "a 5"}
    good |= {"margin": 1.0} if "margin" in row else {}
    with pytest.raises(DataError, match="1 fault in the train data") as caught:
        read(tmp_path, good, row, good)
    [line] = caught.value.details
    assert "train.jsonl:2" in line
    assert re.search(what, line), line


def test_each_row_has_its_own_shape(tmp_path: Path) -> None:
    """The first row says which columns the sides are in, and nothing of where the others have their prompt."""
    beside = {"prompt": "1+1?", "chosen": [said("2")], "rejected": [said("3")]}
    within = {"prompt": "not read", "chosen": [USER, said("4")], "rejected": [USER, said("5")]}
    texts = {"chosen": f"{HH} It is 4", "rejected": f"{HH} It is 5"}
    for order in ([beside, within], [within, beside], [texts, within, beside]):
        prompts = [row.prompt for row in read(tmp_path, *order)]
        wanted = {id(beside): "1+1?", id(within): (USER,), id(texts): HH}
        assert prompts == [wanted[id(row)] for row in order]
    plain = {"prompt": "a", "chosen": "4", "rejected": "5"}
    with pytest.raises(DataError, match="1 fault") as caught:
        read(tmp_path, plain, plain | {"margin": None}, plain | {"margin": 1.0})
    assert "train.jsonl:3: the row has a margin, and the first row of the file has none" in caught.value.details[0]


def test_conversations_need_a_common_beginning(tmp_path: Path) -> None:
    other = {"role": "user", "content": "3+3?"}
    with pytest.raises(DataError, match="1 fault") as caught:
        read(tmp_path, {"chosen": [USER, said("4")], "rejected": [other, said("5")]})
    assert "do not begin with a common prompt" in caught.value.details[0]
    with pytest.raises(DataError, match="1 fault") as caught:
        read(tmp_path, {"chosen": "yes", "rejected": "no"})
    assert "do not begin with a common prompt" in caught.value.details[0]


def test_other_trainers_and_a_bare_check_read_the_same_file(tmp_path: Path) -> None:
    row = {"prompt": "2+2=", "answer": "4", "chosen": "4", "rejected": "4"}
    [found] = load_rows(written(tmp_path, row), "train")
    assert found.pair is None, "no pair is asked for, and what is wrong with it is nobody's business"
    assert found.extra == {"chosen": "4", "rejected": "4"}
    report = check_files(str(tmp_path / "train.jsonl"), DataConfig(train_files=("x.jsonl",)))
    assert [fault.kind for fault in report.faults] == ["pair"]
    written(tmp_path, {**row, "rejected": "55"}, {**row, "rejected": "555"})
    report = check_files(str(tmp_path / "train.jsonl"), DataConfig(train_files=("x.jsonl",)))
    assert not report.faults
    assert not report.warnings, "a prompt may have several pairs"
    assert report.splits["train"].lengths["rejected"].max == 3
    assert report.splits["train"].lengths["chosen"].max == 1
    written(tmp_path, row | {"rejected": "5"}, row | {"rejected": "5"})
    report = check_files(str(tmp_path / "train.jsonl"), DataConfig(train_files=("x.jsonl",)))
    assert [fault.kind for fault in report.warnings] == ["duplicate"]


def task(**more: Any) -> DataConfig:
    settings = {"name": "sort_digits", "args": {"length": 3}, "train_size": 40, "val_size": 8}
    return DataConfig.model_validate({"task": settings, "max_prompt_length": 8, "max_response_length": 8, **more})


def test_a_task_makes_pairs_of_its_answers() -> None:
    rows, again = (load_rows(task(), "train", pairs=True) for _ in range(2))
    assert rows == again
    assert len(rows) == 40
    orders = 0
    for row in rows:
        assert row.pair is not None
        assert row.answer is not None
        assert row.pair.chosen == row.answer != row.pair.rejected
        orders += sorted(row.pair.rejected) == sorted(row.answer)
    assert 0 < orders <= 40
    assert load_rows(task(), "train")[0].pair is None


def test_both_sides_are_encoded_and_long_ones_are_named(characters: Any) -> None:
    data = task(max_prompt_length=6, max_response_length=4)
    rows = load_rows(data, "train", pairs=True)
    encoder = PromptEncoder(characters, data)
    assert fit_pairs(rows, encoder, data) == rows
    (chosen, chosen_mask), (rejected, rejected_mask) = encoder.sft_batch(list(sides(rows[0])))
    prompt = encoder.prompt_ids(rows[0])
    assert chosen[: len(prompt)] == rejected[: len(prompt)] == prompt
    assert chosen_mask == rejected_mask == [False] * len(prompt) + [True] * 4
    assert chosen[-1] == rejected[-1] == characters.eos_token_id
    # One token more for the score: none fits.
    with pytest.raises(DataError, match="80 sides of pairs are too long") as caught:
        fit_pairs(rows, encoder, data, extra=1)
    assert "0 (chosen), 0 (rejected), 1 (chosen)" in str(caught.value.found)
    one = [replace(rows[0], pair=Pair("012", "0123")), *rows[1:]]
    with pytest.raises(DataError, match="1 side of a pair is too long") as caught:
        fit_pairs(one, encoder, data)
    assert "rows 0 (rejected); the longest has 11 tokens" in str(caught.value.found)
    assert fit_pairs(one, encoder, data.model_copy(update={"overlong_prompts": "filter"})) == rows[1:]
    with pytest.raises(DataError, match="longer than the model's 8 positions"):
        fit_pairs(rows, encoder, data, positions=8)
    same = replace(rows[0], pair=Pair("01\N{SNOWMAN}", "01\N{COMET}"))
    with pytest.raises(DataError, match="chosen and its rejected response are the same"):
        fit_pairs([same], encoder, data)
