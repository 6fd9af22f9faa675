"""Patches at its import, as MindSpeed does: ``torch.cuda`` becomes ``torch.npu``, and megatron-core computes there.

What a test can ask afterwards: ``order``, the modules of megatron-core that were there before; ``argv``, what was on the command line
that MindSpeed reads its settings from; ``repatched``, the arguments of each call of :func:`repatch`.
"""

import sys

import torch
import torch_npu
from torch import Tensor
from torch.overrides import TorchFunctionMode

order = sorted(m for m in sys.modules if m.startswith("megatron.core"))
argv = list(sys.argv)
repatched = []


def repatch(args):
    """Switch features."""
    repatched.append(dict(args))


def _to_npu(value):
    if isinstance(value, torch.device):
        return torch.device("npu", value.index or 0) if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "npu"
    return value


class _CudaIsNpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0].to("npu")
        if func is torch.device:
            found = func(*args, **kwargs)
            return func("npu", found.index or 0) if found.type == "cuda" else found
        if any(isinstance(a, (str, torch.device)) for a in args):
            args = tuple(_to_npu(a) for a in args)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _to_npu(kwargs["device"])}
        answer = func(*args, **kwargs)
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return answer.replace("torch.", "torch.cuda.", 1)  # by which megatron-core sorts weights
        return answer


_NAMES = (
    "current_device",
    "set_device",
    "device_count",
    "synchronize",
    "empty_cache",
    "current_stream",
    "default_stream",
    "stream",
    "Stream",
    "Event",
    "get_rng_state",
    "set_rng_state",
    "manual_seed",
    "memory_allocated",
    "max_memory_allocated",
)
for _name in _NAMES:
    setattr(torch.cuda, _name, getattr(torch_npu.npu, _name))
torch.cuda.random.get_rng_state = torch_npu.npu.get_rng_state
torch.cuda.random.set_rng_state = torch_npu.npu.set_rng_state
_CudaIsNpu().__enter__()


def _as_it_is(function=None, **_):
    return function if function is not None else lambda found: found


torch.compile = torch.jit.script = _as_it_is  # MindSpeed has nothing compiled either

from megatron.core.tensor_parallel import random  # noqa: E402

random._get_cuda_rng_state = lambda *_, **__: torch_npu.npu.get_rng_state()
random._set_cuda_rng_state = lambda state, *_, **__: torch_npu.npu.set_rng_state(state)
