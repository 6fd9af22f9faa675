"""Commands in odd surroundings: a pipe whose reader has gone, a terminal that is not UTF-8, no home, damaged runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RLCTL = (sys.executable, "-m", "rlctl_cli.main")
REPORTING = (
    ("doctor", "--quick"),
    ("capabilities",),
    ("plugins",),
    ("recipes",),
    ("config", "show", "quickstart"),
    ("config", "schema"),
    ("runs", "list"),
    ("--help",),
)


def environment(tmp_path: Path, **extra: str) -> dict[str, str]:
    return {**os.environ, "RLCTL_RUNS_DIR": str(tmp_path / "ünlü runs"), **extra}


@pytest.mark.parametrize("arguments", REPORTING, ids=" ".join)
def test_a_closed_pipe_is_no_error(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*RLCTL, *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path),
        check=False,
    )
    os.close(writer)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


@pytest.mark.parametrize("arguments", REPORTING, ids=" ".join)
def test_an_ascii_terminal_and_no_home_are_enough(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    env = environment(
        tmp_path,
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
        LC_ALL="C",
        NO_COLOR="1",
        PYTHONWARNINGS="error",
    )
    env.pop("HOME", None)
    done = subprocess.run([*RLCTL, *arguments], capture_output=True, env=env, check=False)
    assert done.returncode in (0, 1), done.stderr  # the doctor may find a fault on the machine
    assert b"Traceback" not in done.stderr
    assert b"\x1b[" not in done.stdout


def test_a_manifest_of_the_wrong_types_makes_a_report_all_the_same(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "manifest.json").write_text('{"status": 5, "started": 7, "versions": [], "best": 3, "resumes": "q"}')
    (run / "metrics.jsonl").write_text('nonsense\n{"training/global_step": "x"}\n{"training/global_step": 1}\n')
    (run / "samples.jsonl").write_text('{"step": null}\n')
    for command in (("report", str(run)), ("runs", "show", str(run)), ("runs", "list", "--root", str(tmp_path))):
        done = subprocess.run([*RLCTL, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (run / "report.html").is_file()
