"""Finding, summarising and comparing runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.errors import UsageError
from rlctl.manifest import process_record
from rlctl.rundir import RunDirectory
from rlctl.runs import compare, describe, find_run, flatten, list_runs, summarise


def make(
    root: Path, name: str, steps: int = 3, started: str = "2026-01-01T00:00:00+00:00", **more: Any
) -> RunDirectory:
    config = {"actor": {"optim": {"lr": more.pop("lr", 1e-5)}}, "reward": {"components": [{"name": "exact_match"}]}}
    manifest = {"kind": "rl", "started": started, "total_training_steps": 3, "process": process_record(), **more}
    run = RunDirectory.create(root, name, yaml.safe_dump(config), manifest, exact=True)
    with run.metrics_path.open("w") as file:
        for step in range(1, steps + 1):
            row = {"training/global_step": step, "critic/score/mean": step / 10, "actor/grad_norm": 1.0 / step}
            file.write(json.dumps(row) + "\n")
    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make(tmp_path, "quick-1", started="2026-01-02T00:00:00+00:00").finish("done")
    make(tmp_path, "quick-2", started="2026-01-03T00:00:00+00:00", lr=3e-5)
    make(tmp_path, "other", steps=0, started="2026-01-01T00:00:00+00:00").finish("failed", error="no memory")
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "file").write_text("")
    return tmp_path


def test_list_is_newest_first_and_tells_what_matters(root: Path) -> None:
    runs = list_runs(root)
    assert [run.name for run in runs] == ["quick-2", "quick-1", "other"]
    assert [run.status for run in runs] == ["running", "done", "failed"]
    assert [(run.step, run.score) for run in runs] == [(3, 0.3), (3, 0.3), (None, None)]
    assert runs[2].error == "no memory"
    assert runs[0].duration_s is not None
    assert list_runs(root / "nowhere") == []


def test_an_unreadable_run_is_listed_as_such(root: Path) -> None:
    (root / "quick-1" / "manifest.json").write_text("{")
    (run,) = (run for run in list_runs(root) if run.name == "quick-1")
    assert run.status == "unreadable"


@pytest.mark.parametrize(
    ("reference", "name"), [("quick-1", "quick-1"), ("oth", "other"), ("last", "quick-2"), ("quick-2", "quick-2")]
)
def test_find_by_name_beginning_or_last(root: Path, reference: str, name: str) -> None:
    assert find_run(reference, root).name == name


def test_find_by_path_needs_no_root(root: Path, tmp_path: Path) -> None:
    assert find_run(str(root / "other"), tmp_path / "elsewhere").name == "other"


def test_find_says_what_there_is(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="beginning of 2 runs") as caught:
        find_run("quick", root)
    assert caught.value.found == "quick-1, quick-2"
    with pytest.raises(UsageError, match="no run 'quickk-1'") as caught:
        find_run("quickk-1", root)
    assert caught.value.next == "did you mean quick-1?"
    with pytest.raises(UsageError) as caught:
        find_run("last", tmp_path / "empty")
    assert caught.value.found == "no runs at all"


def test_a_long_history_is_summarised_from_its_end(tmp_path: Path) -> None:
    run = make(tmp_path, "long", steps=20_000)
    assert run.metrics_path.stat().st_size > 1_000_000
    assert summarise(run).step == 20_000


def test_describe_has_statistics_and_files(root: Path) -> None:
    run = find_run("quick-1", root)
    (run.checkpoints / "step_00000003").mkdir(parents=True)
    data = describe(run)
    assert data["metrics"]["critic/score/mean"] == {
        "count": 3, "first": 0.1, "last": 0.3, "first_tenth": 0.1, "last_tenth": 0.3, "min": 0.1, "max": 0.3,
        "best": 0.3, "best_step": 3,
    }  # fmt: skip
    assert data["metrics"]["actor/grad_norm"]["best"] is None
    assert data["checkpoints"][0]["problem"] == "it has no manifest.json"
    assert set(data["files"]) == {"config", "metrics"}


def test_compare_shows_what_differs_and_what_came_of_it(root: Path) -> None:
    (root / "quick-2" / "manifest.json").write_text(
        json.dumps(find_run("quick-2", root).manifest() | {"guards": {"off": ["weight_fingerprint"]}})
    )
    rows = [{"training/global_step": 1, "critic/score/mean": 0.6, "only/b": 2.0}]
    (root / "quick-2" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = compare([find_run(name, root) for name in ("quick-1", "quick-2", "other")])
    assert data["config"] == {"actor.optim.lr": [1e-5, 3e-5, 1e-5]}
    score = data["metrics"]["critic/score/mean"]
    assert score["relative"] == [0.0, pytest.approx(1.0), None]
    assert score["runs"][1]["best"] == 0.6
    assert score["runs"][2] is None
    assert data["metrics"]["only/b"]["runs"][0] is None
    assert data["metrics"]["only/b"]["relative"] == [None, None, None]
    assert next(iter(data["metrics"])) == "critic/score/mean"
    assert data["notes"] == ["guards that are off differ: none | weight_fingerprint | none"]


def test_flatten() -> None:
    value = {"a": {"b": 1, "c": {}}, "d": [1, 2], "e": [{"f": 3}], "g": []}
    assert dict(flatten(value)) == {"a.b": 1, "a.c": {}, "d": [1, 2], "e.0.f": 3, "g": []}
