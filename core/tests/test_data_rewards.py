"""Built-in rewards, their composition, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.schema import RewardConfig, TaskConfig
from rlctl.data.columns import Row
from rlctl.data.procedural import make_rows
from rlctl.data.rewards import RewardInput, RewardResult, RewardScorer, build_reward
from rlctl.data.rewards.number import last_number
from rlctl.data.rewards.registry import BUILTIN, known_rewards
from rlctl.errors import ConfigError, DataError, RlctlError
from rlctl.records import RewardSpec


def row(answer: str | None = "72", **more: Any) -> Row:
    return Row(3, "set.jsonl:4", "p", answer, None, "set", ground_truth=answer, **more)


def scorer(*components: dict[str, Any], **settings: Any) -> RewardScorer:
    return build_reward(RewardConfig.model_validate({"components": components, **settings}), None, Path("/nowhere"))


def value(component: dict[str, Any], text: str, answer: str | None = "72", tokens: int = 1) -> float:
    with scorer(component) as made:
        (result,) = made.score([row(answer)], [text], ["stop"], [tokens])
    return result.score


# ---- text ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("args", "text", "answer", "wanted"),
    [
        ({}, " 72\n", "72", 1),
        ({}, "7 2", "72", 0),
        ({"strip": False}, " 72", "72", 0),
        ({}, "Yes", "yes", 0),
        ({"ignore_case": True}, "YES", "yes", 1),
    ],
)
def test_exact_match(args: dict[str, Any], text: str, answer: str, wanted: float) -> None:
    assert value({"name": "exact_match", "args": args}, text, answer) == wanted


@pytest.mark.parametrize(
    ("args", "text", "answer", "wanted"),
    [
        ({}, "it is 72.", "72", 1),
        ({}, "it is 172", "72", 1),
        ({"words": True}, "it is 172", "72", 0),
        ({"words": True}, "(72)", "72", 1),
        ({"text": ["a", "B"]}, "a b", None, 0),
        ({"text": ["a", "B"], "ignore_case": True}, "a b", None, 1),
    ],
)
def test_contains(args: dict[str, Any], text: str, answer: str | None, wanted: float) -> None:
    assert value({"name": "contains", "args": args}, text, answer) == wanted


@pytest.mark.parametrize(
    ("args", "text", "wanted"),
    [
        ({"pattern": r"\d{2}"}, "a 72", 1),
        ({"pattern": r"^\d{2}$"}, "a 72", 0),
        ({"pattern": r"answer: (\d+)", "group": 1}, "answer: 1, no, answer: 72", 1),
        ({"pattern": r"answer: (\d+)", "group": 1}, "answer: 72, no, answer: 1", 0),
        ({"pattern": r"(?P<final>\d+)!", "group": "final"}, "72!", 1),
        ({"pattern": r"ANSWER: (\d+)", "group": 1, "ignore_case": True}, "answer: 72", 1),
        ({"pattern": r"<a>(.*)</a>", "group": 1, "dotall": True}, "<a>\n72\n</a>", 1),
        ({"pattern": r"(x)?y", "group": 1}, "y", 0),
    ],
)
def test_regex(args: dict[str, Any], text: str, wanted: float) -> None:
    assert value({"name": "regex", "args": args}, text) == wanted


@pytest.mark.parametrize(
    ("args", "text", "wanted"),
    [
        ({"pattern": r"<t>.*</t>\s*\d+"}, " <t>\nhm\n</t> 72 ", 1),
        ({"pattern": r"<t>.*</t>\s*\d+"}, "so <t>hm</t> 72", 0),
        ({"tags": ["think", "answer"]}, "<think>x</think>\n<answer>72</answer>", 1),
        ({"tags": ["think", "answer"]}, "<answer>72</answer><think>x</think>", 0),
        ({"tags": ["think"]}, "<think>x</think><think>y</think>", 0),
        ({"tags": ["think"]}, "<think>x", 0),
    ],
)
def test_format(args: dict[str, Any], text: str, wanted: float) -> None:
    assert value({"name": "format", "args": args}, text) == wanted


@pytest.mark.parametrize(
    ("args", "tokens", "wanted"),
    [
        ({"target": 10}, 10, 1.0),
        ({"target": 10}, 5, 0.5),
        ({"target": 10}, 30, 0.0),
        ({"limit": 10, "buffer": 4}, 6, 0.0),
        ({"limit": 10, "buffer": 4}, 7, -0.25),
        ({"limit": 10, "buffer": 4}, 10, -1.0),
        ({"limit": 10, "buffer": 4}, 99, -1.0),
        ({"limit": 10}, 10, 0.0),
        ({"limit": 10}, 11, -1.0),
        ({"target": 4, "unit": "characters"}, 99, 1.0),
    ],
)
def test_length(args: dict[str, Any], tokens: int, wanted: float) -> None:
    assert value({"name": "length", "args": args}, "four", None, tokens) == wanted


# ---- numbers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("so 3, no, 72", 72),
        ("#### 1,072 and 5 more", 1072),
        ("first #### 1 then #### 2", 2),
        ("4 #### none", 4),
        ("$1,234.50", 1234.5),
        ("-$5", -5),
        ("$-5", -5),
        ("-5", -5),
        ("\u22127", -7),
        ("3-2", 2),
        ("(4)-2", 2),
        ("- 5 apples", 5),
        ("50%", 50),
        ("1,2,3", 3),
        ("12,34", 34),
        ("it is 5.", 5),
        (".5", 0.5),
        ("1e3", 1000),
        ("v1.2.3", 3),
        ("€ 8", 8),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text: str, wanted: float | None) -> None:
    got = last_number(text)
    assert (None if got is None else float(got)) == wanted


def test_number_reward() -> None:
    assert value({"name": "number"}, "The total is $1,072.00.", "1072") == 1
    assert value({"name": "number"}, "1073", "1,072") == 0
    assert value({"name": "number"}, "", "1") == 0
    assert value({"name": "number", "args": {"tolerance": 0.01}}, "3.14", "3.1416") == 1
    assert value({"name": "number", "args": {"tolerance": 0.001}}, "3.14", "3.1416") == 0
    assert value({"name": "number", "args": {"hashes_only": True}}, "72", "72") == 0
    assert value({"name": "number", "args": {"hashes_only": True}}, "#### 72", "72") == 1


def test_numbers_are_compared_exactly_and_quickly() -> None:
    long = "9" * 3000
    assert value({"name": "number"}, f"{long}1", f"{long}2") == 0
    assert value({"name": "number"}, "1" * 20_000 + " x " * 20_000, "1") == 0


def test_number_refuses_an_answer_without_one() -> None:
    with pytest.raises(DataError, match=r"the answer of set.jsonl:4 \(row 3\) holds no number"):
        value({"name": "number"}, "1", "yes")


# ---- composition --------------------------------------------------------------------------------------------------
def test_weighted_sum_and_component_values() -> None:
    made = scorer(
        {"name": "number", "weight": 0.8},
        {"name": "format", "weight": 0.2, "args": {"pattern": r"\d+"}},
        {"name": "format", "weight": -1.0, "args": {"tags": ["x"]}},
    )
    results = made.score([row(), row()], ["72", "it is 72"], ["stop", "length"], [1, 3])
    assert results[0] == RewardResult(1.0, {"number": 1.0, "format": 1.0, "format_2": 0.0})
    assert results[1].score == pytest.approx(0.8)


def test_default_is_exact_match() -> None:
    made = build_reward(RewardConfig(), None, Path("."))
    assert made.score([row()], ["72"], ["stop"], [1])[0].components == {"exact_match": 1.0}


def test_a_reward_that_needs_an_answer_names_the_row_without_one() -> None:
    with pytest.raises(DataError, match=r"set.jsonl:4 \(row 3\) has no answer"):
        value({"name": "exact_match"}, "x", None)


class Fixed:
    """A reward of one fixed value, as a plugin might build it."""

    compares = False

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, item: RewardInput) -> Any:
        return self.value


@pytest.mark.parametrize(
    "bad", [None, "1", float("nan"), float("inf"), [1.0], {"score": None}, {"score": 1, "part": float("nan")}]
)
def test_a_value_that_is_no_finite_number_is_refused_by_row(bad: Any) -> None:
    with pytest.raises(DataError, match=r"gave no finite number for set.jsonl:4 \(row 3\)"):
        RewardScorer([("mine", 1.0, Fixed(bad))]).score([row()], ["x"], ["stop"], [1])


def test_a_mapping_gives_further_numbers() -> None:
    (result,) = RewardScorer([("mine", 2.0, Fixed({"score": 0.5, "part": 1}))]).score([row()], ["x"], ["stop"], [1])
    assert result == RewardResult(1.0, {"mine/part": 1.0, "mine": 0.5})


# ---- registry -----------------------------------------------------------------------------------------------------
class Records:
    """A plugin set's records, without plugins."""

    def __init__(self, *records: tuple[str, RewardSpec]) -> None:
        self._records = list(records)

    def records(self, hook: str) -> list[tuple[str, RewardSpec]]:
        assert hook == "rlctl_rewards"
        return self._records


def build_fixed(*, value: float = 1.0) -> Fixed:
    return Fixed(value)


def build_broken() -> Fixed:
    raise RuntimeError("no licence")


def with_plugins(name: str, *records: tuple[str, RewardSpec], args: Mapping[str, Any] | None = None) -> RewardScorer:
    config = RewardConfig.model_validate({"components": [{"name": name, "args": args or {}}]})
    return build_reward(config, Records(*records), Path("."))  # type: ignore[arg-type]


def test_a_plugins_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        __import__("sys").modules,
        "someones_rewards",
        __import__("types").SimpleNamespace(make=build_fixed, broken=build_broken),
    )
    spec = RewardSpec("fixed", "someones_rewards:make")
    made = with_plugins("fixed", ("dist-a", spec), args={"value": 0.25})
    assert made.score([row()], ["x"], ["stop"], [1])[0].score == 0.25
    with pytest.raises(ConfigError, match="refuses its settings") as caught:
        with_plugins("broken", ("dist-a", RewardSpec("broken", "someones_rewards:broken")))
    assert caught.value.found == "RuntimeError: no licence"
    with pytest.raises(ConfigError, match="'gone' of dist-a does not load"):
        with_plugins("gone", ("dist-a", RewardSpec("gone", "no_such_module:make")))
    with pytest.raises(ConfigError, match="two distributions claim") as caught:
        with_plugins("fixed", ("dist-a", spec), ("dist-b", spec))
    assert caught.value.found == "dist-a and dist-b"


@pytest.mark.parametrize(
    ("component", "words"),
    [
        ({"name": "exact_mach"}, "reward.components[0].name=exact_match"),
        ({"name": "exact_match", "args": {"ignorecase": True}}, "rename it to ignore_case"),
        ({"name": "regex"}, "reward.components[0].args.pattern=VALUE"),
        ({"name": "regex", "args": {"pattern": "("}}, "correct args.pattern"),
        ({"name": "regex", "args": {"pattern": "a", "group": 1}}, "args.group"),
        ({"name": "format"}, "args.pattern or args.tags"),
        ({"name": "length"}, "args.target or args.limit"),
        ({"name": "length", "args": {"target": 3, "unit": "words"}}, "args.unit=tokens"),
        ({"name": "number", "args": {"tolerance": -1}}, "args.tolerance=0"),
        ({"name": "number", "args": {"tolerance": "much"}}, "change reward.components[0].args"),
        ({"name": "contains", "args": {"text": []}}, "args.text"),
        ({"name": "exact_match", "args": {"strip": "no"}}, "change reward.components[0].args.strip"),
        ({"name": "format", "args": {"tags": "think"}}, "change reward.components[0].args.tags"),
        ({"name": "length", "args": {"target": 2.5}}, "change reward.components[0].args.target"),
        ({"name": "length", "args": {"target": True}}, "change reward.components[0].args.target"),
        ({"name": "math", "args": {"float_rounding": -2}}, "args.float_rounding=6"),
        ({"name": "model", "args": {"path": ".", "batch_size": -3}}, "args.batch_size=32"),
        ({"name": "model", "args": {"path": ".", "batch_size": 0}}, "args.batch_size=32"),
        ({"name": "model", "args": {"path": ".", "batch_size": True}}, "change reward.components[0].args.batch_size"),
        ({"name": "model", "args": {"path": 3}}, "change reward.components[0].args.path"),
        ({"name": "model", "args": {"path": ""}}, "args.path=DIRECTORY"),
        ({"name": "model", "args": {"path": "a\0b"}}, "args.path=DIRECTORY"),
        ({"name": "model", "args": {"path": "nope"}}, "args.path=DIRECTORY"),
        ({"name": "model", "args": {"path": "/", "device": "gpu"}}, "args.device=cpu"),
        ({"name": "model", "args": {"path": "/", "device": "meta"}}, "args.device=cpu"),
        ({"name": "model", "args": {"path": "/", "device": "cuda:99"}}, "args.device=cpu"),
    ],
)
def test_wrong_components_say_what_to_write(component: dict[str, Any], words: str) -> None:
    with pytest.raises(RlctlError) as caught:
        scorer(component)
    assert words in str(caught.value.next)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model that does not learn: a directory as trainer.type rm exports it."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("judge")
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(vocab_size=16, num_labels=1, **size)
    transformers.AutoModelForTokenClassification.from_config(config).save_pretrained(folder)
    vocab = {token: place for place, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789="])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    return folder


def without(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def headless(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if not k.startswith("score")}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "what", "next"),
    [
        (lambda f: without(f, "config.json"), "cannot be read", "args.path=DIRECTORY"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read", "args.path=DIRECTORY"),
        (lambda f: without(f, "model.safetensors"), "the weights of the reward model .* do not load", "copy "),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
            "the weights of the reward model .* do not load",
            "copy ",
        ),
        (headless, "lacks weights, which would be random numbers", "copy "),
        (
            lambda f: without(f, "tokenizer.json", "tokenizer_config.json"),
            "has no tokenizer that loads",
            "copy the files of the tokenizer to",
        ),
    ],
)
def test_a_damaged_reward_model_says_what_is_wrong_with_it(
    judge: Path, tmp_path: Path, damage: Callable[[Path], Any], what: str, next: str
) -> None:
    folder = tmp_path / "judge"
    shutil.copytree(judge, folder)
    damage(folder)
    with pytest.raises(ConfigError, match=what) as caught:
        scorer({"name": "model", "args": {"path": str(folder)}})
    error = caught.value
    assert error.wanted
    assert str(error.next).startswith(next)
    assert str(folder) in str(error.found)
    assert "model.path" not in str(error)
    assert "\n" not in str(error.found)
    assert "at reward.components[0]" in error.details


def test_a_reward_model_loads_without_a_word(judge: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    logging.enable_progress_bar()
    capfd.readouterr()
    with scorer({"name": "model", "args": {"path": str(judge)}}) as made:
        assert made.score([row("1")], ["1"], ["stop"], [1])[0].score != 0.0
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled()


def test_every_built_in_name_is_there() -> None:
    assert set(known_rewards(None)) == set(BUILTIN)
    assert {
        "exact_match",
        "regex",
        "number",
        "math",
        "length",
        "format",
        "contains",
        "reasoning_gym",
        "environment",
        "model",
    } == set(BUILTIN)


# ---- reasoning-gym ------------------------------------------------------------------------------------------------
def test_reasoning_gym_rows_are_scored_by_their_own_task() -> None:
    pytest.importorskip("reasoning_gym")
    rows = [
        made
        for name in ("countdown", "chain_sum")
        for made in make_rows(TaskConfig(name=f"reasoning_gym:{name}", train_size=2, val_size=2), "val")
    ]
    with build_reward(RewardConfig(), None, Path(".")) as default, scorer({"name": "reasoning_gym"}) as named:
        for made in (default, named):
            good = made.score(rows, [str(r.answer) for r in rows], ["stop"] * 4, [3] * 4)
            assert [result.score for result in good] == [1.0] * 4
            bad = made.score(rows, ["", "no", "(", "x" * 999], ["stop"] * 4, [3] * 4)
            assert all(result.score < 0.5 for result in bad)
        # A set reward stands: countdown has many right answers, exact_match knows one.
        assert default.score([row("1")], ["1"], ["stop"], [1])[0].score == 1.0
        with pytest.raises(DataError, match="is no row of a reasoning_gym task"):
            named.score([row("1")], ["1"], ["stop"], [1])
