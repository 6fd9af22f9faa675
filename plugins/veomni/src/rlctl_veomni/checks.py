"""Checks of ``rlctl doctor``. They import neither torch nor veomni."""

from __future__ import annotations

from rlctl.records import CheckResult, CheckStatus
from rlctl_veomni import versions
from rlctl_veomni.standins import STAND_INS


def check_version() -> CheckResult:
    """The installed veomni against the one that was proved."""
    found = versions.installed()
    if found is None:
        return CheckResult(
            "veomni", CheckStatus.SKIP, "not installed", versions.PROVED, "pip install rlctl-plugin-veomni"
        )
    if versions.is_proved(found):
        return CheckResult("veomni", CheckStatus.OK, f"{found}, which the tests ran with")
    return CheckResult(
        "veomni",
        CheckStatus.WARN,
        f"{found}, with which nothing was proved",
        versions.PROVED,
        f"pip install veomni=={versions.PROVED}",
    )


def check_stand_ins() -> CheckResult:
    """What replaces CUDA on a CPU, each by name; nothing of it is applied on a GPU."""
    version = versions.installed()
    if version is None:
        return CheckResult("veomni-stand-ins", CheckStatus.SKIP, "veomni is not installed")
    names = [s.name for s in STAND_INS if s.applies_to(version)]
    return CheckResult("veomni-stand-ins", CheckStatus.OK, f"on cpu only: {', '.join(names)}; see docs/veomni.md")
