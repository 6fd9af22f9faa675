"""Checks of ``rlctl doctor`` for Ascend. They import neither torch nor torch_npu: a broken one could end the process.

Where nothing points at Ascend (no device, no package, no toolkit) every check is passed over.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rlctl.device import in_sight
from rlctl.records import CheckResult, CheckStatus
from rlctl.requirements import installed_version
from rlctl_mindspeed import tables

OK, WARN, FAIL, SKIP = CheckStatus.OK, CheckStatus.WARN, CheckStatus.FAIL, CheckStatus.SKIP
PACKAGES = ("torch-npu", "mindspeed", "vllm-ascend", "ascend-cann-toolkit")
_NOTHING = "nothing here points at Ascend"
_ROOTS = ("usr/local/Ascend", "root/Ascend", "opt/Ascend")
_SCRIPTS = ("ascend-toolkit/set_env.sh", "cann/set_env.sh")
_HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_TORCHS = re.compile(r"lib(torch\w*|c10\w*|gomp[-\w]*)\.so")
"""Libraries that torch has loaded by the time an extension is: for ldd they are missing, and they are not."""


def ascend_in_sight(root: Path = Path("/")) -> bool:
    """A device, a package or a toolkit of Ascend's is here."""
    return (
        in_sight("npu")
        or any(installed_version(name) is not None for name in PACKAGES)
        or any(os.environ.get(name) for name in _HOMES)
        or any((root / place).is_dir() for place in _ROOTS)
    )


def check_libraries(root: Path = Path("/")) -> CheckResult:
    """What the loader does not find of torch_npu's libraries, and the script that puts it on the path."""
    name, wanted = "ascend-libraries", "every library that torch_npu is linked with"
    if not ascend_in_sight(root):
        return CheckResult(name, SKIP, _NOTHING)
    script = find_script(root)
    mend = f"source {script}" if script else f"{tables.CANN_ROUTE}; then source .../ascend-toolkit/set_env.sh"
    package = importlib.util.find_spec("torch_npu")
    if package is None or not package.submodule_search_locations:
        return CheckResult(
            name, WARN, "torch_npu is not installed", wanted, "pip install torch-npu, of torch's release"
        )
    missing = missing_libraries(Path(next(iter(package.submodule_search_locations))))
    if missing is None:
        return CheckResult(name, SKIP, "ldd is not here to ask", wanted)
    if missing:
        found = f"torch_npu {installed_version('torch-npu')}: the loader finds no " + ", ".join(missing)
        return CheckResult(name, FAIL, found, wanted, mend)
    return CheckResult(name, OK, f"torch_npu {installed_version('torch-npu')}", wanted)


def missing_libraries(package: Path) -> tuple[str, ...] | None:
    """Names that ldd does not find for the compiled modules of a package; None without ldd."""
    ldd = shutil.which("ldd")
    if ldd is None:
        return None
    files = [*package.glob("_C*.so"), *package.glob("lib/lib*torch_npu*.so")]
    missing: set[str] = set()
    for file in files:
        done = subprocess.run([ldd, str(file)], capture_output=True, text=True, timeout=30, check=False)
        missing |= set(re.findall(r"^\s*(\S+) => not found", done.stdout, re.MULTILINE))
    return tuple(sorted(m for m in missing if not _TORCHS.match(m)))


def find_script(root: Path = Path("/")) -> Path | None:
    """CANN's environment script, where it usually lies."""
    homes = [Path(os.environ[n]) for n in _HOMES if os.environ.get(n)]
    places = [p / "set_env.sh" for home in homes for p in (home, home.parent)]
    places += [root / place / script for place in _ROOTS for script in _SCRIPTS]
    return next((p for p in places if p.is_file()), None)


def check_packages(root: Path = Path("/")) -> CheckResult:
    """MindSpeed is the vendor's, and no placeholder of the index is in its place."""
    name, wanted = "ascend-packages", "MindSpeed from its source"
    if not ascend_in_sight(root):
        return CheckResult(name, SKIP, _NOTHING)
    for dist, (release, route) in tables.PLACEHOLDERS.items():
        if installed_version(dist) == release:
            found = f"{dist} {release} is PyPI's placeholder of that name, and holds nothing"
            return CheckResult(name, FAIL, found, wanted, f"pip uninstall -y {dist}; {route}")
    found = installed_version("mindspeed")
    if found is None:
        what = "mindspeed is not installed, and PyPI has a placeholder under that name, whose setup raises ValueError"
        return CheckResult(name, WARN, what, wanted, tables.MINDSPEED_ROUTE)
    return CheckResult(name, OK, f"mindspeed {found}", wanted)


def check_versions(root: Path = Path("/")) -> CheckResult:
    """torch, torch_npu, CANN, MindSpeed and megatron-core belong together."""
    name, wanted = "ascend-versions", f"releases that belong together ({tables.TABLE_SOURCE})"
    if not ascend_in_sight(root):
        return CheckResult(name, SKIP, _NOTHING)
    torch, torch_npu, cann = installed_version("torch"), installed_version("torch-npu"), cann_version(root)
    speed, core = installed_version("mindspeed"), installed_version("megatron-core")
    parts = {"torch": torch, "torch_npu": torch_npu, "CANN": cann, "mindspeed": speed, "megatron-core": core}
    found = ", ".join(f"{k} {v or 'not found'}" for k, v in parts.items())
    for problem, mend in _mismatches(torch, torch_npu, cann, speed, core):
        return CheckResult(name, FAIL, f"{problem} ({found})", wanted, mend)
    return CheckResult(name, OK, found, wanted)


def _mismatches(
    torch: str | None, torch_npu: str | None, cann: str | None, speed: str | None, core: str | None
) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    if torch and torch_npu:
        want = ".".join(re.findall(r"\d+", torch_npu)[:3])
        need = Requirement(f"torch=={want}.*")
        if not need.specifier.contains(torch.partition("+")[0], prereleases=True):
            ours = ".".join(torch.partition("+")[0].split(".")[:3])
            out.append((f"torch_npu {torch_npu} is for torch {want}", f"pip install torch-npu=={ours}"))
    made_for = tables.CANN_OF.get((torch_npu or "").partition("+")[0])
    if cann and made_for and cann.upper() not in {m.upper() for m in made_for}:
        mend = f"install CANN {made_for[-1]}, or the torch-npu that fits CANN {cann}"
        out.append((f"torch_npu {torch_npu} was made for CANN {' or '.join(made_for)}", mend))
    need = tables.MINDSPEED_CORE.get(".".join((speed or "").split(".")[:2]))
    if need and core and not SpecifierSet(need).contains(core, prereleases=True):
        out.append((f"mindspeed {speed} patches megatron-core {need}", f"pip install 'megatron-core{need}'"))
    return out


def cann_version(root: Path = Path("/")) -> str | None:
    """The release of the installed toolkit, from the file that its installer leaves."""
    homes = [Path(os.environ[n]) for n in _HOMES if os.environ.get(n)]
    homes += [root / place / "ascend-toolkit/latest" for place in _ROOTS] + [root / p / "cann" for p in _ROOTS]
    for home in homes:
        for file in [*home.glob("*/ascend_toolkit_install.info"), *home.glob("*/ascend_cann_install.info")]:
            match = re.search(r"^version\s*=\s*(\S+)", file.read_text(errors="replace"), re.MULTILINE)
            if match:
                return match[1]
    return None


def check_hccl(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> CheckResult:
    """HCCL's variables: what is set, and what it would not take."""
    name, wanted = "ascend-hccl", "variables that HCCL takes"
    if not ascend_in_sight(root):
        return CheckResult(name, SKIP, _NOTHING)
    env = os.environ if environ is None else environ
    given = {k: v for k, v in sorted(env.items()) if k.startswith("HCCL_") or k == "ASCEND_RT_VISIBLE_DEVICES"}
    for key, value in given.items():
        refusal = _HCCL[key](value) if key in _HCCL else ""
        if refusal:
            return CheckResult(name, FAIL, f"{key}={value}: {refusal}", wanted, f"unset {key}, or {_HCCL_EXAMPLE[key]}")
    return CheckResult(name, OK, ", ".join(f"{k}={v}" for k, v in given.items()) or "none is set", wanted)


def _between(low: int, high: int) -> Callable[[str], str]:
    def check(value: str) -> str:
        good = value.isdigit() and low <= int(value) <= high
        return "" if good else f"a whole number from {low} to {high} is wanted"

    return check


def _interface(value: str) -> str:
    names = [part for part in value.lstrip("^=").split(",") if part]
    there = [n for _, n in socket.if_nameindex()]
    if value.startswith("^") or any(n == t or t.startswith(n) for n in names for t in there):
        return ""
    return f"this machine has no such interface, but {', '.join(there)}"


def _address(value: str) -> str:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return "an IP address is wanted"
    return ""


def _numbers(value: str) -> str:
    return "" if re.fullmatch(r"\d+(,\d+)*", value) else "numbers of devices are wanted, joined by commas"


_HCCL: Mapping[str, Callable[[str], str]] = {
    "HCCL_CONNECT_TIMEOUT": _between(120, 7200),
    "HCCL_IF_BASE_PORT": _between(1024, 65520),
    "HCCL_IF_IP": _address,
    "HCCL_SOCKET_IFNAME": _interface,
    "ASCEND_RT_VISIBLE_DEVICES": _numbers,
}
_HCCL_EXAMPLE: Mapping[str, str] = {
    "HCCL_CONNECT_TIMEOUT": "export HCCL_CONNECT_TIMEOUT=600",
    "HCCL_IF_BASE_PORT": "export HCCL_IF_BASE_PORT=50000",
    "HCCL_IF_IP": "export HCCL_IF_IP= to this host's address",
    "HCCL_SOCKET_IFNAME": "export HCCL_SOCKET_IFNAME= to an interface of this host",
    "ASCEND_RT_VISIBLE_DEVICES": "export ASCEND_RT_VISIBLE_DEVICES=0,1",
}


def check_npu_smi(root: Path = Path("/")) -> CheckResult:
    """The driver answers."""
    name, wanted = "npu-smi", "a driver that lists NPUs"
    if not ascend_in_sight(root):
        return CheckResult(name, SKIP, _NOTHING)
    tool = shutil.which("npu-smi") or shutil.which("npu-smi", path=str(root / "usr/local/sbin"))
    mend = "install the driver and firmware of this NPU (https://www.hiascend.com/hardware/firmware-drivers)"
    if tool is None:
        return CheckResult(name, WARN, "npu-smi is not installed, so this machine has no driver", wanted, mend)
    try:
        done = subprocess.run([tool, "info", "-l"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return CheckResult(name, FAIL, f"{tool} info -l: {error}", wanted, mend)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    said = lines[-1] if lines else "it says nothing"
    count = re.search(r"Total Count\s*:\s*(\d+)", done.stdout)
    if done.returncode or count is None or not int(count[1]):
        return CheckResult(name, FAIL, f"npu-smi info -l (exit code {done.returncode}): {said}", wanted, mend)
    return CheckResult(name, OK, f"{count[1]} NPUs", wanted)


CHECKS: Mapping[str, Callable[[], CheckResult]] = {
    "ascend-libraries": check_libraries,
    "ascend-packages": check_packages,
    "ascend-versions": check_versions,
    "ascend-hccl": check_hccl,
    "npu-smi": check_npu_smi,
}
"""By name, as the light module lists them."""
