"""Where an interpreter is, and what its processes see of the environment that starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from other_pythons import script, with_packages
from runtime_toys import ALLOWED, BrokenAtStart, OtherRlctl, ToyWorker, boots

from rlctl.errors import RlctlError
from rlctl.interpreters.faults import InterpreterError
from rlctl.interpreters.program import ROLE_PATH, Program, locate, passed_path, short
from rlctl.runtime.failures import WorkerError
from rlctl.runtime.group import Limits, WorkerGroup
from rlctl.runtime.transports.process import ProcessTransport

HERE = str(Path(__file__).parent)


def group(python: str, worker: type = ToyWorker, log_dir: Path | None = None) -> WorkerGroup:
    target = f"{worker.__module__}:{worker.__qualname__}"
    transport = ProcessTransport(log_dir, {}, ALLOWED, worker=target, plugins=False, program=Program.of(python))
    return WorkerGroup("gen", transport, boots(2), worker, Limits(60, 60, 3, 5), python=python)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing in it."""
    home = tmp_path_factory.mktemp("empty") / "venv"
    venv.create(home, symlinks=True, with_pip=False)
    return home


def test_an_interpreter_is_found_by_its_environment_or_by_itself(empty: Path, tmp_path: Path) -> None:
    python = empty / "bin" / "python"
    assert locate(empty) == locate(python) == python, "the link is kept: what it points to has other packages"
    assert python.resolve() != python
    plain = tmp_path / "plain"
    plain.write_text("text")
    for nothing in (tmp_path, tmp_path / "no", plain, Path("\0"), Path("x" * 5000)):
        assert locate(nothing) is None


def test_it_is_called_by_its_environment(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(empty.parent)
    assert short(str(empty / "bin" / "python")) == "venv"
    monkeypatch.chdir("/")
    assert short(str(empty / "bin" / "python")) == str(empty).lstrip("/")
    assert short("/usr/bin/python3") == "usr/bin/python3"


def test_nothing_that_leads_to_our_packages_reaches_it(empty: Path) -> None:
    base = {
        "PYTHONPATH": "/ours/site-packages",
        "PYTHONHOME": "/ours",
        "VIRTUAL_ENV": "/ours",
        "PATH": os.pathsep.join(["/ours/bin", "/usr/bin"]),
        "HOME": "/home/me",
    }
    env = Program(str(empty / "bin" / "python"), ("/src/a", "/src/b")).environment(base)
    assert env == {
        "PYTHONPATH": "/src/a:/src/b",
        "VIRTUAL_ENV": str(empty),
        "PATH": f"{empty}/bin:/usr/bin",
        "HOME": "/home/me",
    }
    assert "PYTHONPATH" not in Program("/usr/bin/python3").environment(base)
    assert "VIRTUAL_ENV" not in Program("/usr/bin/python3").environment(base)


def test_sources_are_passed_on_and_packages_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, target = tmp_path / "src", tmp_path / "target"
    sources.mkdir()
    (target / "torch-2.0.dist-info").mkdir(parents=True)
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    monkeypatch.delenv(ROLE_PATH, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, ["", target, sources, site, site / "deep", sources])))
    assert passed_path() == (str(sources),)
    monkeypatch.setenv(ROLE_PATH, str(target))
    assert passed_path() == (str(target),), "said in so many words"
    monkeypatch.setenv(ROLE_PATH, "")
    assert passed_path() == ()


def test_an_environment_of_its_own_has_none_of_our_packages(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the search path that a rank gets nor by PYTHONHOME, which would bring the standard library of ours too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    monkeypatch.delenv(ROLE_PATH, raising=False)
    program = Program.of(str(empty / "bin" / "python"))
    code = "import sys\ntry:\n    import torch\nexcept ImportError as e:\n    print(e.name)\nprint(sys.prefix)"
    env = program.environment({**os.environ, "PYTHONHOME": "/nowhere", "VIRTUAL_ENV": sys.prefix})
    done = subprocess.run([program.python, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch", str(empty)]


def test_ranks_run_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = with_packages(tmp_path / "there" / "bin" / "python", Path(HERE), env="MARK=there")
    monkeypatch.setenv("VIRTUAL_ENV", "/ours")
    monkeypatch.setenv("PYTHONHOME", "/ours/home")
    ranks = group(python)
    try:
        ranks.start()
        seen = ranks.call("environment", ("MARK", "VIRTUAL_ENV", "PYTHONHOME", "RANK"))
        assert [rank["RANK"] for rank in seen] == ["0", "1"]
        assert all((r["MARK"], r["VIRTUAL_ENV"], r["PYTHONHOME"]) == ("there", None, None) for r in seen)
    finally:
        ranks.close()


def test_a_rank_of_another_rlctl_is_refused_when_it_answers(tmp_path: Path) -> None:
    python = with_packages(tmp_path / "there" / "bin" / "python", Path(HERE))
    ranks = group(python, OtherRlctl)
    with pytest.raises(InterpreterError) as caught:
        ranks.start()
    assert ranks.closed
    assert "rlctl 9.9.9 (hook API 7.0)" in str(caught.value.found)
    assert "pip install 'rlctl-core==" in str(caught.value.next)
    assert f"pool gen runs in {python}" in caught.value.details


@pytest.mark.parametrize(
    ("text", "worker", "kind", "words"),
    [
        ("echo no such license >&2; exit 3", ToyWorker, WorkerError, ["exit code 3", "no such license"]),
        (f'PYTHONPATH={HERE} exec "$PYTHON" "$@"', BrokenAtStart, RlctlError, ["rank 1 cannot start"]),
    ],
)
def test_a_rank_that_dies_at_its_start_says_where(
    text: str, worker: type, kind: type[RlctlError], words: list[str], tmp_path: Path
) -> None:
    python = script(tmp_path / "there" / "bin" / "python", text)
    ranks = group(python, worker, tmp_path / "logs")
    with pytest.raises(kind) as caught:
        ranks.start()
    assert ranks.closed
    for word in [*words, f"pool gen runs in {python}"]:
        assert word in str(caught.value)
    assert caught.value.next in ("mend it", f"rlctl doctor --python {python}")


def test_an_interpreter_that_is_gone_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(InterpreterError) as caught:
        group(str(tmp_path / "gone" / "bin" / "python")).start()
    assert "FileNotFoundError" in str(caught.value.found)
    assert "does not answer as a Python interpreter" in caught.value.what
