"""The doctor on Ascend's troubles: each on a made-up machine, with what was found and what mends it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from mindspeed_doubles import write_metadata

from rlctl.records import CheckResult, CheckStatus
from rlctl_mindspeed import checks, tables

OK, WARN, FAIL, SKIP = CheckStatus.OK, CheckStatus.WARN, CheckStatus.FAIL, CheckStatus.SKIP
ALL: list[Callable[..., CheckResult]] = list(checks.CHECKS.values())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing of Ascend's on it: its root directory. The loader's path and packages are its own too."""
    for name in (*checks._HOMES, "RLCTL_DEVICE", *[k for k in os.environ if k.startswith("HCCL_")]):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(checks, "in_sight", lambda kind: False)
    PACKAGES.clear()
    install(torch="2.13.0+cpu", megatron_core="0.16.1")
    monkeypatch.setattr(checks, "installed_version", PACKAGES.get)
    return tmp_path


CALLS: dict[str, Callable[..., CheckResult]] = dict(checks.CHECKS)
PACKAGES: dict[str, str] = {}
"""Distributions of the made-up machine, with their versions."""


def install(**packages: str) -> None:
    PACKAGES.update({k.replace("_", "-"): v for k, v in packages.items()})


@pytest.fixture
def cann(machine: Path) -> Path:
    """A toolkit of CANN 8.5.0 where it usually lies."""
    home = machine / "usr/local/Ascend/ascend-toolkit"
    (home / "latest/x86_64-linux").mkdir(parents=True)
    (home / "latest/x86_64-linux/ascend_toolkit_install.info").write_text(
        "package_name=Ascend-cann-toolkit\nversion=8.5.0\n"
    )
    (home / "set_env.sh").write_text("")
    return home  # fmt: skip


@pytest.mark.parametrize("check", ALL)
def test_where_nothing_points_at_ascend_all_are_passed_over(machine, check) -> None:
    assert not checks.ascend_in_sight(machine)
    assert check(machine).status is SKIP


@pytest.mark.parametrize("sign", ["device", "package", "toolkit", "variable"])
def test_any_sign_of_ascend_wakes_them(machine, monkeypatch, sign) -> None:
    if sign == "device":
        monkeypatch.setattr(checks, "in_sight", lambda kind: kind == "npu")
    elif sign == "package":
        install(torch_npu="2.13.0")
    elif sign == "toolkit":
        (machine / "usr/local/Ascend").mkdir(parents=True)
    else:
        monkeypatch.setenv("ASCEND_HOME_PATH", "/somewhere")
    assert checks.ascend_in_sight(machine)
    assert check_names(machine)["ascend-hccl"] is OK


def check_names(machine: Path) -> dict[str, CheckStatus]:
    return {name: run(machine).status for name, run in CALLS.items()}


# ---- libraries --------------------------------------------------------------------------------------------------------------
@pytest.fixture
def linked(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package torch_npu with a compiled module, and an ldd that lists what it is linked with."""
    package = machine / "site/torch_npu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_C.cpython-311-x86_64-linux-gnu.so").write_text("")
    tools = machine / "bin"
    tools.mkdir()
    (tools / "ldd").write_text(
        "#!/bin/sh\ncat <<X\n\tlibtorch_cpu.so => not found\n\tlibc10.so => not found\n\tlibhccl.so => not found\n"
        "\tlibascendcl.so => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x0)\nX\n"
    )
    (tools / "ldd").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.syspath_prepend(str(package.parent))
    install(torch_npu="2.13.0")
    return package


def test_libraries_that_the_loader_misses_are_named_and_torchs_own_are_not(machine, linked) -> None:
    found = checks.check_libraries(machine)
    assert found.status is FAIL
    assert found.found == "torch_npu 2.13.0: the loader finds no libascendcl.so, libhccl.so"
    assert found.next.startswith("install the CANN toolkit")


def test_where_the_toolkit_is_there_its_script_is_the_remedy(machine, linked, cann) -> None:
    assert checks.check_libraries(machine).next == f"source {cann / 'set_env.sh'}"


def test_the_script_is_found_through_the_variable(machine, linked, cann, monkeypatch) -> None:
    elsewhere = machine / "data/ascend-toolkit"
    elsewhere.mkdir(parents=True)
    (elsewhere / "set_env.sh").write_text("")
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(elsewhere / "latest"))
    assert checks.find_script(machine) == elsewhere / "set_env.sh"


def test_a_package_whose_libraries_are_found_is_well(machine, linked, monkeypatch) -> None:
    (machine / "bin/ldd").write_text("#!/bin/sh\necho '\tlibhccl.so => /usr/local/Ascend/libhccl.so (0x0)'\n")
    assert checks.check_libraries(machine).status is OK
    monkeypatch.setattr(checks.shutil, "which", lambda *_, **__: None)
    assert checks.check_libraries(machine).status is SKIP


# ---- packages and versions --------------------------------------------------------------------------------------------------
def test_the_placeholder_of_the_index_is_called_one(machine) -> None:
    install(mindspeed="0.0.1.dev1")
    found = checks.check_packages(machine)
    assert found.status is FAIL
    assert "placeholder" in found.found
    assert found.next == f"pip uninstall -y mindspeed; {tables.MINDSPEED_ROUTE}"
    install(mindspeed="0.12.1")
    assert checks.check_packages(machine).status is OK
    install(ascend_cann_toolkit="0.0.1.dev1")
    assert "https://www.hiascend.com/cann" in checks.check_packages(machine).next


def test_without_mindspeed_the_vendors_route_is_given_and_the_placeholder_named(machine) -> None:
    install(torch_npu="2.13.0")
    found = checks.check_packages(machine)
    assert found.status is WARN
    assert "ValueError" in found.found
    assert found.next.startswith("git clone -b core_r0.12.1 https://gitcode.com/Ascend/MindSpeed.git")


@pytest.mark.parametrize(
    ("packages", "status", "found", "mend"),
    [
        ({"torch_npu": "2.13.0"}, OK, "CANN 8.5.0", ""),
        ({"torch_npu": "2.12.0.post3"}, FAIL, "torch_npu 2.12.0.post3 is for torch 2.12.0", "pip install torch-npu==2.13.0"),
        ({"torch": "2.8.0", "torch_npu": "2.8.0"}, FAIL, "was made for CANN 8.3.RC1", "install CANN 8.3.RC1, or"),
        ({"torch": "2.8.0", "torch_npu": "2.8.0.post2"}, OK, "", ""),
        ({"torch": "2.7.1+cpu", "torch_npu": "2.7.1.post4"}, FAIL, "was made for CANN 9.0.0", "install CANN 9.0.0, or"),
        ({"torch_npu": "2.13.0", "mindspeed": "0.12.1"}, FAIL, "patches megatron-core >=0.12.1,<0.13", "pip install 'megatron-core"),
        ({"torch_npu": "2.13.0", "mindspeed": "0.12.1", "megatron_core": "0.12.1"}, OK, "megatron-core 0.12.1", ""),
    ],
)  # fmt: skip
def test_versions_that_do_not_belong_together_are_named(machine, cann, packages, status, found, mend) -> None:
    install(**packages)
    result = checks.check_versions(machine)
    assert result.status is status, result
    assert found in result.found
    assert result.next.startswith(mend)
    assert tables.TABLE_SOURCE in result.wanted


def test_the_table_names_its_source_and_is_readable() -> None:
    from packaging.version import Version

    assert "torch_npu 2.13.0" in tables.TABLE_SOURCE
    for release, cann in tables.CANN_OF.items():
        assert len(Version(release).release) == 3
        assert cann


# ---- HCCL and the driver ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("HCCL_CONNECT_TIMEOUT", "60", "600"),
        ("HCCL_CONNECT_TIMEOUT", "soon", "7200"),
        ("HCCL_IF_BASE_PORT", "80", "50000"),
        ("HCCL_IF_IP", "host1", "10.0.0.1"),
        ("HCCL_SOCKET_IFNAME", "nosuch0", "lo"),
        ("HCCL_SOCKET_IFNAME", "=nosuch0", "^docker"),
        ("ASCEND_RT_VISIBLE_DEVICES", "all", "0,1"),
    ],
)
def test_variables_that_hccl_would_not_take_are_refused(machine, cann, name, bad, good) -> None:
    found = checks.check_hccl(machine, {name: bad})
    assert found.status is FAIL
    assert found.found.startswith(f"{name}={bad}: ")
    assert found.next.startswith(f"unset {name}, or export {name}=")
    assert checks.check_hccl(machine, {name: good}) == CheckResult(
        "ascend-hccl", OK, f"{name}={good}", "variables that HCCL takes"
    )


@pytest.mark.parametrize(
    ("script", "status", "found"),
    [
        ("echo 'Total Count : 8'", OK, "8 NPUs"),
        ("echo 'Total Count : 0'", FAIL, "Total Count : 0"),
        ("echo 'dcmi module initialize failed. ret is -8005' >&2; exit 1", FAIL, "(exit code 1): dcmi module initialize failed"),
    ],
)  # fmt: skip
def test_the_drivers_answer(machine, cann, monkeypatch, script, status, found) -> None:
    tools = machine / "tools"
    tools.mkdir()
    (tools / "npu-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tools / "npu-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    result = checks.check_npu_smi(machine)
    assert result.status is status
    assert found in result.found


def test_no_driver_at_all_is_said(machine, cann) -> None:
    if subprocess.run(["which", "npu-smi"], capture_output=True, check=False).returncode == 0:
        pytest.skip("this machine has one")
    assert checks.check_npu_smi(machine).status is WARN


def test_metadata_of_doubles_is_readable(tmp_path, monkeypatch) -> None:
    from importlib import metadata

    write_metadata(tmp_path, "torch_npu", "2.13.0+double", "[torch.backends]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert metadata.version("torch-npu") == "2.13.0+double"
