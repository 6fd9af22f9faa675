"""The script for two GPUs, in its small form over gloo: every stage runs to its end here, so that nothing but the machine is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "gpu" / "run_two_gpus.sh"


def _start(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), str(out), *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=550,
    )


@pytest.mark.slow
def test_every_stage_ends_well_over_gloo_and_leaves_records(tmp_path: Path) -> None:
    done = _start(tmp_path / "out", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    summary_file = tmp_path / "out" / "summary.json"
    summary = json.loads(summary_file.read_text())
    stages = summary["stages"]
    assert set(stages) == {"verify", "step", "weights", "grpo"}
    assert {(c["backend"], c["model_type"]) for c in stages["verify"]["cases"]} == {
        ("fsdp2", "language_model"), ("fsdp2", "value_model"), ("megatron", "language_model"), ("megatron", "value_model"),
    }  # fmt: skip
    layouts = stages["step"]["layouts"]
    # The same steps on one rank and on two that share its rows.
    for shape in ("2x64", "1x256"):
        assert layouts["usp2"][shape]["loss"] == pytest.approx(layouts["one"][shape]["loss"], rel=1e-5)
    assert set(stages["step"]["efficiency"]) == {f"{k} {s}" for k in ("dp2", "usp2") for s in ("2x64", "1x256")}
    assert [s["training/global_step"] for s in stages["grpo"]["steps"]] == [1, 2, 3]
    [weights] = stages["weights"]["measured"]
    assert (weights["link"], weights["sync"]["how"]) == ("gloo", "gloo")
    assert weights["transport"] > 0
    found = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu" / "records.py"), str(summary_file), "megatron", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    record = json.loads((tmp_path / "tp2-sp1-cpu-qwen3-language_model-float32.json").read_text())
    assert record["level"] == "parity"
    assert record["deltas"]["loss"] < 1e-5


def test_devices_that_are_not_there_are_named(tmp_path: Path) -> None:
    done = _start(tmp_path / "out", "--device", "npu")
    assert done.returncode == 2
    assert "npu" in done.stderr
    assert "Traceback" not in done.stderr
