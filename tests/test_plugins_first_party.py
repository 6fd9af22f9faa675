"""The released plugins against the contract: their records, what their light modules import, the doctor on a real machine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from rlctl import catalogue
from rlctl.catalogue import PluginState
from rlctl.discovery import FIRST_PARTY_DISTS, discover
from rlctl.records import CheckStatus

OURS = ("rlctl-core", "rlctl", "rlctl-plugin-fsdp", "rlctl-plugin-megatron", "rlctl-plugin-mindspeed")
LIGHT = sorted((c.name, c.target) for c in discover() if c.dist in FIRST_PARTY_DISTS)


def run(code: str, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RLCTL_")}
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, env={**inherited, **env}, capture_output=True, text=True, timeout=300, check=False)


def test_the_catalogue_is_equal_to_the_plugins_own_records():
    # After a change to a plugin's records: python tools/update_catalogue.py
    path = Path(__file__).parents[1] / "tools" / "update_catalogue.py"
    tool = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("update_catalogue", path))
    spec.loader.exec_module(tool)
    own = {(dist, spec.name, str(spec.kind)): spec for dist, spec in tool.first_party_records()}
    known = {
        (e.dist, e.spec.name, str(e.spec.kind)): e.spec for e in catalogue.entries() if e.state is PluginState.RELEASED
    }
    assert set(own) == set(known)
    for key, spec in own.items():
        assert spec == known[key], key


def test_all_plugins_are_found():
    assert {name for name, _ in LIGHT} >= {"cli", "fsdp", "megatron", "mindspeed"}


@pytest.mark.parametrize(("name", "target"), LIGHT)
def test_light_modules_import_the_standard_library_pluggy_and_rlctl_only(name, target):
    code = f"""
import sys
before = set(sys.modules)
import importlib
module = importlib.import_module({target!r})
for hook in ("rlctl_backends", "rlctl_checks", "rlctl_rewards", "rlctl_recipes", "rlctl_trackers"):
    list(getattr(module, hook, list)() or ())
tops = {{m.partition('.')[0] for m in set(sys.modules) - before}} - set(sys.stdlib_module_names)
print(*sorted(tops))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    own = target.partition(".")[0]
    assert set(done.stdout.split()) - {own, "rlctl", "pluggy"} == set()


def test_every_first_party_dist_has_one_version():
    versions = {name: metadata.version(name) for name in ("rlctl-core", "rlctl", "rlctl-plugin-fsdp")}
    assert len(set(versions.values())) == 1, versions


@pytest.mark.slow
def test_the_doctor_on_this_machine(tmp_path):
    env = {"RLCTL_CACHE_DIR": str(tmp_path / "cache"), "RLCTL_DATA_DIR": str(tmp_path / "data")}
    arguments = ["doctor", "--json", "--timeout", "240"]
    done = run(f"from rlctl_cli.main import main\nmain({arguments!r})", **env)
    report = json.loads(done.stdout)
    rows = {r["name"]: r for r in report["backends"] if r["dist"] != "rlctl-plugin-mindspeed"}
    for name, kind in (("fsdp2", "train"), ("hf", "rollout"), ("megatron", "train")):
        assert (rows[name]["kind"], rows[name]["stage"], rows[name]["status"]) == (kind, "registered", "ok"), rows[name]
    checks = {c["name"]: c for c in report["checks"]}
    assert checks["torch"]["status"] == "ok"
    assert metadata.version("torch") in checks["torch"]["found"]
    assert checks["training backend"]["found"] == "fsdp2, megatron"
    assert "cuda-calls" in checks["megatron-stand-ins"]["found"]
    away = [r for r in report["backends"] if r["dist"] == "rlctl-plugin-mindspeed"]
    assert {(r["name"], r["status"]) for r in away} == {("megatron", "skip"), ("mindspeed_megatron", "skip")}
    failed = [c for c in report["checks"] if c["status"] == "fail"]
    assert done.returncode == int(bool(failed)), failed
    # What loads here is evidence of this machine from now on.
    shown = run("from rlctl_cli.main import main\nmain(['capabilities', '--backend', 'fsdp2', '--json'])", **env)
    cells = json.loads(shown.stdout)["cells"]
    levels = {(c["device"], c["axis"]): c["evidence"] for c in cells if c["support"] == "supported"}
    here = levels[next(p for p in levels if not levels[p]["stale"])]
    assert here["level"] != "declared"


def linked_environment(root: Path, dists: tuple[str, ...]) -> Path:
    """A directory of links to installed distributions: an environment that has these and no other."""
    site = root / "linked"
    site.mkdir()
    for name in dists:
        dist = metadata.distribution(name)
        info = Path(str(dist.locate_file(""))) / f"{dist.name.replace('-', '_')}-{dist.version}.dist-info"
        (site / info.name).symlink_to(info)
        tops = {Path(f).parts[0] for f in dist.files or () if not str(f).startswith("..")} - {info.name, "__pycache__"}
        for top in tops:
            (site / top).symlink_to(Path(str(dist.locate_file(top))))
    return site


NEEDED = (
    "pluggy",
    "packaging",
    "pydantic",
    "pydantic-core",
    "typing-extensions",
    "annotated-types",
    "typing-inspection",
)
SHOWN = ("click", "rich", "Pygments", "markdown-it-py", "mdurl")


def run_linked(tmp_path: Path, site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an environment of links, beside the sources of our dists that are in it."""
    modules = {
        "rlctl-core": "rlctl",
        "rlctl": "rlctl_cli",
        "rlctl-plugin-fsdp": "rlctl_fsdp",
        "rlctl-plugin-megatron": "rlctl_megatron",
        "rlctl-plugin-mindspeed": "rlctl_mindspeed",
    }
    linked = {p.name.partition("-0")[0].replace("_", "-") for p in site.glob("rlctl*.dist-info")}
    sources = [str(Path(__import__(modules[d]).__file__ or "").parents[1]) for d in OURS if d in linked]
    paths = f"""
import sys
sys.path[:0] = {[str(site), *dict.fromkeys(s for s in sources if "site-packages" not in s)]!r}
sys.path[:] = [p for p in sys.path if "site-packages" not in p]
"""
    folders = {"RLCTL_CACHE_DIR": str(tmp_path / "cache"), "RLCTL_DATA_DIR": str(tmp_path / "data")}
    return run(paths + code, "-S", "-P", **folders)


@pytest.mark.parametrize("backend", ["megatron", "veomni"])
def test_train_with_a_backend_that_is_not_installed_stops_before_anything_heavy(tmp_path, backend):
    # Everything but the plugin is there: requirements of fsdp2 and of megatron alike.
    libraries = ("torch", "transformers", "safetensors", "numpy", "megatron-core", "psutil", "PyYAML")
    ours = ("rlctl-core", "rlctl", "rlctl-plugin-fsdp")
    site = linked_environment(tmp_path, (*NEEDED, *SHOWN, *libraries, *ours))
    code = f"""
import atexit
heavy = {{"torch", "transformers", "megatron", "pydantic", "yaml", "numpy"}}
atexit.register(lambda: print("HEAVY", *sorted(heavy & set(sys.modules)), len(sys.modules) < 500, file=sys.stderr))
from rlctl_cli.main import main
main(["train", "--backend", {backend!r}])
"""
    done = run_linked(tmp_path, site, code)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == f"error: the training backend {backend!r} is not installed"
    assert f"  next:    pip install rlctl-plugin-{backend}" in lines
    assert any(re.search(r"registered: fsdp2 \(rlctl-plugin-fsdp", x) for x in lines)
    assert lines[-1] == "HEAVY True"
    assert "Traceback" not in done.stderr


def test_the_doctor_without_torch_says_what_to_install(tmp_path):
    site = linked_environment(tmp_path, (*NEEDED, *SHOWN, *OURS))
    done = run_linked(
        tmp_path,
        site,
        """
from rlctl_cli.main import main
main(["doctor", "--json"])
""",
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    rows = {r["name"]: r for r in report["backends"] if r["dist"] != "rlctl-plugin-mindspeed"}
    for name in ("fsdp2", "hf", "megatron"):
        row = rows[name]
        assert (row["stage"], row["status"]) == ("compatible", "fail")
        assert any(c.startswith("torch is not installed, torch>=") for c in row["cause"])
        assert row["next"].startswith("pip install 'torch>=")
    checks = {c["name"]: c for c in report["checks"]}
    assert (checks["torch"]["status"], checks["torch"]["next"]) == ("fail", "pip install rlctl-plugin-fsdp")
    assert checks["megatron-core"]["status"] == "skip"
    assert checks["training backend"]["status"] == "fail"
    assert checks["python"]["status"] == "ok", "the others are unharmed"
    assert [p["status"] for p in report["plugins"] if p["name"] == "cli"] == [str(CheckStatus.OK)]
