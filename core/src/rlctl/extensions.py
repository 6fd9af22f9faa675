"""Device extensions of torch: wheels such as torch_npu, which bring a device type that torch itself has not.

torch loads each of them whenever it is imported, so one that is broken (its driver or vendor's toolkit is missing) makes every
plain ``import torch`` fail, on a CPU too; and libraries that find its files import it as well. So here they are loaded when their
device is asked for, and one that does not load is hidden from the process: for whoever looks, it is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Collection

AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
MODULES = {"npu": "torch_npu"}
"""Device type -> the module that brings it."""

_broken: dict[str, BaseException] = {}


def keep_from_loading() -> None:
    """Before torch is imported: it loads no extension by itself, in this process and those that it starts.

    A user who set the variable keeps it.
    """
    os.environ.setdefault(AUTOLOAD_VARIABLE, "0")


def load(device: str) -> bool:
    """Import the extension of a device type; False where it is absent or broken. One that is broken is hidden."""
    name = MODULES[device]
    if name in sys.modules:
        return sys.modules[name] is not None
    if importlib.util.find_spec(name) is None:
        return False
    switch = os.environ.get(AUTOLOAD_VARIABLE)
    try:
        # Its own import of torch must not load it once more.
        os.environ[AUTOLOAD_VARIABLE] = "0"
        importlib.import_module(name)
    except Exception as error:  # a vendor's extension fails in any way when its driver or toolkit is missing
        _broken[name] = error
        _hide(name)
        return False
    finally:
        if switch is None:
            os.environ.pop(AUTOLOAD_VARIABLE, None)
        else:
            os.environ[AUTOLOAD_VARIABLE] = switch
    return True


def shield(spared: Collection[str] = ()) -> None:
    """Hide every extension that is installed and does not load, before a library stumbles over it.

    Args:
        spared: modules that are left alone: somebody imports them next, and wants to see why they fail.
    """
    for device, name in MODULES.items():
        if name not in spared:
            load(device)


def why_not(device: str) -> BaseException | None:
    """What the import of a device type's extension raised; None where it was not tried, loaded, or is absent."""
    return _broken.get(MODULES.get(device, ""))


def _hide(name: str) -> None:
    for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        del sys.modules[module]
    sys.modules[name] = None  # type: ignore[assignment]  # what import and find_spec take for "not there"
