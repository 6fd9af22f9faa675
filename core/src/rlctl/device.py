"""The one module that knows cuda, npu and cpu calls: nothing else asks ``torch.cuda`` or ``torch.npu`` (a test reads the sources).

torch is imported inside the functions only. An extension of torch that brings a device is loaded by :mod:`rlctl.extensions`.

A device is written as torch writes it (``cuda``, ``cuda:1``, ``npu:0``, ``cpu``) or given as :class:`Device`. Sizes are
in GiB (2**30 bytes), as ``perf/max_memory_allocated_gb`` is in this field.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl import extensions
from rlctl.causes import cause_chain
from rlctl.errors import CapabilityError

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch

    DeviceLike: TypeAlias = "Device | str | torch.device"

DEVICE_VARIABLE = "RLCTL_DEVICE"
VENDOR_VARIABLE = "RLCTL_VENDOR"
_GIB = 2**30
_VENDORS = {"npu": "huawei", "mps": "apple", "xpu": "intel", "musa": "mthreads"}
_ORDER = ("cuda", "npu")
"""Accelerators that ``auto`` looks for, first to last; the CPU is what remains."""
_FILES = {"cuda": "nvidiactl", "npu": "davinci_manager"}
"""What a driver of the device type shows in ``/dev``."""


@dataclass(frozen=True)
class Device:
    """A device type as torch names it, and who makes it (None where it does not matter, as on a CPU)."""

    type: str
    vendor: str | None = None

    def __str__(self) -> str:
        return f"{self.type}/{self.vendor}" if self.vendor else self.type


def detect_device(preference: str = "auto") -> Device:
    """The device to run on, by asking the runtime: an installed wheel is no device.

    Args:
        preference: ``auto`` or a device type. ``RLCTL_DEVICE`` replaces ``auto``; ``RLCTL_VENDOR`` replaces the vendor.

    Raises:
        CapabilityError: the device that ``preference`` names does not answer. What the variables say is taken as it is.
    """
    extensions.shield()
    vendor = os.environ.get(VENDOR_VARIABLE) or None
    forced = os.environ.get(DEVICE_VARIABLE) or None
    if preference == "auto" and forced is not None:
        return Device(forced, vendor or _vendor(forced))
    if preference == "auto":
        kind = next((d for d in _ORDER if is_available(d)), "cpu")
        return Device(kind, vendor or _vendor(kind))
    if preference != "cpu" and preference != forced and not is_available(preference):
        raise CapabilityError(
            f"no {preference} device answers",
            details=absence_words(preference),
            found=_runtime_words(),
            wanted=f"a torch build and a driver for {preference}",
            next="trainer.device=cpu, or rlctl doctor to see what the runtime says",
        )
    return Device(preference, vendor or _vendor(preference))


def named_device(preference: str = "auto") -> Device | None:
    """The device that ``preference`` or ``RLCTL_DEVICE`` names; None where the runtime has to be asked. Imports no torch."""
    kind = preference if preference != "auto" else os.environ.get(DEVICE_VARIABLE)
    return Device(kind, os.environ.get(VENDOR_VARIABLE) or _vendor(kind)) if kind else None


def is_available(device: str) -> bool:
    """True when the runtime of a device type answers. Never raises: a broken driver is an absent device."""
    if device == "cpu":
        return True
    try:
        runtime = _runtime(device)
        return runtime is not None and bool(runtime.is_available()) and int(runtime.device_count()) > 0
    except Exception:  # a vendor's extension may fail in any way when its driver is missing
        return False


def is_simulated(device: DeviceLike) -> bool:
    """True where no such device computes: none answers, or what answers says of itself that it stands on the CPU.

    What is proved on such a one is stamped ``simulated`` and raises no level.
    """
    kind = _type_of(device)
    return kind != "cpu" and (not is_available(kind) or bool(getattr(_runtime(kind), "rlctl_simulated", False)))


def tensor_type(device: DeviceLike) -> str:
    """The device type that tensors on it name: its own, and of a simulated one the CPU's."""
    kind = _type_of(device)
    return "cpu" if is_available(kind) and is_simulated(kind) else kind


def in_sight(device: str) -> bool:
    """Without asking a runtime, which would import torch: whether this machine shows a device type's driver, or
    ``RLCTL_DEVICE`` names it."""
    if device == "cpu" or os.environ.get(DEVICE_VARIABLE) == device:
        return True
    return device in _FILES and Path("/dev", _FILES[device]).exists()


def absence_words(device: str) -> list[str]:
    """Why the runtime of a device type does not load, a line for each link of the chain; empty where it does or is absent."""
    error = extensions.why_not(device)
    if error is None:
        return []
    return [f"because {c.line}" if i else c.line for i, c in enumerate(cause_chain(error))]


def _runtime(device: str) -> Any:
    """torch's module of a device type (``torch.cuda``, ``torch.npu``), or None."""
    import torch

    kind = _type_of(device)
    if kind in extensions.MODULES and not extensions.load(kind):
        return None
    return getattr(torch, kind, None)


def _type_of(device: Any) -> str:
    if isinstance(device, Device):
        return device.type
    return str(device).partition(":")[0]


def _vendor(device: str) -> str | None:
    if device == "cuda":
        # ROCm builds of torch present themselves as cuda; a torch that is absent or CPU-only cannot tell.
        torch = sys.modules.get("torch")
        return "amd" if torch is not None and getattr(torch.version, "hip", None) else "nvidia"
    return _VENDORS.get(device)


def _runtime_words() -> str:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"torch {torch.__version__} built with {built}, no accelerator answers"


def device_count(device: DeviceLike) -> int:
    """How many devices of this type this process sees; 1 for the CPU."""
    return 1 if _type_of(device) == "cpu" else int(_runtime(_type_of(device)).device_count())


def device_name(device: DeviceLike) -> str:
    """Its marketing name, or the processor's."""
    if _type_of(device) != "cpu":
        # RLCTL_DEVICE may name a device that this machine lacks: the engine then says so, a name must not fail before it.
        if not is_available(_type_of(device)):
            return f"{_type_of(device)}, which does not answer"
        return str(_runtime(_type_of(device)).get_device_name(_index(device)))
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


_COLLECTIVES = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


def collective_backend(device: DeviceLike) -> str:
    """What ``torch.distributed`` takes as its backend for this device: gloo carries what lies on the host.

    Raises:
        CapabilityError: no collective library is known for the device.
    """
    kind = _type_of(device)
    if kind not in _COLLECTIVES:
        raise CapabilityError(
            "no collectives are known for this device", found=kind, wanted="one of " + ", ".join(_COLLECTIVES)
        )
    return _COLLECTIVES[kind]


def collective_library(device: DeviceLike) -> str:
    """What collectives on this device are made of here, with its versions; ranks with another one cannot be joined."""
    import torch

    words = f"torch {str(torch.__version__).partition('+')[0]}"
    if _type_of(device) != "cuda":
        return words
    from torch.cuda import nccl

    return f"{words} with NCCL {'.'.join(map(str, nccl.version()))}"


def set_device(device: DeviceLike, local_rank: int) -> None:
    """Make the ``local_rank``-th device of its type the current one. Nothing to do on a CPU.

    Raises:
        CapabilityError: this process sees fewer devices.
    """
    if _type_of(device) == "cpu":
        return
    seen = device_count(device)
    if local_rank >= seen:
        raise CapabilityError(
            f"local rank {local_rank} has no {_type_of(device)} device of its own",
            found=f"{seen} visible",
            wanted=f"at least {local_rank + 1} on this host",
            next=f"--nproc {seen}, or trainer.device=cpu",
        )
    _runtime(_type_of(device)).set_device(local_rank)


def indexed(device: str) -> str:
    """``device`` with its index: of one without, the current device of its type. A CPU has none."""
    if _type_of(device) == "cpu" or _index(device) is not None:
        return device
    return f"{device}:{current_index(device)}"


def unit(device: str) -> str:
    """What tells this device from all others wherever it is seen from; empty where it does not say (a CPU)."""
    if _type_of(device) == "cpu":
        return ""
    found = _runtime(_type_of(device)).get_device_properties(_index(indexed(device)))
    return str(getattr(found, "uuid", "") or "")


def current_index(device: DeviceLike) -> int:
    """Number of the current device of its type; 0 on a CPU."""
    return 0 if _type_of(device) == "cpu" else int(_runtime(_type_of(device)).current_device())


def random_state(device: DeviceLike) -> torch.Tensor | None:
    """State of the device's own generator; None on a CPU, whose state is torch's."""
    return None if _type_of(device) == "cpu" else _runtime(_type_of(device)).get_rng_state()


def set_random_state(device: DeviceLike, state: torch.Tensor | None) -> None:
    """Give back what :func:`random_state` took. Nothing to do on a CPU."""
    if _type_of(device) != "cpu" and state is not None:
        _runtime(_type_of(device)).set_rng_state(state)


@contextlib.contextmanager
def kept_random_state(device: DeviceLike) -> Iterator[None]:
    """Within, whatever draws: torch's state and the device's are afterwards as they were."""
    import torch

    before, there = torch.get_rng_state(), random_state(device)
    try:
        yield
    finally:
        torch.set_rng_state(before)
        set_random_state(device, there)


def synchronize(device: DeviceLike) -> None:
    """Wait for all work queued on the device. Nothing to do on a CPU."""
    if _type_of(device) != "cpu":
        _runtime(_type_of(device)).synchronize(_index(device))


def collect_shared(device: DeviceLike) -> None:
    """Take back memory that other processes had opened and have closed. Nothing to do where processes share none."""
    if _type_of(device) == "cuda":
        _runtime("cuda").ipc_collect()


def current(device: DeviceLike) -> contextlib.AbstractContextManager[Any]:
    """The device as the current one of its type, within a block."""
    return contextlib.nullcontext() if _type_of(device) == "cpu" else _runtime(_type_of(device)).device(_index(device))


def empty_cache(device: DeviceLike) -> None:
    """Give cached blocks back to the driver. Nothing to do on a CPU."""
    if _type_of(device) != "cpu":
        _runtime(_type_of(device)).empty_cache()


def max_memory_allocated_gb(device: DeviceLike) -> float:
    """Peak GiB of the allocator since the last reset; on a CPU the peak resident set of this process."""
    if _type_of(device) == "cpu":
        return peak_rss_gb()
    return float(_runtime(_type_of(device)).max_memory_allocated(_index(device))) / _GIB


def memory_allocated_gb(device: DeviceLike) -> float:
    """GiB that tensors hold now; on a CPU the resident set of this process."""
    if _type_of(device) == "cpu":
        return _status_kib("VmRSS") * 1024 / _GIB
    return float(_runtime(_type_of(device)).memory_allocated(_index(device))) / _GIB


def reset_peak_memory(device: DeviceLike) -> bool:
    """Start a new peak. False where the system does not let a process reset it."""
    if _type_of(device) != "cpu":
        _runtime(_type_of(device)).reset_peak_memory_stats(_index(device))
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets VmHWM to the present resident set
    except OSError:
        return False
    return True


def peak_rss_gb() -> float:
    """Peak resident set of this process in GiB."""
    peak = _status_kib("VmHWM")
    if peak:
        return peak * 1024 / _GIB
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / _GIB if sys.platform == "darwin" else used * 1024 / _GIB


def _status_kib(key: str) -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1])
    except OSError:
        pass  # not Linux
    return 0


def seed_all(seed: int) -> None:
    """Seed Python, torch on every device, and numpy where it is loaded."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _index(device: Any) -> int | None:
    _, _, index = str(device if not isinstance(device, Device) else device.type).partition(":")
    return int(index) if index else None
