"""Stand-ins that let megatron-core run on a CPU, all of them. Nothing here is used on a GPU.

They replace kernels and device calls only: which device a buffer lies on, streams, the random state of the device, type
names. No collective, no schedule and no formula is changed. The names ``torch.cuda...`` are redirected inside megatron-core's
own modules; torch itself stays as it is for everything else in the process.

Importing this module imports neither torch nor megatron-core.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rlctl.device import detect_device
from rlctl.errors import BackendUnavailableError
from rlctl_megatron import versions

_REDIRECTED = (
    "tensor_parallel.mappings",
    "tensor_parallel.layers",
    "tensor_parallel.random",
    "tensor_parallel.utils",
    "tensor_parallel.data",
    "pipeline_parallel.schedules",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.utils",
    "distributed.distributed_data_parallel",
    "distributed.param_and_grad_buffer",
    "distributed.finalize_model_grads",
    "optimizer.optimizer",
    "optimizer.distrib_optimizer",
    "optimizer.clip_grads",
    "models.gpt.gpt_model",
    "models.common.embeddings.rotary_pos_embedding",
    "models.common.embeddings.rope_utils",
    "transformer.attention",
    "transformer.module",
    "transformer.transformer_layer",
    "transformer.moe.experts",
    "transformer.moe.moe_utils",
    "transformer.moe.router",
    "transformer.moe.token_dispatcher",
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.state_dict_saver",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.torch",
    "utils",
)


_VERSIONS = ">=0.12.1,<0.13 | >=0.16.1,<0.17"


@dataclass(frozen=True)
class StandIn:
    """One replacement.

    Args:
        replaces: what is redirected, in words.
        unproved: the path of the GPU that a run on a CPU therefore says nothing about.
        versions: of megatron-core for which it was written, ranges joined by ``|``.
        apply: does it; safe to call again.
    """

    name: str
    replaces: str
    unproved: str
    versions: str
    apply: Callable[[], None]

    def applies_to(self, version: Version) -> bool:
        return any(SpecifierSet(r, prereleases=True).contains(version) for r in self.versions.split("|"))


def prepare(device: object) -> list[str]:
    """Apply every stand-in that the installed version needs, on a CPU; returns their names.

    Args:
        device: ``cpu``, ``cuda`` ...; None: whatever this machine has.

    Raises:
        BackendUnavailableError: a version for which no stand-in was written.
    """
    if device is None:
        device = detect_device().type
    if str(device).partition(":")[0] != "cpu":
        return []
    version = versions.installed()
    if version is None:
        return []  # the import that follows says so in its own words
    wanted = [s for s in STAND_INS if s.applies_to(version)]
    if not any(s is _CUDA_CALLS for s in wanted):
        raise BackendUnavailableError(
            "this version of megatron-core has no stand-ins for a CPU",
            found=f"megatron-core {version}",
            wanted=_CUDA_CALLS.versions,
            next=f"pip install megatron-core=={versions.PROVED}",
        )
    for stand_in in wanted:
        stand_in.apply()
    return [s.name for s in wanted]


# ---- device calls -----------------------------------------------------------------------------------------------
class _Stream:
    """A stream or event of a device whose work is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> _Stream:
        return self


class _CpuCalls:
    """What megatron-core asks of ``torch.cuda``, answered for the CPU."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.Stream = self.Event = _Stream
        self.random = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch.cuda, name)

    def current_device(self) -> Any:
        return self._torch.device("cpu")

    def synchronize(self, *_: Any) -> None: ...
    def empty_cache(self) -> None: ...
    def current_stream(self, *_: Any) -> _Stream:
        return _Stream()

    default_stream = current_stream

    def stream(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_rng_state(self, *_: Any, **__: Any) -> Any:
        return self._torch.get_rng_state()

    def set_rng_state(self, state: Any, *_: Any, **__: Any) -> None:
        self._torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        self._torch.manual_seed(seed)


class _Collectives:
    """``torch.distributed``; gloo gathers tensors of one size only, where NCCL takes any."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch.distributed, name)

    def all_gather(self, tensors: list[Any], tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        """As torch's; the shorter tensors are sent with a tail that is not copied out."""
        sizes = [t.shape[0] for t in tensors]
        if len(set(sizes)) == 1:
            return self._torch.distributed.all_gather(tensors, tensor, group=group, async_op=async_op)
        assert not async_op, "no caller waits for it"
        longest = max(sizes)
        sent = tensor.new_zeros((longest, *tensor.shape[1:]))
        sent[: tensor.shape[0]] = tensor
        found = [self._torch.empty_like(sent) for _ in sizes]
        self._torch.distributed.all_gather(found, sent, group=group)
        for target, whole in zip(tensors, found, strict=True):
            target.copy_(whole[: target.shape[0]])
        return None


class _Redirect:
    """``torch`` as megatron-core's modules see it: the real one, but for device calls and device names."""

    rlctl_stand_in = True

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.cuda = _CpuCalls(torch)
        self.distributed = _Collectives(torch)
        for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like"):
            setattr(self, name, _on_cpu(getattr(torch, name), torch))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def device(self, kind: Any, *rest: Any) -> Any:
        return self._torch.device("cpu") if _is_cuda(kind) else self._torch.device(kind, *rest)


def _is_cuda(device: Any) -> bool:
    return str(getattr(device, "type", device)).startswith("cuda")


def _on_cpu(function: Callable[..., Any], torch: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # needs a driver
        return function(*args, **kwargs)

    return call


def _redirect_cuda_calls() -> None:
    import torch

    from rlctl_megatron import compat

    redirect: _Redirect | None = None
    for name in compat.redirected_modules(_REDIRECTED):
        module = importlib.import_module(f"megatron.core.{name}")
        if not getattr(module.torch, "rlctl_stand_in", False):
            redirect = redirect or _Redirect(torch)
            module.torch = redirect  # type: ignore[attr-defined]


def _use_cpu_random_state() -> None:
    """The tracker of random states saves and restores the CPU's."""
    import torch
    from megatron.core.tensor_parallel import random as states

    states._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[assignment]
    states._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[assignment]


# ---- names and types --------------------------------------------------------------------------------------------
def name_router_gemm() -> None:
    """Without Transformer Engine the router's matrix product asks for a name that the module never defined.

    On a GPU too: the engine calls this wherever a model has experts.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def cast_no_fp8() -> None:
    """Without Transformer Engine 0.12.1's distributed optimizer fails after each step, for it asks to cast weights of eight bits, of
    which there are none.

    On every device: the engine calls this wherever moments are sharded. Of another version it is none's business.
    """
    from megatron.core.optimizer import distrib_optimizer

    cast: Any = distrib_optimizer.quantize_param_shard
    if not versions.is_legacy(versions.installed()) or getattr(cast, "rlctl_stand_in", False):
        return

    def cast_some(weights: Any, *others: Any, **more: Any) -> None:
        if weights:
            cast(weights, *others, **more)

    cast_some.rlctl_stand_in = True  # type: ignore[attr-defined]
    distrib_optimizer.quantize_param_shard = cast_some


def _split_sizes_to_numbers() -> None:
    """Sizes that lie on the CPU already are still tensors where ``all_to_all`` wants numbers."""
    import torch
    from megatron.core.transformer.moe import token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        del record_stream
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


@contextlib.contextmanager
def building(device_type: str) -> Iterator[None]:
    """On a CPU, within: ``tensor.cuda()`` is the tensor, and ``tensor.type()`` says ``torch.cuda...``.

    While models and optimizers are built megatron-core moves a tied embedding to the device by its method, and its distributed
    optimizer sorts weights by the name of their type. Neither goes through a module's name for torch, so both are answered
    here, and only as long as something is built.
    """
    if device_type != "cpu":
        yield
        return
    from torch import Tensor
    from torch.overrides import TorchFunctionMode

    class Answers(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.cuda:
                return args[0]
            answer = func(*args, **(kwargs or {}))
            if func is Tensor.type and len(args) == 1 and not kwargs:
                return answer.replace("torch.", "torch.cuda.", 1)
            return answer

    with Answers():
        yield


_CUDA_CALLS = StandIn(
    "cuda-calls",
    "torch.cuda device, stream and synchronisation calls, and device='cuda', in megatron-core's modules",
    "streams: overlap of communication and computation",
    _VERSIONS,
    _redirect_cuda_calls,
)
STAND_INS: tuple[StandIn, ...] = (
    _CUDA_CALLS,
    StandIn(
        "uneven-gather",
        "all_gather of tensors of several sizes, which gloo has not, by one of equal sizes (part of cuda-calls)",
        "NCCL's own way to do it",
        _VERSIONS,
        _redirect_cuda_calls,
    ),
    StandIn(
        "random-state",
        "the random state of the device by that of the CPU",
        "the device's own generator: dropout, which rlctl trains without",
        _VERSIONS,
        _use_cpu_random_state,
    ),
    StandIn(
        "router-gemm-name",
        "te_general_gemm, a name that megatron-core 0.16 leaves undefined without Transformer Engine",
        "the router's product by Transformer Engine",
        _VERSIONS,
        name_router_gemm,
    ),
    StandIn(
        "no-fp8-cast",
        "the cast of weights of eight bits, of which there are none, which megatron-core 0.12 leaves to Transformer Engine",
        "weights of eight bits, which rlctl does not train",
        ">=0.12.1,<0.13",
        cast_no_fp8,
    ),
    StandIn(
        "split-sizes",
        "the move of all-to-all split sizes to the CPU, where they are already",
        "the copy on a side stream and its synchronisation",
        _VERSIONS,
        _split_sizes_to_numbers,
    ),
    StandIn(
        "tensor-calls",
        "tensor.cuda() and tensor.type() while models and optimizers are built (see building())",
        "the copy of a tied embedding to the device",
        _VERSIONS,
        lambda: None,
    ),
)
