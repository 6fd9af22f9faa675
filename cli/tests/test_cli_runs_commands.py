"""`rlctl runs`: what people and programs read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from rlctl.errors import UsageError
from rlctl.manifest import process_record
from rlctl.rundir import RunDirectory
from rlctl_cli.commands.runs import find_run, runs


def make(root: Path, name: str, lr: float, day: int, gain: float = 0.1, **more: Any) -> RunDirectory:
    manifest = {
        "kind": "rl",
        "model": "/models/tiny",
        "task": "sort [digits]",
        "algorithm": "grpo",
        "backend": "fsdp2",
        "rollout": "hf",
        "started": f"2026-01-0{day}T00:00:00+00:00",
        "total_training_steps": 4,
        "process": process_record(),
        "guards": {"off": [], "changed": {}},
        "seeds": {"trainer": day},
        "command_line": f"rlctl train quick actor.optim.lr={lr}",
    }
    config = {"actor": {"optim": {"lr": lr}}, "trainer": {"seed": 0}}
    run = RunDirectory.create(root, name, yaml.safe_dump(config), manifest | more, exact=True)
    rows = [
        {"training/global_step": s, "critic/score/mean": 0.4 + gain * s, "actor/grad_norm": 0.5} for s in range(1, 5)
    ]
    rows[-1]["val/score/mean"] = 0.75
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make(tmp_path, "quick-a", 1e-5, 1).finish("done")
    make(tmp_path, "quick-b", 3e-5, 2, gain=0.05, guards={"off": ["weight_fingerprint"]}).finish(
        "failed", error="no memory"
    )
    make(tmp_path, "going", 1e-5, 3)
    return tmp_path


def call(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(runs, [arguments[0], *arguments[1:], "--root", str(root)], catch_exceptions=False)


def test_list_shows_each_run_on_a_line(root: Path) -> None:
    lines = call(root, "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "going", "quick-b", "quick-a"]
    assert "running" in lines[1]
    assert "failed" in lines[2]
    assert "0.800" in lines[3]
    assert "0.750" in lines[3]
    assert "4/4" in lines[3]
    assert "tiny" in lines[3]
    assert "sort [digits]" in lines[3]


def test_list_json(root: Path) -> None:
    data = json.loads(call(root, "list", "--json").stdout)
    assert data["schema"] == 1
    assert data["root"] == str(root)
    assert [run["name"] for run in data["runs"]] == ["going", "quick-b", "quick-a"]
    assert data["runs"][1]["error"] == "no memory"
    assert data["runs"][2]["score"] == pytest.approx(0.8)
    assert len(json.loads(call(root, "list", "--json", "-n", "1").stdout)["runs"]) == 1


def test_an_empty_root_says_what_to_do(tmp_path: Path) -> None:
    result = call(tmp_path, "list")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "rlctl train quickstart" in result.stderr
    assert json.loads(call(tmp_path, "list", "--json").stdout)["runs"] == []


def test_show_has_status_metrics_and_the_command(root: Path) -> None:
    out = call(root, "show", "quick-b").stdout
    for words in (
        "failed: no memory", "4 of 4", "grpo / fsdp2 / hf", "trainer 2", "weight_fingerprint",
        "rlctl train quick actor.optim.lr=3e-05", "critic/score/mean", "0.450", "0.600",
    ):  # fmt: skip
        assert words in out, words
    data = json.loads(call(root, "show", "last", "--json").stdout)
    assert data["run"]["name"] == "going"
    assert data["metrics"]["critic/score/mean"]["best_step"] == 4
    assert data["manifest"]["seeds"] == {"trainer": 3}


def test_show_names_damaged_lines_and_checkpoints(root: Path) -> None:
    run = RunDirectory.open(root / "quick-a")
    (run.checkpoints / "step_00000004").mkdir(parents=True)
    with run.metrics_path.open("a") as file:
        file.write('{"torn')
    out = call(root, "show", "quick-a").stdout
    assert "step 4 (damaged: it has no manifest.json)" in out
    assert "1 damaged lines" in out


def test_compare_shows_differences_and_relative_results(root: Path) -> None:
    out = call(root, "compare", "quick-a", "quick-b").stdout
    assert "A  quick-a  (done, 4 steps)" in out
    assert "guards that are off differ: none | weight_fingerprint" in out
    (line,) = (line for line in out.splitlines() if line.startswith("actor.optim.lr"))
    assert line.split() == ["actor.optim.lr", "1e-05", "3e-05"]
    assert "trainer.seed" not in out
    (line,) = (line for line in out.splitlines() if line.startswith("critic/score/mean"))
    assert "0.500 > 0.800 (0.800)" in line
    assert "0.450 > 0.600 (0.600) -25.0%" in line


def test_compare_json_takes_more_than_two(root: Path) -> None:
    data = json.loads(call(root, "compare", "quick-a", "quick-b", "going", "--json").stdout)
    assert data["schema"] == 1
    assert data["config"] == {"actor.optim.lr": [1e-5, 3e-5, 1e-5]}
    assert data["metrics"]["critic/score/mean"]["relative"] == pytest.approx([0.0, -0.25, 0.0])


def test_mistakes_are_plain_errors(root: Path) -> None:
    with pytest.raises(UsageError, match="two runs or more"):
        call(root, "compare", "quick-a")
    with pytest.raises(UsageError, match="beginning of 2 runs"):
        call(root, "show", "quick")
    assert find_run("quick-a", root) == root / "quick-a"


def test_from_the_shell(root: Path) -> None:
    def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlctl_cli.main", "runs", *arguments]
        return subprocess.run(command, env=os.environ | {"RLCTL_RUNS_DIR": str(root)}, capture_output=True, text=True)

    done = shell("show", "qick-a")
    assert done.returncode == 2
    assert "did you mean quick-a?" in done.stderr
    assert "Traceback" not in done.stderr
    assert shell("show", "last", "--json").returncode == 0


def test_runs_import_nothing_heavy(root: Path) -> None:
    code = (
        "import sys; from rlctl_cli.commands.runs import runs\n"
        "runs(['compare', 'quick-a', 'quick-b', '--root', sys.argv[1]], standalone_mode=False)\n"
        "print([m for m in ('torch', 'transformers', 'matplotlib', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
