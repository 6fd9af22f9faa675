"""The route to an NPU from the command line, on test doubles of Ascend's packages; and with the real torch-npu wheel, without a driver.

Both take a package from the index that pip is set up for (megatron-core 0.12.1, 2 MB; torch-npu, 43 MB), each alone in a throw-away
place, and are skipped where it cannot be had.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOUBLES = ROOT / "plugins" / "mindspeed" / "tests"

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.slow

SMALL = [
    "data.train_batch_size=4",
    "rollout.n=4",
    "data.val_batch_size=16",
    "data.task.val_size=16",
    "data.task.train_size=64",
    "data.task.args.length=3",
    "trainer.num_threads=1",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.logger=[jsonl]",
    "warm_start={steps: 4, batch_size: 32, stop_at_score: null, optim: {lr: 1.0e-3}}",
    "reward.components=[{name: contains, args: {text: '1'}}]",
    "actor.optim.lr=1e-3",
]
WHOLE = pytest.mark.skipif(not os.environ.get("RLCTL_TEST_ASCEND"), reason="a minute more: make test-ascend")
CLOCK = ("timing_s/", "perf/", "sync/", "training/unix_time")
SUMS = 1e-4
"""Relative; absolute for the training-rollout differences, which are near zero: two ranks sum in another order than one."""


def call(python: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """``rlctl`` with arguments, in an environment of the interpreter's."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RLCTL_", "TORCH_DEVICE"))}
    command = [python, "-m", "rlctl_cli.main", *arguments]
    environment = {**inherited, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def environment_with(folder: Path, requirement: str) -> str:
    """The interpreter of a fresh environment: one package of the index, alone, before all that is installed here."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"{requirement} cannot be had from pip's index: {done.stderr.strip().splitlines()[-1]}")
    (site,) = folder.glob("lib/python*/site-packages")
    base = sysconfig.get_paths()["purelib"]
    (site / "zz_base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    return str(python)


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Nothing that this machine's user has proved counts here."""
    folder = tmp_path_factory.mktemp("homes")
    return {"RLCTL_DATA_DIR": str(folder / "data"), "RLCTL_CACHE_DIR": str(folder / "cache")}


def steps(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(CLOCK)} for line in lines]


def manifest(run: Path) -> dict[str, Any]:
    return json.loads((run / "manifest.json").read_text())


# ---- the doubles -------------------------------------------------------------------------------------------------------------
Rlctl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory, homes: dict[str, str]) -> Rlctl:
    """``rlctl`` where the doubles and the megatron-core that MindSpeed patches are installed, on ``RLCTL_DEVICE=npu``."""
    folder = tmp_path_factory.mktemp("simulated")
    python = environment_with(folder / "env", "megatron-core==0.12.1")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOUBLES))
        from mindspeed_doubles import install_doubles
    doubles = install_doubles(folder / "doubles")
    path = os.pathsep.join([str(doubles), os.environ.get("PYTHONPATH", "")])
    return lambda *words: call(python, *words, **homes, PYTHONPATH=path, RLCTL_DEVICE="npu")


def test_the_quickstart_goes_through_mindspeed_and_reports_megatrons_numbers(simulated, homes, tmp_path) -> None:
    npu, cpu = tmp_path / "npu", tmp_path / "cpu"
    quickstart = ["train", "quickstart", "--backend", "megatron", *SMALL]
    done = simulated(*quickstart, "--nproc", "2", "actor.parallel.tp=2", "--run-dir", str(npu))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "on Ascend double (CPU) (megatron, 2 ranks by process, tp=2)" in done.stderr
    done = call(sys.executable, *quickstart, "--run-dir", str(cpu), **homes)
    assert done.returncode == 0, done.stderr[-3000:]

    there, here = manifest(npu), manifest(cpu)
    assert there["device"] == {"type": "npu", "vendor": "huawei", "name": "Ascend double (CPU)", "simulated": True}
    assert not here["device"]["simulated"]
    notes = there["engines"]["actor"]["notes"]
    assert notes["megatron-core"] == "0.12.1, patched by MindSpeed"
    assert notes["collectives"] == "cpu:gloo,npu:hccl"
    assert notes["device"].startswith("simulated")
    assert "megatron-core" not in here["engines"]["actor"]["notes"]

    wanted = steps(cpu)
    assert len(wanted) == len(steps(npu)) == 2
    assert all(m["actor/grad_norm"] > 0 for m in wanted)
    off = {}
    for step, (a, b) in enumerate(zip(steps(npu), wanted, strict=True)):
        assert set(a) == set(b)
        for name, value in b.items():
            near_zero = SUMS if "diff" in name or name.endswith("ppo_kl") else 0.0
            if not math.isclose(a[name], value, rel_tol=SUMS, abs_tol=near_zero):
                off[step, name] = (a[name], value)
    assert off == {}


@WHOLE
def test_what_the_doubles_prove_is_stamped_simulated_and_raises_nothing(simulated, homes) -> None:
    done = simulated("doctor", "--json", "--timeout", "240")
    rows = {b["name"]: b for b in json.loads(done.stdout)["backends"] if b["dist"] == "rlctl-plugin-mindspeed"}
    assert {(n, r["stage"], r["status"]) for n, r in rows.items()} == {
        ("megatron", "registered", "ok"),
        ("mindspeed_megatron", "registered", "ok"),
    }
    records = [json.loads(p.read_text()) for p in Path(homes["RLCTL_DATA_DIR"], "evidence").glob("*-npu.json")]
    assert {(r["backend"], r["device"], r["simulated"]) for r in records} == {
        (name, "npu", True) for name in ("fsdp2", "hf", "megatron", "mindspeed_megatron")
    }
    cells = json.loads(simulated("capabilities", "--device", "npu", "--json").stdout)["cells"]
    assert {c["evidence"]["level"] for c in cells} == {"declared"}
    seen = {c["backend"] for c in cells if c["evidence"]["simulated"]}
    assert seen == {"fsdp2", "hf", "megatron", "mindspeed_megatron"}
    # The CPU's megatron is another dist's, and imports here too.
    (kept,) = Path(homes["RLCTL_DATA_DIR"], "evidence").glob("importable-megatron-cpu.json")
    assert "rlctl-plugin-megatron" in json.loads(kept.read_text())["versions"]


def test_fsdp2_and_hf_run_on_the_simulated_npu(simulated, tmp_path) -> None:
    run = tmp_path / "run"
    float32 = ["actor.engine.param_dtype=float32", "rollout.engine.dtype=float32"]
    done = simulated("train", "quickstart", "--backend", "fsdp2", *SMALL, *float32, "--run-dir", str(run))
    assert done.returncode == 0, done.stderr[-3000:]
    found = manifest(run)
    assert found["device"]["type"] == "npu"
    assert found["device"]["simulated"]
    assert {role: e["backend"] for role, e in found["engines"].items()} == {"actor": "fsdp2", "rollout": "hf"}
    assert [m["actor/grad_norm"] > 0 for m in steps(run)] == [True, True]


def test_a_critic_by_mindspeeds_own_name_is_refused_by_name(simulated, tmp_path) -> None:
    ppo = ["--backend", "mindspeed_megatron", "algorithm.adv_estimator=gae", "--run-dir", str(tmp_path / "run")]
    done = simulated("train", "quickstart", *ppo)
    assert done.returncode == 1
    assert "mindspeed_megatron has no value_model, which a critic is" in done.stderr
    assert "Traceback" not in done.stderr


# ---- without them ------------------------------------------------------------------------------------------------------------
def test_without_ascends_packages_the_doctor_explains_and_train_refuses_in_one_message(homes, tmp_path) -> None:
    on_npu = {**homes, "RLCTL_DEVICE": "npu"}
    run = tmp_path / "run"
    done = call(sys.executable, "train", "quickstart", "--backend", "megatron", "--run-dir", str(run), **on_npu)
    assert done.returncode == 1
    assert done.stdout == ""
    said = done.stderr
    assert said.startswith("error: backend 'megatron' on npu/huawei is rlctl-plugin-mindspeed ")
    assert said.count("error:") == 1
    for package in ("torch-npu is not installed", "mindspeed is not installed", "megatron-core 0.16.1 is installed"):
        assert package in said
    assert "git clone -b core_r0.12.1 https://gitcode.com/Ascend/MindSpeed.git" in said
    assert not run.exists()

    done = call(sys.executable, "doctor", "rlctl-plugin-mindspeed", "--quick", "--json", **on_npu)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    rows = [b for b in report["backends"] if b["dist"] == "rlctl-plugin-mindspeed"]
    assert {(r["stage"], r["status"]) for r in rows} == {("compatible", "fail")}
    assert all("MindSpeed.git" in r["next"] for r in rows)
    checks = {c["name"]: c for c in report["checks"]}
    assert "placeholder" in checks["ascend-packages"]["found"]
    assert checks["ascend-libraries"]["status"] == "warn"


# ---- the real wheel, without a driver ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, homes: dict[str, str]) -> Rlctl:
    """``rlctl`` beside the torch-npu of the installed torch, whose libraries of CANN and driver are not here."""
    torch = metadata.version("torch").partition("+")[0]
    python = environment_with(tmp_path_factory.mktemp("wheel") / "env", f"torch-npu=={torch}.*")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_DEVICE")}
    command = [python, "-c", "import torch"]
    plain = subprocess.run(command, env=inherited, capture_output=True, text=True, timeout=120, check=False)
    if plain.returncode == 0:
        pytest.skip("torch_npu loads here: this machine has CANN")
    assert "Failed to load the backend extension: torch_npu" in plain.stderr
    return lambda *words, **env: call(python, *words, **homes, **env)


def test_the_doctor_lives_beside_a_torch_npu_without_cann_and_shows_why_it_does_not_load(wheel) -> None:
    done = wheel("doctor", "--json", "--timeout", "240")
    report = json.loads(done.stdout)
    rows = {(b["name"], b["dist"]): b["status"] for b in report["backends"]}
    assert rows["fsdp2", "rlctl-plugin-fsdp"] == rows["megatron", "rlctl-plugin-megatron"] == "ok"
    checks = {c["name"]: c for c in report["checks"]}
    assert checks["torch"]["status"] == "ok"
    assert checks["device extensions"]["status"] == "fail"
    assert "ImportError: libhccl.so: cannot open shared object file" in checks["device extensions"]["found"]
    assert "set_env.sh" in checks["device extensions"]["next"]
    assert "libhccl.so" in checks["ascend-libraries"]["found"]
    assert "libascendcl.so" in checks["ascend-libraries"]["found"]
    assert checks["ascend-versions"]["status"] == "ok", "the wheel fits the installed torch"


def test_fsdp2_trains_on_the_cpu_beside_a_torch_npu_without_cann(wheel, tmp_path) -> None:
    run = tmp_path / "run"
    done = wheel("train", "quickstart", "--backend", "fsdp2", *SMALL, "--run-dir", str(run))
    assert done.returncode == 0, done.stderr[-3000:]
    assert manifest(run)["device"]["type"] == "cpu"
    assert [m["actor/grad_norm"] > 0 for m in steps(run)] == [True, True]


@WHOLE
def test_its_npu_is_refused_with_the_cause(wheel, tmp_path) -> None:
    arguments = ["train", "quickstart", "--backend", "fsdp2", *SMALL, "--run-dir", str(tmp_path / "run")]
    done = wheel(*arguments, RLCTL_DEVICE="npu")
    assert done.returncode == 1
    assert "error: this process has no npu device" in done.stderr
    assert "ImportError: libhccl.so: cannot open shared object file" in done.stderr
    assert "Traceback" not in done.stderr
