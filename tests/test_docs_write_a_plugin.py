"""docs/write-a-plugin.md is executed: its files become a dist, its commands run in order, their output is what it shows.

Conventions of the page: a fence ```` ```LANGUAGE file=PATH ```` is a file; a fence ```` ```console ```` holds commands
(lines that start with ``$ ``, continued after a backslash) and what they print, where ``...`` stands for anything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "write-a-plugin.md"
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Command:
    """One line to type, and the lines that it shows."""

    line: str
    shown: list[str] = field(default_factory=list)


@dataclass
class Page:
    """What the page asks its reader to write and to type."""

    files: dict[str, str]
    commands: list[Command]


def read_page(text: str) -> Page:
    """Files and commands of a page, in order."""
    page = Page({}, [])
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].partition(" ")
        if rest.startswith("file="):
            page.files[rest.removeprefix("file=")] = match["body"]
        elif language == "console":
            for line in match["body"].splitlines():
                if page.commands and page.commands[-1].line.endswith("\\"):
                    page.commands[-1].line += "\n" + line
                elif line.startswith("$ "):
                    page.commands.append(Command(line[2:]))
                else:
                    page.commands[-1].shown.append(line)
    return page


def shows(shown: list[str], printed: str) -> str | None:
    """None when ``printed`` holds the shown lines in order, else the first that it lacks."""
    at = 0
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for line in shown:
        wanted = " ".join(line.split())
        if wanted == "...":
            continue
        pattern = re.compile(".*?".join(re.escape(part.strip()) for part in wanted.split("...")))
        while at < len(lines) and not pattern.search(lines[at]):
            at += 1
        if at == len(lines):
            return line
        at += 1
    return None


@dataclass
class Place:
    """The directory of the reader's dist, and the environment that its commands run in."""

    directory: Path
    env: dict[str, str]

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run one line of the page as a shell would."""
        return subprocess.run(
            line,
            shell=True,
            cwd=self.directory,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.fixture(scope="module")
def page() -> Page:
    return read_page(PAGE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def place(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The page's files, and an environment in which ``pip install .`` puts the dist beside and not into this one."""
    root = tmp_path_factory.mktemp("page")
    directory, target = root / "rlctl-plugin-plain", root / "site"
    for name, text in page.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    scripts = Path(sys.executable).parent
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RLCTL_", "PIP_", "PYTEST_"))}
    env |= {
        "PATH": f"{scripts}{os.pathsep}{env['PATH']}",
        "PYTHONPATH": str(target),
        "HOME": str(root / "home"),
        "XDG_CACHE_HOME": str(root / "cache"),
        "OMP_NUM_THREADS": "1",
        # The reader's `pip install .`, without an index: its requirements are here already.
        "PIP_TARGET": str(target),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        # pip reads 0 as "no isolation": the build uses this environment's hatchling.
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    (root / "home").mkdir()
    return Place(directory, env)


def test_the_page_is_read(page: Page) -> None:
    assert list(page.files) == [
        "pyproject.toml",
        "src/rlctl_plain/__init__.py",
        "src/rlctl_plain/plugin.py",
        "src/rlctl_plain/config.py",
        "src/rlctl_plain/engine.py",
        "tests/test_plain.py",
    ]
    assert [c.line.split()[:2] for c in page.commands] == [
        ["pip", "install"],
        ["rlctl", "plugins"],
        ["rlctl", "doctor"],
        ["pytest", "-q"],
        ["rlctl", "verify"],
        ["rlctl", "train"],
        ["rlctl", "runs"],
    ]
    # What the page promises of itself.
    assert len(page.files["src/rlctl_plain/engine.py"].splitlines()) <= 140


def test_what_is_shown_is_compared() -> None:
    printed = "head\nplain   train   ok\ntail\n"
    assert shows(["...", "plain ... ok"], printed) is None
    assert shows(["plain train ok", "tail"], printed) is None
    assert shows(["tail", "plain ... ok"], printed) == "plain ... ok"
    assert shows(["plain ... fail"], printed) == "plain ... fail"


@pytest.mark.slow
def test_every_command_does_what_the_page_shows(page: Page, place: Place) -> None:
    assert shutil.which("pip", path=place.env["PATH"]), "this test installs a dist with pip"
    for command in page.commands:
        done = place.run(command.line)
        printed = done.stdout
        assert done.returncode == 0, f"$ {command.line}\n{printed[-3000:]}"
        assert "Traceback" not in printed, f"$ {command.line}\n{printed[-3000:]}"
        missing = shows(command.shown, printed)
        assert missing is None, f"$ {command.line}\ndid not print: {missing}\n{printed[-3000:]}"
    # Two optimizer steps of GRPO were taken by the page's own engine, each with a real gradient.
    lines = (place.directory / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if "actor/grad_norm" in row]
    assert len(steps) == 2
    assert all(0 < row["actor/grad_norm"] < 100 and row["actor/skipped_steps"] == 0 for row in steps)
    assert all(row["training/rollout_probs_diff_mean"] < 1e-4 for row in steps)


@pytest.mark.slow
def test_the_fault_that_the_page_suggests_is_found(page: Page, place: Place) -> None:
    engine = page.files["src/rlctl_plain/engine.py"]
    broken = engine.replace("out.loss.backward()", "(out.loss / len(micro_batches)).backward()")
    assert broken != engine
    copy = place.directory.parent / "broken"
    shutil.copytree(place.directory / "src", copy / "src")
    (copy / "src/rlctl_plain/engine.py").write_text(broken, encoding="utf-8")
    env = {**place.env, "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{place.env['PYTHONPATH']}"}
    done = Place(place.directory, env).run("pytest -q -p no:cacheprovider tests")
    failed = {re.split(r"[\[ ]", line.split("::")[-1])[0] for line in done.stdout.splitlines() if "FAILED" in line}
    assert failed == {
        "test_update_does_not_depend_on_micro_batches",
        "test_padding_changes_nothing",
        "test_calls_add_up_before_a_step",
    }


@pytest.mark.slow
def test_a_misspelt_setting_is_refused_with_the_nearest_name(place: Place) -> None:
    done = place.run("rlctl train quickstart --backend plain actor.engine.atention=eager")
    printed = done.stdout
    assert done.returncode == 1, printed
    assert "Traceback" not in printed
    assert "actor.engine.atention" in printed
    assert "attention" in printed.replace("atention", "")
