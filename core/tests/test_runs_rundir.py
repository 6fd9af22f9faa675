"""The run directory: unique names, an atomic manifest, samples, rewinding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from rlctl.errors import CheckpointError
from rlctl.manifest import process_record
from rlctl.rundir import RunDirectory, default_root


def test_create_makes_the_documented_layout(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "quickstart", "trainer: {}\n", {"kind": "rl"})
    assert run.path.parent == tmp_path.resolve()
    assert run.name.startswith("quickstart-")
    assert len(run.name) == len("quickstart-20260101-000000")
    assert run.config_path.read_text() == "trainer: {}\n"
    assert run.manifest() == {"kind": "rl", "name": run.name, "status": "running"}
    assert RunDirectory.open(run.path).path == run.path
    assert run.export == run.path / "export"
    assert run.checkpoints == run.path / "checkpoints"


def test_runs_of_the_same_second_do_not_collide(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda i: RunDirectory.create(tmp_path, "x", f"n: {i}\n", {}, exact=True), range(24)))
    assert len({run.path for run in runs}) == 24
    assert {run.config_path.read_text() for run in runs} == {f"n: {i}\n" for i in range(24)}
    assert {run.name for run in runs} == {"x", *(f"x-{i}" for i in range(2, 25))}


def test_an_existing_directory_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    run = RunDirectory.create(tmp_path, "mine", "a: 1\n", {}, exact=True)
    assert run.name == "mine-2"
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["notes.txt"]


def test_a_name_cannot_leave_the_root(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs", "../../evil name", "", {}, exact=True)
    assert run.path.parent == (tmp_path / "runs").resolve()


def test_a_directory_that_was_named_exactly_keeps_its_name(tmp_path: Path) -> None:
    for name in ("ü–run 1", ".hidden", "a+b"):
        assert RunDirectory.create(tmp_path, name, "", {}, exact=True).path == (tmp_path / name).resolve()


def test_default_root_honours_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_RUNS_DIR", str(tmp_path / "elsewhere"))
    assert RunDirectory.create(None, "r", "", {}).path.parent == (tmp_path / "elsewhere").resolve()
    monkeypatch.delenv("RLCTL_RUNS_DIR")
    assert default_root() == Path("runs")


def test_a_root_that_cannot_be_written_is_a_plain_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(CheckpointError, match="cannot be made") as caught:
        RunDirectory.create(blocker / "runs", "r", "", {})
    assert "RLCTL_RUNS_DIR" in (caught.value.next or "")


def test_open_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a run directory"):
        RunDirectory.open(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        RunDirectory.open(tmp_path / "nowhere")
    assert caught.value.found == "no such directory"


def test_finish_records_time_status_and_last_metrics(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "r", "", {"started": "2026-01-01T00:00:00+00:00"})
    run.metrics_path.write_text(
        '{"training/global_step": 1, "a": 1.0, "b": 5}\n{"training/global_step": 2, "a": 0.5}\n'
    )
    run.finish("failed", error="out of memory")
    manifest = run.manifest()
    assert manifest["status"] == "failed"
    assert manifest["error"] == "out of memory"
    assert manifest["duration_s"] > 0
    assert manifest["metrics"] == {"training/global_step": 2, "a": 0.5, "b": 5}


def test_a_failed_manifest_write_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path, "r", "", {"kind": "rl"})
    before = run.manifest_path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run.update_manifest(status="done")
    assert run.manifest_path.read_bytes() == before
    assert not list(run.path.glob(".tmp*"))


def test_status_tells_a_dead_process_from_a_running_one(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "r", "", {"process": process_record()})
    assert run.status() == "running"
    child = subprocess.run(
        [sys.executable, "-c", "import json; from rlctl.manifest import process_record; print(json.dumps(process_record()))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    run.update_manifest(process=json.loads(child.stdout))
    assert run.status() == "died"
    run.update_manifest(process={**process_record(), "start_ticks": 1})  # the number now belongs to another process
    assert run.status() == "died"
    run.update_manifest(process={**process_record(), "host": "another-host"})
    assert run.status() == "running"
    run.finish("done")
    assert run.status() == "done"


def test_samples_survive_a_torn_line(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "r", "", {})
    run.write_samples([{"step": 1, "completion": "é\n", "score": float("nan")}])
    with run.samples_path.open("a") as file:
        file.write('{"step": 2, "comp')
    run.write_samples([{"step": 3, "completion": "ok", "score": 1.0}])
    lines = run.samples_path.read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 1, "completion": "é\n", "score": None}
    assert lines[1] == '{"step": 2, "comp'
    assert json.loads(lines[2])["step"] == 3


def test_rewind_moves_later_lines_and_checkpoints_aside(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "r", "", {})
    run.metrics_path.write_text("".join(f'{{"training/global_step": {i}}}\n' for i in range(1, 6)) + '{"training/gl')
    run.write_samples([{"step": 2}, {"step": 4}])
    for step in (2, 4):
        (run.checkpoints / f"step_{step:08d}").mkdir(parents=True)
    run.finish("interrupted")
    moved = run.rewind(3)
    assert [p.name for p in moved] == ["metrics.jsonl.bak-1", "samples.jsonl.bak-1", "step_00000004.bak-1"]
    assert [json.loads(x)["training/global_step"] for x in run.metrics_path.read_text().splitlines()] == [1, 2, 3]
    backup = (run.path / "metrics.jsonl.bak-1").read_text().splitlines()
    assert backup == ['{"training/global_step": 4}', '{"training/global_step": 5}', '{"training/gl']
    assert run.samples_path.read_text() == '{"step": 2}\n'
    assert run.manifest()["resumes"][0]["step"] == 3
    assert run.status() == "running"
    assert run.rewind(3) == []
    run.write_samples([{"step": 9}])
    assert [p.name for p in run.rewind(3)] == ["samples.jsonl.bak-2"]


def test_the_time_between_two_processes_does_not_count(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "r", "", {"started": "2026-01-01T00:00:00+00:00"})
    begin = datetime.fromisoformat("2026-01-01T00:00:00+00:00").timestamp()
    run.metrics_path.write_text(f'{{"training/global_step": 1, "training/unix_time": {begin + 90}}}\n')
    run.rewind(1)  # the process died, 90 s after its start and long ago
    run.finish("done")
    manifest = run.manifest()
    assert manifest["resumes"][0]["duration_before_s"] == 90
    assert 90 <= manifest["duration_s"] < 150
    run.rewind(1)
    assert run.manifest()["duration_s"] is None
    run.finish("done")
    assert manifest["duration_s"] <= run.manifest()["duration_s"] < 150
