"""`rlctl bench`: equal work for every backend, the forecast beside it, and the reason of what was not measured."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SMALL = ["--rows", "4", "--length", "16", "--steps", "2", "--warmup", "1"]


def rlctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlctl_cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_installed_backends_are_measured_and_the_others_say_why_not() -> None:
    done = rlctl("bench", "fsdp2", "veomni", "megatron", *SMALL, "--nproc", "2", "--checkpointing", "--json")
    assert done.returncode == 1
    assert "rlctl-plugin-veomni" in done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == 1
    by_name = {r["backend"]: r for r in found["results"]}
    first, second, third = by_name["fsdp2"], by_name["veomni"], by_name["megatron"]
    assert [r["backend"] for r in found["results"]][-1] == "veomni", "what was not measured comes last"
    assert first["topology"] == {"dp_shard": 2}
    assert first["tokens_per_s_per_device"] == pytest.approx(4 * 16 / first["step_s"]["median"] / 2)
    assert first["step_s"]["min"] <= first["step_s"]["median"] <= first["step_s"]["max"]
    # Tensors of a tiny model are megabytes; the process holds them and torch.
    assert 0 < first["forecast_gib"] < 0.1 < first["peak_gib"]
    assert "veomni" in second["problem"]
    assert second["step_s"] is None
    # Checkpointing goes by another name there; the work is the same, and so is the loss after the same steps.
    assert not any("runs as it is" in note for note in third["notes"]), third
    assert third["loss"] == pytest.approx(first["loss"], rel=1e-5)
    assert third["topology"] == {"dp_shard": 2}

    one = json.loads(rlctl("bench", "fsdp2", *SMALL, "--checkpointing", "--json").stdout)["results"][0]
    # The same batches and the same weights: the same loss after the same steps.
    assert one["loss"] == pytest.approx(first["loss"], rel=1e-5)


def test_what_cannot_be_read_is_a_usage_error() -> None:
    for arguments, words in (
        (["fsdp2", "--model", "tiny:nothing"], "tiny:llama"),
        (["fsdp2", "--engine", "other:key=1"], "BACKEND:KEY=VALUE"),
        (["fsdp2", "--topology", "dp_shard"], "axis=size"),
    ):
        done = rlctl("bench", *arguments)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_a_refused_engine_section_is_that_backends_problem() -> None:
    done = rlctl("bench", "fsdp2", *SMALL, "--engine", "fsdp2:colour=red")
    assert done.returncode == 1
    assert "colour" in done.stderr
    assert "Traceback" not in done.stderr
