"""Procedural tasks: the same rows in every process, right answers, splits that share nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys

import pytest

from rlctl.config.schema import DataConfig, TaskConfig
from rlctl.data.procedural import TASKS, make_rows
from rlctl.data.rows import Row, load_rows
from rlctl.errors import DataError


def rows_of(name: str, split: str = "train", **settings: object) -> list[Row]:
    sizes = {"train_size": 200, "val_size": 50, **settings}
    return make_rows(TaskConfig.model_validate({"name": name, **sizes}), split)  # type: ignore[arg-type]


def expected(name: str, prompt: str) -> str:
    """The answer, worked out another way than the task does."""
    numbers = [int(n) for n in re.findall(r"\d+", prompt)]
    match name:
        case "sort_digits":
            return "".join(str(d) * prompt.count(str(d)) for d in range(10))
        case "reverse_letters":
            return "".join(reversed(prompt[2:-1]))
        case "add_numbers":
            return str(sum(numbers)).zfill(4)
        case "chat_sum":
            return str(sum(numbers))
        case "chat_max":
            return str(max(numbers))
        case "chat_sort":
            return ", ".join(map(str, sorted(numbers)))
        case "chat_reverse":
            words = prompt.partition(": ")[2].partition(".")[0].split()
            return " ".join(words[::-1])
        case "calculate":
            return str(numbers[0] * numbers[1] + (numbers[2] if "+" in prompt else -numbers[2]))
    raise AssertionError(name)


def question(row: Row) -> str:
    return row.prompt if isinstance(row.prompt, str) else str(row.prompt[0]["content"])


def test_a_conversation_in_four_calls_the_calculator() -> None:
    for row in rows_of("calculate"):
        asked, *middle, said = row.messages or ()
        assert (asked["role"], said) == ("user", {"role": "assistant", "content": row.answer})
        assert row.prompt == (asked, *middle)
        called = [
            {"role": "assistant", "content": f"calc[{asked['content']}]"},
            {"role": "tool", "content": row.answer},
        ]
        assert middle == ([] if row.index % 4 else called)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_answers_are_right_and_splits_share_no_prompt(name: str) -> None:
    train, val = rows_of(name), rows_of(name, "val")
    assert (len(train), len(val)) == (200, 50)
    for row in (*train, *val):
        assert row.answer == row.ground_truth == expected(name, question(row))
    assert len({question(row) for row in val}) == 50
    assert not {question(row) for row in train} & {question(row) for row in val}
    assert train[3].source == f"{name} train row 3"
    assert train[3].index == 3


def test_the_shape_that_the_quickstart_shows() -> None:
    row = rows_of("sort_digits", args={"length": 5})[0]
    assert re.fullmatch(r"s:\d{5}=", str(row.prompt))
    assert row.data_source == "sort_digits"


def test_val_stays_the_same_when_the_training_set_grows_and_seeds_differ() -> None:
    small, large = rows_of("sort_digits", "val"), rows_of("sort_digits", "val", train_size=1000)
    assert small == large
    assert rows_of("sort_digits") == rows_of("sort_digits", train_size=1000)[:200]
    assert rows_of("sort_digits", seed=1) != rows_of("sort_digits")


SCRIPT = """
import sys, hashlib, json
from rlctl.config.schema import TaskConfig
from rlctl.data.procedural import make_rows
names = sys.argv[1:]
out = {}
for name in names:
    task = TaskConfig(name=name, train_size=20, val_size=10, seed=3)
    text = json.dumps([(r.prompt, r.answer) for split in ("train", "val") for r in make_rows(task, split)])
    out[name] = hashlib.sha256(text.encode()).hexdigest()
assert "torch" not in sys.modules
print(json.dumps(out))
"""


def digests(names: list[str], hash_seed: str) -> dict[str, str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True, check=True, env=environment, timeout=120
    )
    return json.loads(done.stdout)


def test_rows_are_the_same_in_every_process() -> None:
    names = sorted(TASKS)
    assert digests(names, "1") == digests(names, "2")
    task = TaskConfig(name="sort_digits", train_size=20, val_size=10, seed=3)
    text = json.dumps([(r.prompt, r.answer) for split in ("train", "val") for r in make_rows(task, split)])  # type: ignore[arg-type]
    assert digests(["sort_digits"], "3")["sort_digits"] == hashlib.sha256(text.encode()).hexdigest()


def test_load_rows_cuts_a_task_too() -> None:
    data = DataConfig(task=TaskConfig(name="chat_sum", val_size=10), train_max_samples=7)
    assert len(load_rows(data, "train")) == 7
    assert len(load_rows(data, "val")) == 10


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "sort_digit"}, "data.task.name=sort_digits"),
        ({"name": "sort_digits", "args": {"lenght": 3}}, "data.task.args.length"),
        ({"name": "sort_digits", "args": {"length": 0}}, "data.task.args.length=8"),
        ({"name": "sort_digits", "args": {"length": "8"}}, "data.task.args.length=8"),
        ({"name": "sort_digits", "args": {"length": True}}, "data.task.args.length=8"),
        ({"name": "sort_digits", "args": {"length": 1}, "val_size": 20}, "data.task.val_size=2"),
        ({"name": "chat_sum", "args": {"max": 2}, "val_size": 4}, "data.task.val_size=1"),
    ],
)
def test_wrong_settings_say_what_to_write(settings: dict[str, object], words: str) -> None:
    with pytest.raises(DataError) as caught:
        make_rows(TaskConfig.model_validate(settings), "train")
    assert words in str(caught.value.next)


# ---- reasoning-gym ------------------------------------------------------------------------------------------------
def test_reasoning_gym_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError) as caught:
        rows_of("reasoning_gym:chain_sum")
    assert caught.value.next == "pip install 'rlctl-core[reasoning-gym]'"


def test_reasoning_gym_rows() -> None:
    pytest.importorskip("reasoning_gym")
    train, val = rows_of("reasoning_gym:chain_sum"), rows_of("reasoning_gym:chain_sum", "val")
    assert (len(train), len(val)) == (200, 50)
    assert not {row.prompt for row in train} & {row.prompt for row in val}
    row = train[0]
    assert row.data_source == "reasoning_gym:chain_sum"
    assert row.extra["entry"]["question"] == row.prompt
    # The question is a sum of integers: its value is the answer.
    match = re.search(r"[\d+\-* ]{3,}", str(row.prompt))
    assert match is not None
    assert int(eval(match[0].strip().rstrip("="))) == int(row.answer or "")
    names = ["reasoning_gym:chain_sum", "reasoning_gym:word_sorting"]
    assert digests(names, "1") == digests(names, "2")


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("reasoning_gym:chain_sun", {}, "data.task.name=reasoning_gym:chain_sum"),
        ("reasoning_gym:chain_sum", {"min_term": 3}, "change data.task.args"),
        ("reasoning_gym:chain_sum", {"min_terms": -1}, "change data.task.args"),
        ("reasoning_gym:chain_sum", {"seed": 1}, "data.task.seed"),
    ],
)
def test_reasoning_gym_wrong_settings(name: str, args: dict[str, int], words: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError) as caught:
        rows_of(name, args=args)
    assert words in str(caught.value.next)
