"""Checks of ``rlctl doctor``. They import neither torch nor veomni."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

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


def check_torchvision() -> CheckResult:
    """Whether torchvision, which veomni brings through timm, is a build for the installed torch, by their local versions."""
    name = "veomni-torchvision"
    torch, vision = _local("torch"), _local("torchvision")
    if vision is None:
        return CheckResult(name, CheckStatus.OK, "not installed, and no language model needs it")
    if torch == vision:
        return CheckResult(name, CheckStatus.OK, "of the same kind of build as torch")
    return CheckResult(
        name,
        CheckStatus.WARN,
        f"torch is a build {torch or 'without a tag'}, torchvision one {vision or 'without a tag'}",
        "builds of one kind: with others transformers cannot import its models (ranks of veomni on a CPU mend that themselves)",
        "pip uninstall -y torchvision timm",
    )


def _local(dist: str) -> str | None:
    """The local part of an installed version (``cpu`` of ``2.13.0+cpu``), empty without one; None: not installed."""
    try:
        return Version(metadata.version(dist)).local or ""
    except metadata.PackageNotFoundError:
        return None
