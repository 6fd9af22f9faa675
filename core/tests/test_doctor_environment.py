"""The machine's checks, each with a fault of its own."""

from __future__ import annotations

import sys

import pytest

from rlctl.doctor import environment
from rlctl.doctor.report import BackendReport, DoctorReport
from rlctl.plugins import Stage
from rlctl.probing import Outcome
from rlctl.records import BackendKind, CheckResult, CheckStatus

OK, WARN, FAIL, SKIP = CheckStatus.OK, CheckStatus.WARN, CheckStatus.FAIL, CheckStatus.SKIP
GIB = 2**30


def outcome(result=None, **more) -> Outcome:
    fields = {
        "died": "",
        "timed_out": False,
        "step": "importing torch",
        "trace": (),
        "stdout": "",
        "stderr": "",
        **more,
    }
    return Outcome(result=result, seconds=1.0, **fields)


def facts(**more):
    base = {"torch": "2.13.0+cpu", "cuda_build": None, "hip_build": None, "threads": 2, "devices": {}, "extensions": {}}
    return outcome({**base, **more})


def row(name: str, kind: str, status: CheckStatus, mend: str = "") -> BackendReport:
    return BackendReport(name, kind, name, f"rlctl-{name}", "1.0", Stage.REGISTERED, status, (), mend)


def test_python(monkeypatch):
    assert environment.check_python().status is OK
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    old = environment.check_python()
    assert (old.status, old.found, old.wanted) == (FAIL, "3.10.4", ">= 3.11")


@pytest.mark.parametrize(
    ("versions", "status", "mend"),
    [
        ({"rlctl": "0.1.0", "rlctl-core": "0.1.0"}, OK, ""),
        ({}, OK, ""),
        ({"rlctl": "0.1.0", "rlctl-core": "0.1.10"}, WARN, "pip install rlctl==0.1.10 rlctl-core==0.1.10"),
        ({"rlctl": "0.2.0", "rlctl-core": "0.1.0"}, FAIL, "pip install rlctl==0.2.0 rlctl-core==0.2.0"),
    ],
)
def test_versions_of_first_party_dists(monkeypatch, versions, status, mend):
    monkeypatch.setattr(environment, "installed_version", versions.get)
    found = environment.check_versions()
    assert (found.status, found.next) == (status, mend)


def test_backends_of_a_kind():
    good, bad = row("a", "train", OK), row("b", "train", FAIL, "mend b")
    assert environment.check_backend([bad, good], BackendKind.TRAIN, False).found == "a"
    broken = environment.check_backend([bad], BackendKind.TRAIN, False)
    assert (broken.status, broken.next) == (FAIL, "mend b")
    none = environment.check_backend([good], BackendKind.ROLLOUT, True)
    assert (none.name, none.status, none.next) == ("rollout backend", FAIL, "pip install rlctl-plugin-fsdp")


def test_torch(monkeypatch):
    monkeypatch.setattr(environment, "installed_version", lambda name: "2.13.0")
    assert "not imported" in environment.check_torch(None, 9).found
    assert environment.check_torch(facts(), 9).found == "2.13.0+cpu (CPU build, 2 threads)"
    assert "CUDA 13.0 build" in environment.check_torch(facts(cuda_build="13.0"), 9).found
    links = [
        {"type": "RuntimeError", "message": "Failed to load", "where": "", "module": None},
        {"type": "ImportError", "message": "libcuda.so.1: cannot open", "where": "", "module": None},
    ]
    broken = environment.check_torch(outcome({"error": links, "next": None, "step": "importing torch"}), 9)
    assert broken.status is FAIL
    assert "RuntimeError: Failed to load" in broken.found
    assert "ImportError: libcuda.so.1" in broken.found
    assert "NVIDIA driver" in broken.next
    slow = environment.check_torch(outcome(timed_out=True, trace=("torch/x.py:1 in y",)), 9)
    assert "no end after 9 s" in slow.found
    assert slow.next == "rlctl doctor torch --timeout 60"
    dead = environment.check_torch(outcome(died="killed by SIGILL"), 9)
    assert "killed by SIGILL" in dead.found
    assert dead.next == "pip install --force-reinstall torch"
    monkeypatch.setattr(environment, "installed_version", lambda name: None)
    gone = environment.check_torch(None, 9)
    assert (gone.status, gone.found, gone.next) == (FAIL, "not installed", "pip install rlctl-plugin-fsdp")


def test_device_names_what_torch_sees_and_what_overrides_it(monkeypatch):
    monkeypatch.delenv("RLCTL_DEVICE", raising=False)
    two = environment.check_device(facts(devices={"cuda": ["H200", "H200"]}))
    assert (two.status, two.found) == (OK, "cuda: 2 x H200")
    monkeypatch.setenv("RLCTL_DEVICE", "cpu")
    assert "RLCTL_DEVICE=cpu overrides it" in environment.check_device(facts(devices={"cuda": ["H200"]})).found
    assert environment.check_device(outcome(died="killed by SIGSEGV")).status is SKIP


def test_a_device_that_torch_does_not_see_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    real = environment.Path
    monkeypatch.setattr(environment, "Path", lambda p: tmp_path if p == "/dev" else real(p))
    found = environment.check_device(facts())
    assert found.status is WARN
    assert "1 cuda device files, but torch 2.13.0+cpu sees no device" in found.found
    assert "pip install" in found.next
    assert environment.check_device(facts(cuda_build="13.0")).next == "nvidia-smi"


def test_a_broken_device_extension_is_found_with_its_chain():
    error = [{"type": "ImportError", "message": "libhccl.so: cannot open", "where": "", "module": None}]
    found = environment.check_extensions(facts(extensions={"torch_npu": {"error": error, "next": None, "step": ""}}))
    assert found.status is FAIL
    assert "torch_npu is installed but does not load: ImportError: libhccl.so" in found.found
    assert "set_env.sh" in found.next
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found.next
    assert environment.check_extensions(facts(extensions={"good": {"ok": True}})).found == "good"


def test_disk(tmp_path):
    assert environment.check_disk(tmp_path, 0.0, 0.0).status is OK
    assert environment.check_disk(tmp_path, 1e9, 0.0).status is WARN
    full = environment.check_disk(tmp_path, 1e9, 1e9)
    assert full.status is FAIL
    assert "--run-dir" in full.next


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(environment.os, "access", lambda path, mode: False)
    assert "is not writable" in environment.check_disk(tmp_path).found


def test_memory_is_the_smaller_of_machine_and_control_group(tmp_path, monkeypatch):
    assert environment.available_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  8388608 kB\n")
    assert environment.available_memory(tmp_path) == 8 * GIB
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert environment.available_memory(tmp_path) == 8 * GIB
    (group / "memory.max").write_text(f"{4 * GIB}\n")
    (group / "memory.current").write_text(f"{3 * GIB}\n")
    assert environment.available_memory(tmp_path) == GIB
    for free, status in ((0.5, FAIL), (2.0, WARN), (16.0, OK)):
        monkeypatch.setattr(environment, "available_memory", lambda free=free: int(free * GIB))
        assert environment.check_memory().status is status
    monkeypatch.setattr(environment, "available_memory", lambda: None)
    assert environment.check_memory().status is SKIP


def test_threads(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "usable_cpus", lambda: 2)
    for asked, status, mend in (
        (None, OK, ""),
        ("2", OK, ""),
        ("2,1", OK, ""),
        ("16", WARN, "export OMP_NUM_THREADS=2"),
        ("many", FAIL, "unset OMP_NUM_THREADS"),
        ("0", FAIL, "unset OMP_NUM_THREADS"),
    ):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if asked is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", asked)
        found = environment.check_threads()
        assert (found.status, found.next) == (status, mend), asked


def test_a_cpu_quota_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert environment.usable_cpus(tmp_path) == 8
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("150000 50000\n")
    assert environment.usable_cpus(tmp_path) == 3
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    assert environment.usable_cpus(tmp_path) == 8


def test_names_are_those_of_the_checks():
    results = environment.run_checks([], facts(), 9, False)
    assert tuple(c.name for c in results) == environment.NAMES


@pytest.mark.parametrize(("status", "plain", "strict"), [(OK, 0, 0), (SKIP, 0, 0), (WARN, 0, 1), (FAIL, 1, 1)])
def test_exit_codes(status, plain, strict):
    for report in (
        DoctorReport((row("a", "train", status),), ()),
        DoctorReport((), (CheckResult("c", status),)),
    ):
        assert (report.exit_code(), report.exit_code(strict=True)) == (plain, strict)


def test_a_device_that_nobody_knows_is_no_good_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_DEVICE", "banana")
    for runtime in (None, facts(devices={})):
        check = environment.check_device(runtime)
        assert check.status == "warn"
        assert "RLCTL_DEVICE=banana" in check.found
        assert check.wanted == "one of cpu, cuda, npu"
        assert check.next == "unset RLCTL_DEVICE"
