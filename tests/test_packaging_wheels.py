"""Wheels and sdists, installed into a fresh environment outside the repository: doctor without torch, then a real train.

The one test that installs packages (about two minutes). It uses pip as the machine has it set up.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
DISTS = {
    "rlctl-core": "core",
    "rlctl": "cli",
    "rlctl-plugin-fsdp": "plugins/fsdp",
    "rlctl-plugin-megatron": "plugins/megatron",
    "rlctl-plugin-mindspeed": "plugins/mindspeed",
}
APART = {"rlctl-plugin-veomni": ("plugins/veomni", "constraints/veomni.txt")}
"""Plugins with an environment of their own, whose tests install them there, and its tested versions."""
ALL = {**DISTS, **{name: folder for name, (folder, _) in APART.items()}}


def call(command: list[str], cwd: Path, ok: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RLCTL_", "PYTHONPATH", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=900)
    assert not ok or done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    for folder in ALL.values():
        command = [sys.executable, "-m", "build", "-q", "--no-isolation", "--outdir", str(out), str(ROOT / folder)]
        call(command, ROOT)
    return out


def test_one_version_for_all_dists_and_compatible_ranges():
    versions, needs = set(), []
    for name, folder in ALL.items():
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        assert project["name"] == name
        versions.add(project["version"])
        needs += [d for d in project["dependencies"] if d.startswith("rlctl")]
    from rlctl import __version__

    assert versions == {__version__}
    assert needs
    assert all(">=" in d and "<" in d and "==" not in d for d in needs), needs


@pytest.mark.parametrize(
    ("constraints", "folders"),
    [("constraints/base.txt", tuple(DISTS.values())), *((file, (folder,)) for folder, file in APART.values())],
)
def test_the_tested_versions_fit_what_every_dist_asks_for(constraints, folders):
    lines = [x for x in (ROOT / constraints).read_text().splitlines() if x and not x.startswith("#")]
    tested = {canonicalize_name(n): v for n, _, v in (x.partition("==") for x in lines)}
    for folder in folders:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        extras = [d for listed in project.get("optional-dependencies", {}).values() for d in listed]
        assert {canonicalize_name(Requirement(d).name) for d in project["dependencies"]} <= {*tested, *DISTS}, folder
        for text in (*project["dependencies"], *extras):
            need = Requirement(text)
            version = tested.get(canonicalize_name(need.name))
            assert version is None or need.specifier.contains(version), f"{folder}: {text}, tested with {version}"


def test_wheels_and_sdists_carry_types_licence_recipes_and_no_tests_in_the_wheel(built):
    for folder in ALL.values():
        name = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["name"].replace("-", "_")
        (wheel,), (sdist,) = built.glob(f"{name}-0*.whl"), built.glob(f"{name}-0*.tar.gz")
        inside = zipfile.ZipFile(wheel).namelist()
        assert any(n.endswith("py.typed") for n in inside)
        assert any(re.search(r"dist-info/licenses/LICENSE$", n) for n in inside), inside
        assert not any("/tests/" in n or n.startswith("tests/") for n in inside)
        with tarfile.open(sdist) as archive:
            assert any(n.endswith("pyproject.toml") for n in archive.getnames())
            assert any("/tests/" in n for n in archive.getnames())
        if folder.startswith("plugins/"):
            points = zipfile.ZipFile(wheel).read(next(n for n in inside if n.endswith("dist-info/entry_points.txt")))
            module = points.decode().strip().rpartition("= ")[2].replace(".", "/") + ".py"
            assert module in inside, "the entry point leads somewhere"
            records = [p.name for p in (ROOT / folder / "src").glob("*/evidence/*.json")]
            assert {n.rpartition("/")[2] for n in inside if n.endswith(".json")} >= set(records), "its evidence ships"
        if folder == "cli":
            assert any(n.endswith("recipes/quickstart.yaml") for n in inside)
            assert any(n.endswith("recipes/quickstart/model/tokenizer.json") for n in inside)


@pytest.mark.slow
def test_a_fresh_environment_outside_the_repository_trains(built, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python, rlctl = str(tmp_path / "env/bin/python"), str(tmp_path / "env/bin/rlctl")
    pip = [python, "-m", "pip", "install", "-q"]
    wheels = [str(next(built.glob(f"{n.replace('-', '_')}-0*.whl"))) for n in DISTS]
    constraints = ["-c", str(ROOT / "constraints/base.txt")]
    # First without torch: doctor names what is missing and how to mend it, and everything light works.
    call([*pip, "--no-deps", wheels[2]], tmp_path)
    call([*pip, *constraints, wheels[0] + "[data]", wheels[1]], tmp_path)
    report = json.loads(call([rlctl, "doctor", "--json"], tmp_path, ok=False).stdout)
    fsdp = next(b for b in report["backends"] if b["name"] == "fsdp2")
    assert fsdp["status"] == "fail"
    assert "torch" in " ".join(fsdp["cause"])
    assert "pip install" in fsdp["next"]
    assert "quickstart" in call([rlctl, "recipes"], tmp_path).stdout
    refused = call([rlctl, "train", "quickstart"], tmp_path, ok=False)
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    assert "torch" in refused.stderr
    # Then with everything its metadata asks for.
    call([*pip, "torch==2.13.0"], tmp_path)
    call([*pip, *constraints, *wheels], tmp_path)
    healthy = call([rlctl, "doctor", "--json"], tmp_path)
    found = {(b["name"], b["dist"]): b["status"] for b in json.loads(healthy.stdout)["backends"]}
    assert found["fsdp2", "rlctl-plugin-fsdp"] == found["megatron", "rlctl-plugin-megatron"] == "ok"
    assert found["megatron", "rlctl-plugin-mindspeed"] == "skip", "no npu is here"
    overrides = [
        "trainer.total_training_steps=2",
        "warm_start.steps=4",
        "warm_start.eval_freq=4",
        "data.task.val_size=32",
    ]
    done = call([rlctl, "train", "quickstart", *overrides, "--json", "--run-dir", "trained"], tmp_path)
    assert json.loads(done.stdout)["steps"] == 2
    assert (tmp_path / "trained/export/model.safetensors").is_file()
    call([rlctl, "report", "trained"], tmp_path)
    assert (tmp_path / "trained/report.html").is_file()
