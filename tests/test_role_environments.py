"""A run whose roles live in another virtual environment computes what the ordinary run computes, bit for bit; by processes and by
Ray, and whichever way its weights go."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from borrowed_environment import borrowed

from rlctl.config.load import load_config
from rlctl.plugins import load_plugins
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.run import Runner, RunResult

pytestmark = pytest.mark.slow

CLOCK = ("timing_s/", "perf/", "sync/seconds", "sync/peak_bytes", "training/unix_time")
GRPO = [
    "warm_start=null",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.save_best=false",
    "trainer.logger=[jsonl]",
    "trainer.num_threads=1",
    "data.task.val_size=4",
    "data.train_batch_size=4",
    "rollout.n=4",
    "actor.entropy_coeff=0.5",
    "actor.use_kl_loss=true",
    "actor.optim.lr=0.01",
]
ORDINARY = ["runtime.pools.rollout.nproc=1", "rollout.pool=rollout", "ref.pool=rollout"]


class Listening(NullReporter):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


def grpo(folder: Path, *overrides: str) -> tuple[RunResult, list[str]]:
    plugins, reporter = load_plugins(), Listening()
    resolved = load_config("quickstart", [*GRPO, *overrides], plugins=plugins)
    return Runner(resolved, plugins, reporter, run_dir=folder).execute(), reporter.said


def numbers(run: RunResult) -> str:
    """Every metric of every step that no clock has made; as text, since a metric may rightly be nan."""
    plain = [{k: v for k, v in m.items() if not k.startswith(CLOCK)} for m in run.history]
    assert len(plain) == 2
    assert all(len(m) > 20 and m["actor/grad_norm"] > 0 for m in plain)
    return str(plain)


def runtime(run: RunResult) -> dict[str, Any]:
    return json.loads((run.path / "manifest.json").read_text())["runtime"]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One without Ray and without the command line."""
    return borrowed(tmp_path_factory.mktemp("other") / "venv", ["ray", "rlctl_cli"])


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    run, said = grpo(tmp_path_factory.mktemp("ordinary") / "run", *ORDINARY)
    assert "pools main 1, rollout 1 by process" in " ".join(said)
    return run


def same(run: RunResult, ordinary: RunResult) -> None:
    assert numbers(run) == numbers(ordinary)
    exports = [(r.path / "export" / "model.safetensors").read_bytes() for r in (run, ordinary)]
    assert exports[0] == exports[1]


def test_rollout_and_reference_elsewhere_change_no_bit(ordinary: RunResult, python: Path, tmp_path: Path) -> None:
    run, said = grpo(tmp_path / "run", f"rollout.python={python.parent.parent}", "ref.pool=rollout")
    same(run, ordinary)
    assert runtime(run)["weight_sync"] == runtime(ordinary)["weight_sync"] == "shared_memory"
    pools = runtime(run)["pools"]
    assert {name: pool["python"] for name, pool in pools.items()} == {
        "main": sys.executable,
        "rollout": str(python),
    }
    assert pools["rollout"]["versions"]["rlctl-plugin-fsdp"]
    words = " ".join(said)
    assert f"rollout 1 ({python.parent.parent})" in words
    engines = json.loads((run.path / "manifest.json").read_text())["engines"]
    assert (engines["ref"]["python"], engines["actor"]["python"]) == (str(python), sys.executable)
    # What is written down starts the same run again.
    again = load_config(str(run.path / "config.yaml"), plugins=load_plugins()).config
    assert again == load_config("quickstart", [*GRPO, f"rollout.python={python}", "ref.pool=rollout"]).config


def test_the_whole_training_elsewhere_changes_no_bit(ordinary: RunResult, python: Path, tmp_path: Path) -> None:
    """The controller has no engine in its own environment then; weights go by its hands."""
    pythons = [f"runtime.pools.rollout.python={python}", f"runtime.python={python}"]
    run, _ = grpo(tmp_path / "run", *ORDINARY, *pythons, "runtime.weight_transport=controller")
    same(run, ordinary)
    assert {pool["python"] for pool in runtime(run)["pools"].values()} == {str(python)}
    assert runtime(run)["weight_sync"] == "controller"


def test_ranks_of_ray_need_no_ray_where_they_live(ordinary: RunResult, python: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rlctl-core[ray]'")
    check = [str(python), "-c", "import ray"]
    assert b"No module named 'ray'" in subprocess.run(check, capture_output=True, check=False).stderr
    run, _ = grpo(tmp_path / "run", f"rollout.python={python}", "ref.pool=rollout", "runtime.launcher=ray")
    same(run, ordinary)
    found = runtime(run)
    assert (found["launcher"], found["pools"]["rollout"]["python"]) == ("ray", str(python))


def test_what_does_not_load_there_stops_the_run_before_a_process_starts(tmp_path: Path) -> None:
    """Through the command: --dry-run finds it too, as one message without a traceback."""
    python = borrowed(tmp_path / "venv", ["safetensors"])
    command = [sys.executable, "-m", "rlctl_cli.main", "train", "quickstart", f"rollout.python={python}"]
    for last in (["--dry-run"], ["--run-dir", str(tmp_path / "run")]):
        done = subprocess.run([*command, *last], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert f"does not load in {python}" in done.stderr
        assert "No module named 'safetensors'" in done.stderr
        assert f"{python} -m pip install " in done.stderr
    assert not (tmp_path / "run" / "workers").exists()
