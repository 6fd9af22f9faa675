"""Rewards in a process of their own: users' functions and math-verify. Time limits, crashes, and whose traceback is shown."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.schema import RewardConfig
from rlctl.data.columns import Row
from rlctl.data.rewards import RewardScorer, build_reward
from rlctl.data.rewards.process import JobDiedError, JobProcess
from rlctl.data.rewards.user_job import OFFERED
from rlctl.errors import DataError

USER = """
import os, sys, time
from neighbour import half

class Odd:
    def __float__(self):
        raise RuntimeError("no number")

def score(solution_str, ground_truth, extra_info=None):
    if solution_str == "boom":
        return deeper(ground_truth)
    if solution_str == "loop":
        while True:
            pass
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "gone":
        os._exit(3)
    if solution_str == "segfault":
        os.kill(os.getpid(), 11)
    if solution_str == "print":
        print("hello from the reward")
    if solution_str == "recursion":
        return score("recursion", ground_truth)
    values = {"nan": float("nan"), "none": None, "text": "1", "true": True, "list": [1], "huge": 10**400, "odd": Odd(),
              "dict": {"score": 0.5, "bonus": 2, "note": "x"}, "noscore": {"a": 1}, "half": half(1)}
    if solution_str in values:
        return values[solution_str]
    return float(solution_str == ground_truth)

def deeper(truth):
    return 1 / (len(truth) - 2)

def everything(**kwargs):
    return {"score": 1.0, "count": len(kwargs), "type": float(isinstance(kwargs["prompt"], list))}

def chosen(prompt, *, finish_reason, data_source, scale):
    return scale * (finish_reason == "length") * (data_source == "set") * (prompt == "p")

def asks(solution, ground_truth):
    return 1.0

async def later(solution_str):
    return 1.0

def slow(solution_str):
    time.sleep(60)
"""


def row(answer: str = "72", prompt: Any = "p") -> Row:
    return Row(3, "set.jsonl:4", prompt, answer, None, "set", {"k": 1}, answer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards")
    (path / "mine.py").write_text(USER)
    (path / "neighbour.py").write_text("def half(x):\n    return x / 2\n")
    (path / "syntax.py").write_text("def score(solution_str):\n    return 1 +\n")
    (path / "imports.py").write_text("import json\nimport no_such_library\n\ndef score(x):\n    return 1\n")
    (path / "dies.py").write_text("import os\nos._exit(4)\n")
    return path


def build(folder: Path, name: str, timeout_s: float = 20.0, **args: Any) -> RewardScorer:
    config = RewardConfig.model_validate({"components": [{"name": name, "args": args}], "timeout_s": timeout_s})
    return build_reward(config, None, folder)


@pytest.fixture(scope="module")
def mine(folder: Path):
    with build(folder, "mine.py:score") as made:
        yield made


def one(made: RewardScorer, text: str, **more: Any) -> dict[str, float]:
    (result,) = made.score([row(**more)], [text], ["length"], [3])
    return result.components


# ---- values -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("72", {"score": 1.0}),
        ("73", {"score": 0.0}),
        ("true", {"score": 1.0}),
        ("half", {"score": 0.5}),
        ("dict", {"score": 0.5, "score/bonus": 2.0}),
    ],
)
def test_values(mine: RewardScorer, text: str, wanted: dict[str, float]) -> None:
    assert one(mine, text) == wanted


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nan", "nan"),
        ("none", "None"),
        ("text", "'1'"),
        ("list", "[1]"),
        ("huge", "int: 1000"),
        ("odd", "Odd object"),
        ("noscore", "a dict without 'score', with a"),
    ],
)
def test_values_that_are_no_finite_number(mine: RewardScorer, text: str, found: str) -> None:
    with pytest.raises(DataError, match=r"failed on set.jsonl:4 \(row 3\): it returned no finite number") as caught:
        one(mine, text)
    assert found in str(caught.value.found)


def test_arguments_by_signature(folder: Path) -> None:
    with build(folder, "mine.py:everything") as made:
        chat = ({"role": "user", "content": "p"},)
        assert one(made, "x", prompt=chat) == {
            "everything": 1.0,
            "everything/count": len(OFFERED),
            "everything/type": 1.0,
        }
    with build(folder, "mine.py:chosen", scale=4) as made:
        assert one(made, "x") == {"chosen": 4.0}


def test_what_it_prints_goes_to_standard_error(mine: RewardScorer, capfd: pytest.CaptureFixture[str]) -> None:
    assert one(mine, "print") == {"score": 0.0}
    one(mine, "72")
    assert capfd.readouterr().out == ""


# ---- errors -------------------------------------------------------------------------------------------------------
def test_the_users_traceback_and_not_ours(mine: RewardScorer, folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        one(mine, "boom")
    error = caught.value
    line = USER.splitlines().index("    return 1 / (len(truth) - 2)") + 1
    assert str(error.found) == f"ZeroDivisionError: division by zero ({folder / 'mine.py'}, line {line})"
    assert error.next == f"correct {folder / 'mine.py'}, line {line}"
    text = "\n".join(error.details)
    assert "in score" in text
    assert "in deeper" in text
    assert "user_job" not in text
    assert "rlctl/data" not in text
    assert error.__suppress_context__


def test_sys_exit_and_endless_recursion_are_errors_of_the_function(mine: RewardScorer) -> None:
    with pytest.raises(DataError) as caught:
        one(mine, "exit")
    assert str(caught.value.found).startswith("SystemExit: 3")
    with pytest.raises(DataError) as caught:
        one(mine, "recursion")
    assert "RecursionError" in str(caught.value.found)
    assert len(caught.value.details) < 60


@pytest.mark.parametrize(("text", "how"), [("gone", "ended with exit code 3"), ("segfault", "was ended by SIGSEGV")])
def test_a_crash_stays_in_its_process(mine: RewardScorer, text: str, how: str) -> None:
    with pytest.raises(DataError, match=r"brought its process down on set.jsonl:4 \(row 3\)") as caught:
        one(mine, text)
    assert how in str(caught.value.found)
    assert one(mine, "72") == {"score": 1.0}


def test_an_endless_loop_meets_the_limit(folder: Path) -> None:
    with build(folder, "mine.py:score", timeout_s=1.0) as made:
        start = time.monotonic()
        with pytest.raises(DataError, match=r"took longer than reward.timeout_s on set.jsonl:4 \(row 3\)"):
            one(made, "loop")
        assert time.monotonic() - start < 8
        assert one(made, "72") == {"score": 1.0}


@pytest.mark.parametrize(
    ("name", "what", "next_words"),
    [
        ("mine.py:scor", "has no function 'scor'", "mine.py:score"),
        ("mine.py", "named without a function", "mine.py:"),
        ("mime.py:score", "there is no reward file", "mine.py:score"),
        ("nothing/at.py:all", "there is no reward file", "check reward.components"),
        ("syntax.py:score", "cannot be loaded", "syntax.py, line 2"),
        ("imports.py:score", "cannot be loaded", "imports.py, line 2"),
        ("dies.py:score", "could not be loaded", "python"),
        ("mine.py:asks", "signature that cannot be called", "add **kwargs"),
    ],
)
def test_what_cannot_be_loaded(folder: Path, name: str, what: str, next_words: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        build(folder, name)
    assert next_words in str(caught.value.next)
    assert not any("rlctl/data" in line for line in caught.value.details)


def test_a_wrong_argument_and_an_async_function(folder: Path) -> None:
    with pytest.raises(DataError, match="signature") as caught:
        build(folder, "mine.py:chosen", scale=1, other=2)
    assert "does not take other" in str(caught.value.found)
    with build(folder, "mine.py:later") as made, pytest.raises(DataError) as caught:
        one(made, "x")
    assert "async" in str(caught.value.found)


def test_files_of_the_working_directory_do_not_stand_in_for_the_standard_library(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    with build(folder, "mine.py:score") as made:
        assert one(made, "72") == {"score": 1.0}


# ---- the process --------------------------------------------------------------------------------------------------
def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def job(folder: Path, function: str = "score", timeout_s: float = 20.0) -> JobProcess:
    args = {"path": str(folder / "mine.py"), "function": function, "args": {}}
    return JobProcess("rlctl.data.rewards.user_job:load", args, timeout_s)


def test_close_ends_the_process_and_a_call_starts_it_again(folder: Path) -> None:
    made = job(folder, "everything")
    payload = dict.fromkeys(OFFERED, "")
    assert made.call(payload)["score"] == 1.0
    pid = made.pid
    assert pid is not None
    made.close()
    assert not alive(pid)
    assert made.pid is None
    assert made.call(payload)["score"] == 1.0
    made.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_a_worker_whose_parent_is_gone_leaves_even_from_a_long_call(folder: Path) -> None:
    made = job(folder, "slow")
    made.start()
    process = made._process
    assert process is not None

    def wait_for_it() -> None:
        with contextlib.suppress(JobDiedError):
            made.call(dict.fromkeys(OFFERED, ""))

    thread = threading.Thread(target=wait_for_it, daemon=True)
    thread.start()
    time.sleep(0.5)
    assert process.stdin is not None
    process.stdin.close()
    thread.join(timeout=15)
    assert not thread.is_alive()
    assert not alive(process.pid)


# ---- math ---------------------------------------------------------------------------------------------------------
def math_scorer(timeout_s: float = 20.0, **args: Any) -> RewardScorer:
    pytest.importorskip("math_verify")
    return build(Path("."), "math", timeout_s, **args)


@pytest.fixture(scope="module")
def verifier():
    with math_scorer() as made:
        yield made


@pytest.mark.parametrize(
    ("answer", "text", "wanted"),
    [
        ("72", "so the answer is 72", 1.0),
        ("72", "\\boxed{72}", 1.0),
        ("72", "$\\frac{144}{2}$", 1.0),
        ("\\frac{1}{2}", "$0.5$", 1.0),
        ("$\\frac{1}{2}$", "\\boxed{1/2}", 1.0),
        ("1,072", "1072", 1.0),
        ("x^2 + 2x + 1", "$(x+1)^2$", 1.0),
        ("x^2 + 2x + 1", "1", 0.0),
        ("(1,2)", "$(1,2)$", 1.0),
        ("72", "73", 0.0),
        ("72", "", 0.0),
        ("72", "no number at all", 0.0),
        ("72", "$" * 99, 0.0),
    ],
)
def test_math(verifier: RewardScorer, answer: str, text: str, wanted: float) -> None:
    assert one(verifier, text, answer=answer) == {"math": wanted}


def test_math_works_outside_the_main_thread(verifier: RewardScorer) -> None:
    out: list[dict[str, float]] = []
    thread = threading.Thread(target=lambda: out.append(one(verifier, "$\\frac{144}{2}$")))
    thread.start()
    thread.join(timeout=60)
    assert out == [{"math": 1.0}]


def test_math_gives_up_on_a_completion_that_takes_for_ever() -> None:
    with math_scorer(timeout_s=3.0) as made:
        one(made, "1")
        start = time.monotonic()
        assert one(made, "9**9**9**9**9") == {"math": 0.0}
        assert time.monotonic() - start < 15
        assert one(made, "72") == {"math": 1.0}


def test_math_names_an_answer_that_it_cannot_read(verifier: RewardScorer) -> None:
    with pytest.raises(DataError, match=r"cannot read the answer of set.jsonl:4 \(row 3\)"):
        one(verifier, "1", answer="")


def test_math_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError) as caught:
        build(Path("."), "math")
    assert caught.value.next == "pip install 'rlctl-core[math]'"
