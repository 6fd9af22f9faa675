"""Tools, their schemas and calls, safe arithmetic, and the environments that come with rlctl."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.config.schema_environment import EnvironmentConfig
from rlctl.data.columns import Row
from rlctl.environments.arithmetic import calculate
from rlctl.environments.calculator import Calculator
from rlctl.environments.gym import ReasoningGym
from rlctl.environments.registry import open_environment
from rlctl.environments.schemas import schema_of
from rlctl.environments.tool_calls import Call, CallError, hermes, plain
from rlctl.environments.tools import ToolEnvironment, as_user
from rlctl.errors import ConfigError, DataError
from rlctl.plugins import PluginSet
from rlctl.records import EnvironmentSpec

HERE = Path(__file__).parent


# ---- arithmetic ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3+4*2", "11"),
        (" -(2-5)**3 ", "27"),
        ("7/2", "3.5"),
        ("8/2", "4"),
        ("7//2-7%4", "0"),
        ("0.1+0.2", "0.3"),
        ("2**100", str(2**100)),
        ("2**-1", "0.5"),
        ("1e3", "1000"),
    ],
)
def test_arithmetic(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "",
            "3+",
            "x",
            "abs(3)",
            "__import__('os').system('true')",
            "(1).__class__",
            "[1][0]",
            "'a'*3",
            "True+1",
            "3 if 1 else 2",
        ),
        *(
            "1/0",
            "0**-1",
            "(-8)**0.5",
            "9**9**9",
            "2**1025*2",
            "1e308*10",
            "(" * 90 + "1" + ")" * 90 + "+" * 30,
            "1j*2",
            "1<2",
            "3;4",
        ),
        *("9" * 201, "99999**99999", "1 if True else 0", "lambda: 3", "f'{3}'", "3 .real"),
    ],
)
def test_what_is_no_arithmetic_is_refused_at_once(expression: str) -> None:
    start = time.process_time()
    with pytest.raises(ValueError):
        calculate(expression)
    assert time.process_time() - start < 1.0


@given(st.text(alphabet="0123456789+-*/%(). e", max_size=40))
def test_any_text_is_a_value_or_refused(text: str) -> None:
    try:
        value = calculate(text)
    except ValueError:
        return
    assert math.isfinite(float(value))


# ---- schemas and calls --------------------------------------------------------------------------------------------
def lookup(place: str, day: int = 0, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> str:
    """The weather somewhere."""
    if place == "nowhere":
        raise LookupError("no such place")
    return f"{place} {day + 1} {unit} {tags}"


def half(number: int) -> float:
    return number / 2


def test_a_schema_says_what_the_signature_says() -> None:
    made = schema_of(lookup)["function"]
    assert made["name"] == "lookup"
    assert made["description"] == "The weather somewhere."
    assert made["parameters"] == {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "day": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["place"],
    }


@pytest.mark.parametrize("tool", [lambda x: x, lambda *x: x])
def test_a_tool_without_hints_is_refused(tool: Any) -> None:
    with pytest.raises(TypeError):
        schema_of(tool)


FUNCTIONS: dict[str, Any] = {"lookup": lookup, "half": half}


def test_calls_are_read_in_both_styles() -> None:
    text = (
        'hm <tool_call>\n{"name": "half", "arguments": {"number": 3}}\n</tool_call><tool_call>{"name": "x"}</tool_call>'
    )
    assert hermes(text, FUNCTIONS) == [Call("half", {"number": 3}), Call("x", {})]
    assert hermes('<tool_call>{"name": "half", "arguments": "{\\"number\\": 3}"}</tool_call>', FUNCTIONS) == [
        Call("half", {"number": 3})
    ]
    assert hermes("the answer is [3]", FUNCTIONS) == []
    assert plain("so half[12] and lookup[a b], other[3]", FUNCTIONS) == [
        Call("half", {"number": 12}),
        Call("lookup", {"place": "a b"}),
    ]


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (hermes, "<tool_call>{'name': 'half'}</tool_call>"),
        (hermes, '<tool_call>{"name": "half"'),
        (hermes, '<tool_call>{"name": 3}</tool_call>'),
        (hermes, '<tool_call>["half"]</tool_call>'),
        (hermes, '<tool_call>{"name": "half", "arguments": [3]}</tool_call>'),
        (hermes, '<tool_call>{"name": "half", "arguments": "{"}</tool_call>'),
        (hermes, "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        (plain, "half[3"),
        (plain, "half[three]"),
    ],
)
def test_a_call_that_cannot_be_read_is_said_so(style: Any, text: str) -> None:
    with pytest.raises(CallError):
        style(text, FUNCTIONS)


class Weather(ToolEnvironment):
    def __init__(self) -> None:
        super().__init__([lookup, half])

    def finish(self, text: str) -> float:
        return float(text == "done")


def call(name: str, **arguments: Any) -> str:
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("text", "said", "errors"),
    [
        (call("lookup", place="here", day=1) + call("half", number=3), ["here 2 C None", "1.5"], 0),
        (call("lookup", place="nowhere"), ["Error: lookup: no such place"], 1),
        (call("lookup"), ["Error: lookup: missing a required argument: 'place'"], 1),
        (call("half", number=1, other=2), ["Error: half: got an unexpected keyword argument 'other'"], 1),
        (
            call("nothing") + call("half", number=4),
            ["Error: there is no tool 'nothing'; there are lookup, half", "2.0"],
            1,
        ),
        ("<tool_call>{", ["Error: a <tool_call> is not closed by </tool_call>"], 1),
    ],
)
def test_a_tool_answers_whatever_it_is_asked(text: str, said: list[str], errors: int) -> None:
    world = Weather()
    world.reset({"prompt": "x"})
    observation, reward, done, numbers = world.step(text)
    assert [message["content"] for message in observation] == said
    assert {message["role"] for message in observation} == {"tool"}
    assert (reward, done, numbers["tool_errors"]) == (0.0, False, errors)
    assert world.step("done") == (None, 1.0, True, numbers)


def test_what_tools_say_can_stand_in_the_user_s_name() -> None:
    said = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, {"role": "user", "content": "go on"}]
    one = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\ngo on"
    assert as_user(said) == [{"role": "user", "content": one}]
    assert as_user(said[2:]) == said[2:]


def test_the_calculator_rewards_the_last_number() -> None:
    world = Calculator(style="plain", show_tools=False, call_reward=0.25)
    assert world.tools == []
    chat = [
        {"role": "user", "content": "6*7"},
        {"role": "assistant", "content": "calc[6*7]"},
        {"role": "tool", "content": "42"},
    ]
    assert world.reset({"prompt": chat, "answer": "42"}) is None
    assert world.step("calc[6*7]")[:3] == ([{"role": "tool", "content": "42"}], 0.25, False)
    assert world.step("calc[6*]")[1] == 0.0
    assert world.step("it is 42.")[1:3] == (1.0, True)
    assert world.step("it is 43")[1] == 0.0


# ---- those of libraries -------------------------------------------------------------------------------------------
def talk(name: str, rows: list[Row], turns: list[list[str]], **args: Any) -> list[list[Any]]:
    """What the environment says to each row's turns, turn by turn."""
    config = EnvironmentConfig(name=name, args=args, timeout_s=60)
    with open_environment(config, None, HERE) as client:
        numbered = dict(enumerate(rows))
        begun = client.reset(list(numbered.items()))
        assert [status for status, _ in begun] == ["ok"] * len(rows)
        said = [[value] for _, value in begun]
        for at in range(max(map(len, turns))):
            calls = [(i, own[at]) for i, own in enumerate(turns) if at < len(own)]
            for (i, _), (status, value) in zip(calls, client.step(calls, numbered), strict=True):
                assert status == "ok", value
                said[i].append(value)
    return said


def test_reasoning_gym_asks_again_until_the_answer_is_right() -> None:
    pytest.importorskip("reasoning_gym")
    from rlctl.config.schema import TaskConfig
    from rlctl.data.reasoning_gym import make_reasoning_rows

    rows = make_reasoning_rows(TaskConfig(name="reasoning_gym:chain_sum", train_size=2, val_size=2), "train")
    right = [str(row.answer) for row in rows]
    first, second = talk("reasoning_gym", rows, [["no", right[0]], ["x", "y"]], attempts=2, discount=0.5)
    assert first[1:] == [
        ([{"role": "user", "content": "That is not right. Try again."}], 0.0, False, {"attempts": 1.0}),
        ([], 0.5, True, {"attempts": 2.0}),
    ]
    assert second[2][1] < 0.5
    assert second[2][2] is True
    with pytest.raises(ValueError, match="no reasoning_gym:NAME task"):
        ReasoningGym().reset({"extra_info": {}})


def test_an_environment_of_verifiers_talks_and_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers", reason="the verifiers library is not installed (rlctl-core[verifiers])")
    monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])
    rows = [Row(i, f"row {i}", "x", None, None, "toy", {"task": 2 - i}) for i in range(3)]
    found = talk("verifiers", rows, [["9", "8", "7"], ["5"], ["1", "3"]], id="toy_verifiers")
    begin = [{"role": "system", "content": "Digits only."}, {"role": "user", "content": "Guess the number of row 7."}]
    assert found[0][0] == begin
    large = ([{"role": "user", "content": "too large"}], 0.0, False, {})
    assert found[0][1:] == [large, large, ([], 2.0, True, {"guesses": 3.0})]
    assert found[1][1:] == [([], 2.0, True, {"guesses": 1.0})]
    assert found[2][1:] == [
        ([{"role": "user", "content": "too small"}], 0.0, False, {}),
        ([], 2.0, True, {"guesses": 2.0}),
    ]


def test_without_its_library_an_environment_says_what_to_install() -> None:
    if importlib.util.find_spec("verifiers") is not None:
        pytest.skip("the verifiers library is installed")
    with pytest.raises(DataError, match="the verifiers library is not installed") as caught:
        open_environment(EnvironmentConfig(name="verifiers", args={"id": "x"}), None, HERE)
    assert caught.value.next == "pip install 'rlctl-core[verifiers]'"


# ---- names --------------------------------------------------------------------------------------------------------
def test_plugins_name_environments() -> None:
    specs = [("rlctl-mine", EnvironmentSpec("mine", "rlctl.environments.calculator:Calculator"))]
    plugins = cast(PluginSet, SimpleNamespace(records=lambda hook: specs if hook == "rlctl_environments" else []))
    with open_environment(EnvironmentConfig(name="mine"), plugins, HERE) as client:
        assert client.tools[0]["function"]["name"] == "calc"
        assert not client.is_async
    specs.append(("rlctl-other", EnvironmentSpec("calculator", "x:Y")))
    with pytest.raises(ConfigError, match="two distributions claim the environment 'calculator'"):
        open_environment(EnvironmentConfig(name="mine"), plugins, HERE)
