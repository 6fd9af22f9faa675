"""In the environment of veomni: doctor says that it is registered, and capabilities what was proved."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("veomni") is None, reason="veomni is not installed (it has an environment of its own)"
    ),
    pytest.mark.skipif(importlib.util.find_spec("rlctl_cli") is None, reason="the command line is not installed"),
]


def rlctl(folder: Path, *arguments: str) -> Any:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RLCTL_")}
    folders = {"RLCTL_CACHE_DIR": str(folder / "cache"), "RLCTL_DATA_DIR": str(folder / "data")}
    command = [sys.executable, "-m", "rlctl_cli.main", *arguments, "--json"]
    done = subprocess.run(command, env={**kept, **folders}, capture_output=True, text=True, timeout=300, check=False)
    # One object alone on stdout, whatever VeOmni has to say.
    return json.loads(done.stdout)


def test_veomni_is_registered_and_shows_its_evidence(tmp_path: Path) -> None:
    report = rlctl(tmp_path, "doctor", "veomni", "--timeout", "240")
    (row,) = report["backends"]
    assert (row["stage"], row["status"]) == ("registered", "ok"), row
    checks = {c["name"]: c["status"] for c in rlctl(tmp_path, "doctor", "--quick")["checks"]}
    assert {checks[n] for n in ("veomni", "veomni-stand-ins", "veomni-torchvision")} == {"ok"}
    cells = rlctl(tmp_path, "capabilities", "--backend", "veomni")["cells"]
    proved = {
        (c["model_type"], c["axis"])
        for c in cells
        if c["device"] == "cpu" and c["evidence"]["level"] == "parity" and not c["evidence"]["stale"]
    }
    assert {("language_model", axis) for axis in ("dp_shard", "dp_replicate", "usp", "ep")} <= proved
    assert {("value_model", axis) for axis in ("dp_shard", "dp_replicate", "usp")} <= proved
