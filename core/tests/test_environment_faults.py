"""What an author of an environment is told: the tool, the file and the line, and none of rlctl's own lines."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlctl.algorithms.table import ADVANTAGES, TOKEN_REWARDS
from rlctl.config.load import load_config
from rlctl.config.schema_environment import EnvironmentConfig
from rlctl.data.columns import Row
from rlctl.data.rewards.process import JobFailedError
from rlctl.data.rewards.worker import JobError
from rlctl.environments import client
from rlctl.environments.host import load
from rlctl.environments.registry import open_environment
from rlctl.environments.results import messages, stepped
from rlctl.errors import ConfigError, DataError
from rlctl.records import AlgorithmKind

WORLD = """\
from rlctl.environments.tools import ToolEnvironment

def bare(x): return x
def stars(**kw: int): return kw
def odd(x: complex): return x
def lost(x: "Nowhere"): return x
def good(x: int): return x
def make(*functions): return functions

class Base(ToolEnvironment):
    tools_given = []
    def __init__(self): super().__init__(self.tools_given)
    def finish(self, text): return None

class Bare(Base): tools_given = [bare]
class Stars(Base): tools_given = [stars]
class Odd(Base): tools_given = [odd]
class Lost(Base): tools_given = [lost]
class Alone(Base): tools_given = good
class Word(Base): tools_given = ["good"]
class Twice(Base): tools_given = [good, good]
class Good(Base): tools_given = [good]
class Forgotten(ToolEnvironment):
    def __init__(self): self.x = 1
    def finish(self, text): return 1.0
class Styled(ToolEnvironment):
    def __init__(self, style="curly"): super().__init__([good], style)
"""


class Here:
    """The environment's job in this process: what is tested are its words."""

    pid = None

    def __init__(self, factory: str, arguments: dict[str, Any], limit_s: float) -> None:
        assert factory == "rlctl.environments.host:load"
        self._arguments = arguments

    def start(self) -> None:
        self._job = self._tried(lambda: load(**self._arguments))

    def call(self, payload: Any, limit_s: float = 0) -> Any:
        return self._tried(lambda: self._job(payload))

    def _tried(self, what: Callable[[], Any]) -> Any:
        try:
            return what()
        except JobError as error:
            raise JobFailedError(error.fields) from None

    def close(self) -> None:
        pass


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(client, "JobProcess", Here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "world.py"
    file.write_text(WORLD)
    return file


def refused(world: Path, name: str, **args: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        open_environment(EnvironmentConfig(name=f"{world.name}:{name}", args=args), None, world.parent).close()
    assert "rlctl/environments" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "line", "found", "wanted"),
    [
        ("Bare", 3, "the tool bare has no type hint for x", "x: str, int"),
        ("Stars", 4, r"the tool stars takes \*\*kw, which a call by name cannot give", "names and type hints"),
        ("Odd", 5, "x of the tool odd has the type hint complex", "x: str, int"),
        ("Lost", 6, "a type hint of the tool lost cannot be read: name 'Nowhere'", "str, int"),
        ("Alone", 7, "the tools are no list, but the function good", r"\[tool\]"),
        ("Twice", 7, "two tools have the name 'good'", "of its own"),
        ("Word", None, "'good' among the tools is no function", "list of functions"),
        ("Forgotten", 24, "__init__ of Forgotten does not call super", "in __init__"),
    ],
)
def test_a_tool_that_cannot_be_one_is_named(world: Path, kind: str, line: int | None, found: str, wanted: str) -> None:
    error = refused(world, kind)
    assert "args" not in str(error)
    assert "has no tools that can be used" in error.what
    assert re.search(found, str(error.found))
    assert re.search(wanted, str(error.wanted))
    assert line is None or f"world.py, line {line})" in str(error.found)
    assert str(error.next).endswith("world.py" if line is None else f"world.py, line {line}")


def test_arguments_functions_and_what_init_raises(world: Path) -> None:
    function = refused(world, "make")
    assert "is a function" in function.what
    assert "world.py, line 8" in str(function.found)
    assert "class" in str(function.wanted)
    args = refused(world, "Styled", stile="plain")
    assert "refuses rollout.environment.args" in args.what
    assert args.wanted == "style"
    styled = refused(world, "Styled")
    assert "cannot be made" in styled.what
    assert "there is no style 'curly'" in str(styled.found)
    assert "line 27" in str(styled.found)
    assert any("super().__init__([good], style)" in line for line in styled.details)


def test_finish_is_named_where_it_returns_nothing(world: Path) -> None:
    row = Row(3, "rows.jsonl:4", "1+1=", "2", None, "toy")
    with open_environment(EnvironmentConfig(name=f"{world}:Good"), None, world.parent) as talk:
        talk.reset([(0, row)])
        [(status, fields)] = talk.step([(0, "two")], {0: row})
        assert status == "error"
        error = talk.fault("step", row, fields)
    assert error.details == ("the reward of finish is not what it has to be",)
    assert "None" in str(error.found)


def test_a_module_that_is_a_file_here_is_suggested(world: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_environment(EnvironmentConfig(name="world:Good"), None, world.parent)
    assert "world.py:Good" in str(caught.value.next)
    assert str(caught.value.next).startswith("rollout.environment.name=")
    with pytest.raises(ConfigError, match=r"path/to/file\.py:Class"):
        load_config("quickstart", ["rollout.environment.name=nothere.py:Guess"])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (("go", 0.0, False, {"tries": "two"}), "'tries' in the dict of step"),
        (("go", 0.0, False, {"loss": float("nan")}), "'loss' in the dict of step"),
        (({"role": "robot", "content": "go"}, 0.0, False), "the role of a message of step"),
    ],
)
def test_what_step_returns_is_taken_or_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(JobError) as caught:
        stepped(value)
    assert caught.value.fields["what"] == words


ENVIRONMENT = "rollout.environment={name: calculator, turn_rewards: true}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((ENVIRONMENT,), "turn_rewards gives each turn its reward, and grpo reads the reward of a whole row"),
        (("trainer.type=sft",), "rollout.environment has nothing to do in SFT: take it out"),
    ],
)
def test_an_environment_that_has_nothing_to_do_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config("calculator", overrides)


def test_the_estimators_that_read_token_rewards_are_those_named() -> None:
    pytest.importorskip("torch")
    from rlctl.algorithms.lookup import builtin

    reads = [name for name in ADVANTAGES if builtin(AlgorithmKind.ADVANTAGE, name).takes("token_rewards")]
    assert sorted(reads) == sorted(TOKEN_REWARDS)
    page = (Path(__file__).parents[2] / "docs" / "multi-turn.md").read_text()
    assert ", ".join(f"`{name}`" for name in TOKEN_REWARDS) in page


def test_a_tuple_of_reset_is_named() -> None:
    with pytest.raises(JobError) as caught:
        messages(("go", {}), "reset")
    assert caught.value.fields["what"] == "the tuple that reset gives as messages"
    assert "('go', {})" in caught.value.fields["found"]
    say = {"role": "user", "content": "go"}
    assert messages((say,), "reset") == [say]
