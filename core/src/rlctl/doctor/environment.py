"""Checks of the machine and of what the plugins share. Each is data; torch is only ever asked in a child."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlctl import catalogue, remedy
from rlctl.causes import AT, Cause
from rlctl.device import DEVICE_VARIABLE, VENDOR_VARIABLE, device_name
from rlctl.discovery import FIRST_PARTY_DISTS
from rlctl.doctor.report import BackendReport
from rlctl.evidence import axes_words, load_evidence
from rlctl.plugins import PluginEntry
from rlctl.probing import Outcome
from rlctl.records import BackendKind, CheckResult, CheckStatus
from rlctl.requirements import installed_version
from rlctl.vetting import outcome_causes

OK, WARN, FAIL, SKIP = CheckStatus.OK, CheckStatus.WARN, CheckStatus.FAIL, CheckStatus.SKIP
_GIB = 2**30
_OLDEST_PYTHON = (3, 11)

NAMES = (
    "python",
    "versions",
    "training backend",
    "rollout backend",
    "evidence",
    "torch",
    "device",
    "device extensions",
    "disk",
    "memory",
    "threads",
)
"""The names of all checks of this module, in their order."""


def run_checks(
    rows: Sequence[BackendReport],
    runtime: Outcome | None,
    timeout_s: float,
    quick: bool,
    plugins: Sequence[PluginEntry] = (),
) -> list[CheckResult]:
    """Every check.

    Args:
        rows: the backends as found.
        plugins: whose evidence is read.
        runtime: what a child said of torch; None when it was not asked.
    """
    return [
        check_python(),
        check_versions(),
        check_backend(rows, BackendKind.TRAIN, quick),
        check_backend(rows, BackendKind.ROLLOUT, quick),
        check_evidence(rows, plugins),
        check_torch(runtime, timeout_s),
        check_device(runtime),
        check_extensions(runtime),
        check_disk(Path.cwd()),
        check_memory(),
        check_threads(),
    ]


def check_python() -> CheckResult:
    """The interpreter is one that rlctl supports."""
    found = ".".join(str(n) for n in sys.version_info[:3])
    wanted = ".".join(str(n) for n in _OLDEST_PYTHON)
    good = sys.version_info >= _OLDEST_PYTHON
    return CheckResult("python", OK if good else FAIL, found, f">= {wanted}", "" if good else "install Python 3.12")


def check_versions() -> CheckResult:
    """All first-party dists carry one version: a mix was never tested together."""
    found = {name: v for name in sorted(FIRST_PARTY_DISTS) if (v := installed_version(name)) is not None}
    text = ", ".join(f"{n} {v}" for n, v in found.items()) or "none (rlctl runs from a source tree)"
    if len(set(found.values())) <= 1:
        return CheckResult("versions", OK, text, "one version")
    series = {".".join(v.split(".")[:2]) for v in found.values()}
    newest = max(found.values(), key=lambda v: [int(p) if p.isdigit() else 0 for p in v.split(".")])
    mend = "pip install " + " ".join(f"{n}=={newest}" for n in found)
    return CheckResult("versions", FAIL if len(series) > 1 else WARN, text, "one version", mend)


def check_backend(rows: Sequence[BackendReport], kind: BackendKind, quick: bool) -> CheckResult:
    """At least one backend of a kind is usable."""
    name = "training backend" if kind is BackendKind.TRAIN else "rollout backend"
    ours = [r for r in rows if r.kind == str(kind)]
    usable = [r.name for r in ours if r.status in (OK, WARN)]
    wanted = "at least one that is compatible" if quick else "at least one that loads"
    if usable:
        return CheckResult(name, OK, ", ".join(usable), wanted)
    if ours:
        return CheckResult(name, FAIL, f"{ours[0].name} does not load", wanted, ours[0].next)
    return CheckResult(name, FAIL, "none installed", wanted, "pip install rlctl-plugin-fsdp")


def check_evidence(rows: Sequence[BackendReport], plugins: Sequence[PluginEntry]) -> CheckResult:
    """What the backends of ``rows`` have proved against plain Hugging Face code, here and with these versions."""
    usable = {(r.kind == str(BackendKind.ROLLOUT), r.name) for r in rows if r.kind and r.status in (OK, WARN)}
    ours = [name for _, name in sorted(usable)]
    trained = [name for generates, name in sorted(usable) if not generates]
    wanted = "no comparison with one process that failed here"
    if not ours:
        return CheckResult("evidence", SKIP, "no backend to ask about", wanted)
    book = load_evidence(plugins)
    failed = [p.record for b in ours for p in book.failures(b)]
    if failed:
        lines = [
            f"{r.backend}, {axes_words(r.axes)}, {r.model_family}, {r.device}: {r.what} ({r.date})" for r in failed
        ]
        more = f"; and {len(lines) - 1} more" if len(lines) > 1 else ""
        axes = ",".join(f"{k}={v}" for k, v in failed[0].axes.items())
        mend = f"rlctl verify --backend {failed[0].backend}" + (f" --topology {axes}" if axes else "")
        return CheckResult("evidence", WARN, lines[0] + more, wanted, mend)
    found = "; ".join(f"{b}: {book.proved_words(b)}" for b in ours)
    mend = f"rlctl verify --backend {trained[0]} --all --nproc 2" if trained else ""
    return CheckResult("evidence", OK, found, wanted, mend or f"rlctl capabilities --backend {ours[0]}")


def check_torch(runtime: Outcome | None, timeout_s: float) -> CheckResult:
    """torch is installed and imports (the latter in a child, and not when the doctor is quick)."""
    version = installed_version("torch")
    wanted = "a torch that imports"
    if version is None:
        return CheckResult("torch", FAIL, "not installed", wanted, "pip install rlctl-plugin-fsdp")
    if runtime is None:
        return CheckResult("torch", OK, f"{version} (not imported)", wanted)
    causes = outcome_causes(runtime, timeout_s)
    if causes:
        # The first link says what happened, the last one what to mend; a hang or crash has frames in between.
        links = [c for c in causes if c.type != AT]
        found = f"{version} does not import: " + " <- ".join(dict.fromkeys((links[0].line, links[-1].line)))
        mend = remedy.for_library(causes) or "pip install --force-reinstall torch"
        if runtime.timed_out:
            mend = f"rlctl doctor torch --timeout {int(max(timeout_s * 4, 60))}"
        return CheckResult("torch", FAIL, found, wanted, mend)
    assert runtime.result is not None
    facts = runtime.result
    build = (
        f"CUDA {facts['cuda_build']}"
        if facts["cuda_build"]
        else f"ROCm {facts['hip_build']}"
        if facts["hip_build"]
        else "CPU"
    )
    return CheckResult("torch", OK, f"{facts['torch']} ({build} build, {facts['threads']} threads)", wanted)


def check_device(runtime: Outcome | None) -> CheckResult:
    """The device that a run would take, and whether the machine has one that torch does not see."""
    forced = [f"{v}={os.environ[v]}" for v in (DEVICE_VARIABLE, VENDOR_VARIABLE) if os.environ.get(v)]
    note = f" ({', '.join(forced)} overrides it)" if forced else ""
    known = sorted({device for entry in catalogue.entries() for device, _ in entry.spec.devices})
    if (named := os.environ.get(DEVICE_VARIABLE)) and named not in known:
        found = f"{DEVICE_VARIABLE}={named}, on which no backend that is known runs"
        return CheckResult("device", WARN, found, f"one of {', '.join(known)}", f"unset {DEVICE_VARIABLE}")
    files = {"cuda": list(Path("/dev").glob("nvidia[0-9]*")), "npu": list(Path("/dev").glob("davinci[0-9]*"))}
    present = [f"{len(f)} {kind} device files" for kind, f in files.items() if f]
    if runtime is None or runtime.result is None or "error" in runtime.result:
        found = ", ".join(present) or f"cpu: {device_name('cpu')}"
        return CheckResult(
            "device", OK if runtime is None else SKIP, found + note, "a device that torch sees (it was not asked)"
        )
    devices: dict[str, list[str]] = runtime.result["devices"]
    unseen = [kind for kind, f in files.items() if f and kind not in devices]
    if unseen:
        kind = unseen[0]
        build = "a CUDA build of torch and a driver that it supports" if kind == "cuda" else "torch_npu and CANN"
        mend = "nvidia-smi" if kind == "cuda" else "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
        if kind == "cuda" and not runtime.result["cuda_build"]:
            mend = "pip install --force-reinstall torch (the build without +cpu)"
        found = f"{len(files[kind])} {kind} device files, but torch {runtime.result['torch']} sees no device"
        return CheckResult("device", WARN, found + note, build, mend)
    if devices:
        text = "; ".join(f"{kind}: {len(names)} x {names[0]}" for kind, names in devices.items())
        return CheckResult("device", OK, text + note, "a device that torch sees")
    return CheckResult("device", OK, f"cpu: {device_name('cpu')}{note}", "a device that torch sees")


def check_extensions(runtime: Outcome | None) -> CheckResult:
    """Device extensions that torch loads by itself: one that is broken makes every plain ``import torch`` fail."""
    name, wanted = "device extensions", "every one loads, or none is installed"
    if runtime is None or runtime.result is None or "error" in runtime.result:
        return CheckResult(name, SKIP, "torch was not asked", wanted)
    found: dict[str, dict] = runtime.result["extensions"]
    for extension, outcome in found.items():
        if "error" not in outcome:
            continue
        causes = [Cause(**c) for c in outcome["error"]]
        mend = remedy.for_library(causes)
        text = f"{extension} is installed but does not load: " + " <- ".join(c.line for c in causes)
        off = "export TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        return CheckResult(name, FAIL, text, wanted, f"{mend}, or {off}" if mend else off)
    return CheckResult(name, OK, ", ".join(found) or "none installed", wanted)


def check_disk(place: Path, warn_gib: float = 10.0, fail_gib: float = 1.0) -> CheckResult:
    """Room for runs below ``place``, and the right to write there."""
    wanted = f"a writable directory with {warn_gib:g} GiB free"
    if not os.access(place, os.W_OK):
        return CheckResult(
            "disk", FAIL, f"{place} is not writable", wanted, "cd to a directory of your own, or use --run-dir"
        )
    free = shutil.disk_usage(place).free / _GIB
    status = FAIL if free < fail_gib else WARN if free < warn_gib else OK
    mend = "" if status is OK else "free space, or use --run-dir on another disk"
    return CheckResult("disk", status, f"{free:.1f} GiB free in {place}", wanted, mend)


def check_memory(warn_gib: float = 3.0, fail_gib: float = 0.75) -> CheckResult:
    """Memory that this process may still take: the machine's, or what its control group leaves."""
    available = available_memory()
    if available is None:
        return CheckResult("memory", SKIP, "this system does not say", f"{warn_gib:g} GiB available")
    free = available / _GIB
    status = FAIL if free < fail_gib else WARN if free < warn_gib else OK
    mend = "" if status is OK else "end other programs, or train a smaller model"
    return CheckResult("memory", status, f"{free:.1f} GiB available", f"{warn_gib:g} GiB available", mend)


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes; None where neither /proc nor a control group tells."""
    limits: list[int] = []
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    except OSError:
        pass  # not Linux
    group = root / "sys/fs/cgroup"
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            limits.append(int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no control group of this version
    return max(0, min(limits)) if limits else None


def check_threads() -> CheckResult:
    """CPU threads that a run would use, against the CPUs that it may use."""
    cpus = usable_cpus()
    asked = os.environ.get("OMP_NUM_THREADS")
    wanted = f"at most {cpus} threads"
    if asked is None:
        return CheckResult("threads", OK, f"{cpus} CPUs", wanted)
    found = f"OMP_NUM_THREADS={asked} on {cpus} CPUs"
    if not asked.split(",")[0].isdigit() or int(asked.split(",")[0]) < 1:
        return CheckResult("threads", FAIL, found, wanted, "unset OMP_NUM_THREADS")
    if int(asked.split(",")[0]) > cpus:
        return CheckResult("threads", WARN, found, wanted, f"export OMP_NUM_THREADS={cpus}")
    return CheckResult("threads", OK, found, wanted)


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs of this process's affinity, no more than its control group's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # no control group of this version
    return count
