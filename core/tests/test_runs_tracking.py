"""Metrics sinks, and reading metrics back."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import ConfigError
from rlctl.records import TrackerSpec
from rlctl.tracking import BUILTIN, build_tracker
from rlctl.tracking.reader import read_metrics
from rlctl.tracking.reporter import NullReporter


class Plugins:
    """A plugin set that brings trackers."""

    def __init__(self, *specs: tuple[str, TrackerSpec]) -> None:
        self._specs = list(specs)

    def records(self, hook: str) -> list[tuple[str, Any]]:
        return list(self._specs) if hook == "rlctl_trackers" else []


class ListTracker:
    """A third-party sink; fails at step 2 when its config says so."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        if config.get("refuse"):
            raise RuntimeError("no network")
        self.file = run_dir / "list.txt"
        self.fail = config.get("fail", False)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self.fail and step == 2:
            raise ConnectionError("gone")
        with self.file.open("a") as file:
            file.write(f"{step} {sorted(metrics)}\n")

    def close(self) -> None:
        with self.file.open("a") as file:
            file.write("closed\n")


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "third_party_tracker", module)
    return Plugins(("acme-rlctl", TrackerSpec("list", "third_party_tracker:ListTracker")))


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_is_flat_readable_after_each_step_and_has_no_nan(tmp_path: Path) -> None:
    tracker = build_tracker(["jsonl"], tmp_path, {}, None)
    tracker.log({"actor/pg_loss": math.nan, "a": math.inf, "b": 1, "training/epoch": 0}, 1)
    row = lines(tmp_path)[0]
    assert row.pop("training/unix_time") > 1.7e9
    assert row == {"training/global_step": 1, "actor/pg_loss": None, "a": None, "b": 1, "training/epoch": 0}
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    tracker.log({"a": 2.0}, 2)
    assert len(lines(tmp_path)) == 2
    tracker.close()


def test_jsonl_is_durable_when_the_process_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from rlctl.tracking import build_tracker\n"
        "t = build_tracker(['jsonl'], Path(sys.argv[1]), {}, None)\n"
        "t.log({'a': 1.0}, 1); t.log({'a': 2.0}, 2); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert [row["a"] for row in lines(tmp_path)] == [1.0, 2.0]


def test_a_resume_keeps_later_lines_in_a_backup(tmp_path: Path) -> None:
    first = build_tracker(["jsonl"], tmp_path, {}, None)
    for step in range(1, 6):
        first.log({"a": float(step)}, step)
    second = build_tracker(["jsonl"], tmp_path, {}, None, resume_step=3)
    second.log({"a": 40.0}, 4)
    assert [(r["training/global_step"], r["a"]) for r in lines(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    backup = (tmp_path / "metrics.jsonl.bak-1").read_text().splitlines()
    assert [json.loads(line)["a"] for line in backup] == [4.0, 5.0]


def test_tensorboard_reads_back_and_purges_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = build_tracker(["tensorboard"], tmp_path, {}, None)
    for step in range(1, 6):
        tracker.log({"critic/score/mean": step / 10}, step)
    tracker.close()
    again = build_tracker(["tensorboard"], tmp_path, {}, None, resume_step=3)
    again.log({"critic/score/mean": 0.9}, 4)
    again.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(e.step, round(e.value, 5)) for e in events.Scalars("critic/score/mean")]
    assert points == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9)]


def test_tracking_imports_no_torch() -> None:
    code = (
        "import sys, tempfile; from pathlib import Path\n"
        "import rlctl.rundir, rlctl.manifest, rlctl.checkpoint, rlctl.tracking\n"
        "t = rlctl.tracking.build_tracker(['console', 'jsonl', 'tensorboard'], Path(tempfile.mkdtemp()), {}, None)\n"
        "t.log({'a': 1.0}, 1); t.close()\n"
        "print([m for m in ('torch', 'tensorflow', 'transformers', 'wandb', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_console_prints_one_line_unless_a_reporter_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_tracker(["console"], tmp_path, {}, None).log({"critic/score/mean": 0.25, "timing_s/step": 0.5}, 7)
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err == "step 7  reward 0.250  0.50 s/step\n"
    quiet = build_tracker(["console", "jsonl"], tmp_path, {}, None, reporter=NullReporter())
    assert quiet.names == ("jsonl",)


def test_plugins_bring_sinks_and_a_failing_one_costs_the_others_nothing(tmp_path: Path, third_party: Plugins) -> None:
    told: list[str] = []
    tracker = build_tracker(["list", "jsonl"], tmp_path, {"fail": True}, third_party, notice=told.append)
    for step in (1, 2, 3):
        tracker.log({"a": 1.0}, step)
    tracker.close()
    tracker.close()
    assert (tmp_path / "list.txt").read_text() == "1 ['a']\n"
    assert [row["training/global_step"] for row in lines(tmp_path)] == [1, 2, 3]
    assert told == ["tracker list failed, left out from here on: ConnectionError: gone"]


def test_jsonl_is_tried_again_after_a_failure(tmp_path: Path) -> None:
    told: list[str] = []
    target = tmp_path / "run"
    tracker = build_tracker(["jsonl"], target, {}, None, notice=told.append)
    tracker.log({"a": 1.0}, 1)  # the directory is not there
    tracker.log({"a": 1.0}, 2)
    target.mkdir()
    tracker.log({"a": 3.0}, 3)
    assert [row["training/global_step"] for row in lines(target)] == [3]
    assert len(told) == 1
    assert "trying again at each step" in told[0]


def test_mistakes_in_the_logger_list_are_plain_errors(tmp_path: Path, third_party: Plugins) -> None:
    with pytest.raises(ConfigError, match="unknown tracker 'jsnol'") as caught:
        build_tracker(["jsnol"], tmp_path, {}, third_party)
    assert caught.value.next == "write jsonl"
    assert "list" in (caught.value.wanted or "")
    with pytest.raises(ConfigError, match="list does not start") as caught:
        build_tracker(["list"], tmp_path, {"refuse": True}, third_party)
    assert caught.value.found == "RuntimeError: no network"
    missing = Plugins(("d", TrackerSpec("cloud", "x:Y", ("surely-not-installed>=3",))))
    with pytest.raises(ConfigError, match="not installed") as caught:
        build_tracker(["cloud"], tmp_path, {}, missing)
    assert "pip install 'surely-not-installed>=3'" in (caught.value.next or "")
    twice = Plugins(("acme", TrackerSpec("jsonl", "x:Y")))
    with pytest.raises(ConfigError, match="two dists") as caught:
        build_tracker(["jsonl"], tmp_path, {}, twice)
    assert caught.value.found == "rlctl-core and acme"


def test_a_default_sink_that_is_not_installed_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILTIN, "tensorboard", TrackerSpec("tensorboard", "x:Y", ("surely-not-installed>=3",)))
    told: list[str] = []
    tracker = build_tracker(["jsonl", "tensorboard"], tmp_path, {}, None, notice=told.append)
    assert tracker.names == ("jsonl",)
    assert told == ["tensorboard is not installed, its files are not written (pip install 'surely-not-installed>=3')"]


def test_metrics_with_holes_torn_lines_and_repeats_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"training/global_step": 1, "a": 1.0, "b": null}\n'
        '{"training/global_step": 3, "a": 3.0}\n'
        '{"training/global_step": 3, "val": 0.5}\n'
        '\n[1]\n{"no": "step"}\n'
        '{"training/global_step": 2, "a": "text", "b": true}\n'
        '{"training/global_step": 4, "a": 4.0, "c'
    )
    metrics = read_metrics(path)
    assert metrics.damaged == 3
    assert metrics.last_step == 3
    assert metrics.series("a").steps == (1, 3)
    assert metrics.series("a").values == (1.0, 3.0)
    assert metrics.series("missing", "val").name == "val"
    assert not metrics.series("b")
    assert metrics.last_values() == {"training/global_step": 3, "a": 3.0, "val": 0.5}
    assert read_metrics(tmp_path / "none").last_step is None


def test_tenths() -> None:
    from rlctl.tracking.reader import Series

    series = Series("x", tuple(range(20)), tuple(float(i) for i in range(20)))
    assert series.tenth(last=False) == 0.5
    assert series.tenth(last=True) == 18.5
    assert Series("x", (1,), (3.0,)).tenth(last=True) == 3.0
