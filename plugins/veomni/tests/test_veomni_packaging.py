"""The wheel, in a fresh environment outside the repository: pip alone brings what it needs, with torch for the CPU.

Installs packages (about two minutes), as the machine's pip is set up.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONSTRAINTS = ROOT / "constraints" / "veomni.txt"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("veomni") is None, reason="veomni is not installed (it has an environment of its own)"
    ),
    pytest.mark.skipif(not CONSTRAINTS.is_file(), reason="tests without the repository"),
]


def call(command: list[str], cwd: Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RLCTL_", "PYTHONPATH", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=900)
    assert not ok or done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def test_the_wheel_of_veomni_brings_what_it_needs(tmp_path: Path) -> None:
    out = tmp_path / "dist"
    for folder in ("core", "cli", "plugins/veomni"):
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out)]
        call([*build, str(ROOT / folder)], ROOT)
    (wheel,) = out.glob("rlctl_plugin_veomni-*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert "rlctl_veomni/py.typed" in inside
    assert any(n.endswith("licenses/LICENSE") for n in inside)
    assert not any("/tests/" in n or n.startswith("tests/") for n in inside)
    shipped = {n.rpartition("/")[2] for n in inside if n.endswith(".json")}
    assert shipped == {p.name for p in (ROOT / "plugins/veomni/src/rlctl_veomni/evidence").glob("*.json")}

    venv.create(tmp_path / "env", with_pip=True)
    python, rlctl = str(tmp_path / "env/bin/python"), str(tmp_path / "env/bin/rlctl")
    pip = [python, "-m", "pip", "install", "-q", "--no-compile"]
    call([*pip, "torch==2.13.0"], tmp_path)
    call([*pip, "-c", str(CONSTRAINTS), *map(str, out.glob("*.whl"))], tmp_path)
    report = json.loads(call([rlctl, "doctor", "veomni", "--json", "--timeout", "240"], tmp_path, ok=False).stdout)
    (row,) = report["backends"]
    assert (row["stage"], row["status"]) == ("registered", "ok"), row
    # Whatever torchvision pip chose for it, a rank imports transformers' models.
    code = (
        "from rlctl_veomni.notices import silence; from rlctl_veomni.standins import prepare;"
        "silence(); prepare('cpu'); import rlctl_veomni.engine; from transformers import Qwen3MoeForCausalLM"
    )
    call([python, "-c", code], tmp_path)
