"""Checks of ``rlctl doctor``. They import neither torch nor megatron-core."""

from __future__ import annotations

from rlctl.records import CheckResult, CheckStatus
from rlctl_megatron import versions
from rlctl_megatron.standins import STAND_INS


def check_version() -> CheckResult:
    """The installed megatron-core against the one that was proved."""
    found = versions.installed()
    if found is None:
        return CheckResult(
            "megatron-core", CheckStatus.SKIP, "not installed", versions.PROVED, "pip install rlctl-plugin-megatron"
        )
    if versions.is_proved(found):
        return CheckResult("megatron-core", CheckStatus.OK, f"{found}, which the tests ran with")
    if versions.is_legacy(found):
        return CheckResult(
            "megatron-core", CheckStatus.OK, f"{found}, which the tests run on a CPU and MindSpeed patches"
        )
    return CheckResult(
        "megatron-core",
        CheckStatus.WARN,
        f"{found}, with which nothing was proved",
        f"{versions.PROVED}",
        f"rlctl verify --backend megatron, or pip install megatron-core=={versions.PROVED}",
    )


def check_stand_ins() -> CheckResult:
    """What replaces CUDA on a CPU, each by name; nothing of it is applied on a GPU."""
    version = versions.installed()
    if version is None:
        return CheckResult("megatron-stand-ins", CheckStatus.SKIP, "megatron-core is not installed")
    names = [s.name for s in STAND_INS if s.applies_to(version)]
    return CheckResult("megatron-stand-ins", CheckStatus.OK, f"on cpu only: {', '.join(names)}; see docs/megatron.md")
