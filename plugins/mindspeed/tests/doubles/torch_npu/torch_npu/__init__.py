"""A stand-in for Ascend's extension of torch: the device type npu, on the CPU. For tests.

``npu`` becomes a name that torch knows; every call that names it as a place for tensors goes to the CPU. The module ``torch.npu`` has
the calls that :mod:`rlctl.device` makes, and ``rlctl_simulated``, by which everybody can tell.
"""

import os

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch
from torch.overrides import TorchFunctionMode

from torch_npu import npu

__version__ = "2.13.0+double"


def _there(value):
    """``value``, with the CPU in place of an npu."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "npu" else value
    if isinstance(value, str) and (value == "npu" or value.startswith("npu:")):
        return torch.device("cpu")
    return value


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)  # a name, and no place yet
        if any(isinstance(a, (str, torch.device)) for a in args):
            args = tuple(_there(a) for a in args)
        if kwargs.get("device") is not None:
            # A number is an index of the accelerator, which is the npu now.
            number = isinstance(kwargs["device"], int)
            kwargs = {**kwargs, "device": torch.device("cpu") if number else _there(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _gloo(store, rank, size, timeout):
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, timeout=timeout)


torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
torch._C._get_accelerator = lambda check=None: torch.device("cpu")  # asks hooks in C++, which no module of Python's has
_OnTheCpu().__enter__()  # for the life of this process
torch.distributed.Backend.register_backend("hccl", _gloo, devices=["npu"])


def npu_fusion_attention(*_, **__):
    """A name that transformers imports on an npu."""
    raise NotImplementedError("the double has no kernels of Ascend's")


def _autoload():
    """torch's entry point: being imported is all that it takes."""
