"""Run directories that something went wrong with, and checkpoints of several ranks."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlctl import files
from rlctl.checkpoint import find_damage, latest_checkpoint, save_checkpoint
from rlctl.errors import CheckpointError
from rlctl.rundir import RunDirectory
from rlctl.runs import describe, list_runs, statistics
from rlctl.tracking.reader import read_metrics

LINES = [json.dumps({"training/global_step": s, "a": s / 10, "b": None, "critic/score/mean": 0.5}) for s in range(12)]
ODD = [
    "", "null", "[]", '"x"', "NaN", '{"training/global_step": Infinity}', '{"training/global_step": NaN}', "{",
    '{"training/global_step": 1e999, "a": 1}', '{"training/global_step": 3, "a": -Infinity}', "\x00\x01",
    '{"training/global_step": "4"}', '{"training/global_step": true}', '{"training/global_step": 2.7, "a": [1]}',
    '{"training/global_step": 5, "a": ' + "9" * 400 + "}", "[" * 20_000,
]  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.sampled_from(LINES + ODD), max_size=20),
    cut=st.integers(min_value=0, max_value=60),
    noise=st.binary(max_size=6),
    step=st.integers(min_value=-1, max_value=13),
)
def test_a_damaged_metrics_file_is_read_and_rewound_without_loss(
    tmp_path: Path, lines: list[str], cut: int, noise: bytes, step: int
) -> None:
    folder = tmp_path / "case"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    path = folder / "metrics.jsonl"
    content = "\n".join(lines).encode() + noise
    path.write_bytes(content[: len(content) - cut] if cut < len(content) else content)
    before = [line for line in path.read_bytes().splitlines() if line.strip()]
    metrics = read_metrics(path)
    assert all(isinstance(s, int) for s in metrics.rows)
    json.dumps(statistics(metrics), allow_nan=False)
    files.move_lines_after(path, "training/global_step", step)
    assert all(s <= step for s in read_metrics(path).rows)
    assert read_metrics(path).damaged <= metrics.damaged
    after = [line for p in folder.iterdir() for line in p.read_bytes().splitlines() if line.strip()]
    assert sorted(before) == sorted(after)


@pytest.mark.parametrize(
    "manifest",
    [
        "", "{", "[]", "null", "{}", '{"metrics": [1], "best": 3, "device": "cpu", "started": 5}',
        '{"status": null, "process": [], "metrics": {"training/global_step": 3}, "resumes": []}',
        '{"status": "running", "process": {"pid": "x", "host": null}}',
    ],
)  # fmt: skip
def test_a_damaged_manifest_does_not_hide_the_other_runs(tmp_path: Path, manifest: str) -> None:
    RunDirectory.create(tmp_path, "good", "", {}, exact=True)
    bad = RunDirectory.create(tmp_path, "bad", "", {}, exact=True)
    bad.manifest_path.write_text(manifest)
    assert {run.name for run in list_runs(tmp_path)} == {"good", "bad"}
    if not manifest.startswith("{") or manifest == "{":
        with pytest.raises(CheckpointError, match="cannot be read"):
            describe(bad)
    else:
        json.dumps(describe(bad), allow_nan=False)


@pytest.mark.parametrize("listed", ["{}", "null", '{"trainer.json": 5}', '{"trainer.json": {"bytes": 2}}'])
def test_a_checkpoint_with_a_poor_manifest_is_damaged(tmp_path: Path, listed: str) -> None:
    path = tmp_path / "step_00000001"
    path.mkdir()
    (path / "trainer.json").write_text("{}")
    (path / "manifest.json").write_text(f'{{"files": {listed}}}')
    assert "manifest" in (find_damage(path) or "")
    assert latest_checkpoint(tmp_path, notice=lambda _: None) is None


class RankEngine:
    """One of several ranks that are threads; ``reduce`` is a real collective: it returns when all ranks have come."""

    def __init__(self, rank: int, group: RankGroup, fails: bool) -> None:
        self.mesh = SimpleNamespace(rank=rank, world_size=group.size)
        self._group = group
        self._fails = fails

    def save_state(self, path: Path) -> None:
        (path / f"rank{self.mesh.rank}.bin").write_bytes(b"x" * 1000)
        if self._fails:
            raise RuntimeError("no room on this rank")

    def reduce(self, values: Sequence[float], op: str = "sum") -> list[float]:
        assert op == "max"
        return [self._group.largest(self.mesh.rank, values[0])]


class RankGroup:
    def __init__(self, size: int) -> None:
        self.size = size
        self._values = [0.0] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def largest(self, rank: int, value: float) -> float:
        self._values[rank] = value
        self._barrier.wait()
        result = max(self._values)
        self._barrier.wait()
        return result


def save_on_all_ranks(run: RunDirectory, step: int, failing: int | None) -> list[str]:
    group = RankGroup(3)
    outcomes = [""] * 3

    def one(rank: int) -> None:
        engine: Any = RankEngine(rank, group, fails=rank == failing)
        try:
            save_checkpoint(run, step, engine, {"step": step}, 2)
            outcomes[rank] = "saved"
        except CheckpointError as error:
            outcomes[rank] = error.found or ""

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes


def test_ranks_publish_together_or_not_at_all(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "r", "", {})
    assert save_on_all_ranks(run, 1, failing=None) == ["saved"] * 3
    found = latest_checkpoint(run.path)
    assert found is not None
    assert {f"engine/rank{r}.bin" for r in range(3)} <= set(found.manifest["files"])
    assert found.manifest["world_size"] == 3
    for failing in (0, 2):
        outcomes = save_on_all_ranks(run, 2, failing=failing)
        assert outcomes.pop(failing) == "RuntimeError: no room on this rank"
        assert outcomes == ["another rank could not save"] * 2
        assert [p.name for p in run.checkpoints.iterdir()] == ["step_00000001"]


def test_text_that_is_no_utf8_is_written_and_read_back(tmp_path: Path) -> None:
    for value in (os.fsdecode(b"caf\xe9"), "half \ud83d"):
        path = tmp_path / "samples.jsonl"
        path.unlink(missing_ok=True)
        files.append_lines(path, [{"prompt": value}, {"prompt": "next"}])
        rows, damaged = files.read_lines(path)
        assert [row["prompt"] for row in rows][-1] == "next"
        assert len(rows) + damaged == 2
