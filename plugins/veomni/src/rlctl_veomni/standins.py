"""Stand-ins that let VeOmni run on a CPU, all of them. Nothing here is used on a GPU.

They replace kernels written for a GPU and calls that gloo or ``torch.cpu`` lacks. Which ranks talk, what they send and every
formula stay VeOmni's own. VeOmni's own names are redirected inside its modules; torch stays as it is for everything else in
the process, but for operators of torchvision that would otherwise be missing.

Importing this module imports neither torch nor veomni.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rlctl.device import detect_device
from rlctl.errors import BackendUnavailableError
from rlctl_veomni import versions

EXPERTS_KERNEL = "cpu"
"""Name under which VeOmni's registry knows the kernel for experts; its setting is called ``fused_cpu``."""
_GROUP_GEMM = "veomni.ops.kernels.moe._kernels.kernel.group_gemm"
_LIBRARIES: list[Any] = []
"""Definitions of operators end with the object that made them."""


@dataclass(frozen=True)
class StandIn:
    """One replacement.

    Args:
        replaces: what is redirected, in words.
        unproved: the path of the GPU that a run on a CPU therefore says nothing about.
        versions: of veomni for which it was written.
        apply: does it; safe to call again.
    """

    name: str
    replaces: str
    unproved: str
    versions: str
    apply: Callable[[], None]

    def applies_to(self, version: Version) -> bool:
        return SpecifierSet(self.versions, prereleases=True).contains(version)


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
    if not wanted:
        raise BackendUnavailableError(
            "this version of veomni has no stand-ins for a CPU",
            found=f"veomni {version}",
            wanted=", ".join(sorted({s.versions for s in STAND_INS})),
            next=f"pip install veomni=={versions.PROVED}",
        )
    for stand_in in wanted:
        stand_in.apply()
    return [s.name for s in wanted]


# ---- torchvision --------------------------------------------------------------------------------------------------
def _define_torchvision_operators() -> None:
    """veomni brings torchvision through timm. A build of it for CUDA beside a torch for the CPU cannot load its operators, and
    then neither it nor any model of transformers can be imported. No language model uses these operators."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
        return
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    from torch import library as operators

    for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    fragment = operators.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        fragment.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(fragment)
    importlib.import_module("torchvision")


# ---- device calls -------------------------------------------------------------------------------------------------
class _CpuDevice:
    """What VeOmni asks of ``torch.cuda``, answered for the CPU."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def empty_cache(self) -> None: ...
    def memory_allocated(self, *_: Any) -> int:
        return 0

    max_memory_allocated = memory_reserved = memory_allocated


def _answer_device_calls() -> None:
    import torch

    device: Any = importlib.import_module("veomni.utils.device")
    if not isinstance(device.get_torch_device(), _CpuDevice):
        answers = _CpuDevice(torch.cpu)
        device.get_torch_device = lambda: answers


# ---- experts ------------------------------------------------------------------------------------------------------
def group_gemm_same_nk(a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False, **rows: Any) -> Any:
    """Rows of ``a`` ``[T, K]``, sorted by expert, times the matrix of their expert: ``[T, N]``.

    Args:
        b: ``[E, K, N]``, or ``[E, N, K]`` with ``transpose_b``.
        rows: ``cumsum_M`` ``[E]``, the end of each expert's rows, and ``max_M``, T.
    """
    import torch

    assert not transpose_a, "VeOmni never asks for it"
    ends = [0, *rows["cumsum_M"].tolist()]
    assert ends[-1] == a.shape[0] == rows["max_M"], (ends, a.shape, rows["max_M"])
    matrices = b.transpose(1, 2) if transpose_b else b
    return torch.cat([a[ends[e] : ends[e + 1]] @ matrices[e] for e in range(b.shape[0])])


def group_gemm_same_mn(
    a: Any, b: Any, c: Any, *, transpose_a: bool = False, transpose_b: bool = False, **rows: Any
) -> Any:
    """``c[e] = a_e^T b_e`` over the rows of each expert, ``a`` ``[T, M]``, ``b`` ``[T, N]``, ``c`` ``[E, M, N]``.

    An expert without rows gets zeros: the memory of ``c`` is not initialised.

    Args:
        rows: ``cumsum_K`` ``[E]``, the end of each expert's rows, and ``max_K``, T.
    """
    assert transpose_a, "VeOmni always asks for it"
    assert not transpose_b, "VeOmni never asks for it"
    ends = [0, *rows["cumsum_K"].tolist()]
    assert ends[-1] == a.shape[0] == rows["max_K"], (ends, a.shape, rows["max_K"])
    for e in range(c.shape[0]):
        of_expert = slice(ends[e], ends[e + 1])
        c[e].copy_(a[of_expert].t() @ b[of_expert])
    return c


def _replace_group_gemm() -> None:
    module: Any = types.ModuleType(_GROUP_GEMM)
    module.group_gemm_same_nk, module.group_gemm_same_mn = group_gemm_same_nk, group_gemm_same_mn
    sys.modules[_GROUP_GEMM] = module
    # Where the module was imported before, it has the names already.
    layer: Any = importlib.import_module("veomni.distributed.moe.moe_layer")
    layer.group_gemm_same_nk, layer.group_gemm_same_mn = group_gemm_same_nk, group_gemm_same_mn


class _Collectives:
    """``torch.distributed``; gloo wants what is gathered into to have the shape of the parts laid end to end."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def all_gather_into_tensor(self, output: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        flat = tensor.contiguous().view(-1)
        return self._module.all_gather_into_tensor(output.view(-1), flat, group=group, async_op=async_op)


def _gather_flat() -> None:
    import torch.distributed as dist

    layer: Any = importlib.import_module("veomni.distributed.moe.moe_layer")
    if not isinstance(layer.dist, _Collectives):
        layer.dist = _Collectives(dist)


def _register_experts_kernel() -> None:
    moe: Any = importlib.import_module("veomni.ops.kernels.moe")
    registry: Any = importlib.import_module("veomni.ops.kernel_registry")
    if EXPERTS_KERNEL not in registry.KERNEL_REGISTRY.list_available("moe_experts", "standard"):
        registry.KERNEL_REGISTRY.register(
            registry.KernelSpec(
                name=EXPERTS_KERNEL,
                op_name="moe_experts",
                variant="standard",
                factory=_experts_kernel,
                hardware=registry.HardwareRequirement("any"),
                description="rlctl's stand-in for the Triton kernel, for experts that are spread over ranks",
            )
        )
    bind = moe.apply_veomni_fused_moe_patch
    if not getattr(bind, "rlctl_stand_in", False):

        def bind_known(fused_moe_kernel: str = "triton") -> None:
            if fused_moe_kernel != EXPERTS_KERNEL:
                bind(fused_moe_kernel)

        bind_known.rlctl_stand_in = True  # type: ignore[attr-defined]
        moe.apply_veomni_fused_moe_patch = bind_known


def _experts_kernel() -> Callable[..., Any]:
    moe: Any = importlib.import_module("veomni.distributed.moe")
    state: Any = importlib.import_module("veomni.distributed.parallel_state")

    def forward(experts: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        assert state.get_parallel_state().ep_enabled, "whole experts are computed by the model's own code"
        weights = top_k_weights.to(hidden_states.dtype)
        return moe.dispatch_to_ep_class(
            moe.EPMergedFc1GroupGemm,
            experts.num_experts,
            weights,
            top_k_index,
            hidden_states,
            experts.gate_up_proj,
            experts.down_proj,
            None,
        )

    return forward


def sum_expert_gradients(experts: Iterable[Any], shards: int) -> None:
    """gloo cannot multiply while it sums, which is how VeOmni divides gradients of experts; it sums, and FSDP divides.

    The engine calls this on a CPU once experts are sharded.

    Args:
        experts: FSDP modules of the experts of each layer.
        shards: ranks that share one expert. With one FSDP would divide twice: gradients come out too small, without a word.
    """
    assert shards > 1, "with one rank a shard FSDP divides by itself, and a forced sum would divide again"
    for module in experts:
        module.set_force_sum_reduction_for_comms(True)


_FOR = ">=0.1.12,<0.1.13"
STAND_INS: tuple[StandIn, ...] = (
    StandIn(
        "torchvision-operators",
        "nms and qnms of torchvision, by names without a body, where its build does not fit torch's",
        "detection models, which this backend does not run",
        _FOR,
        _define_torchvision_operators,
    ),
    StandIn(
        "device-calls",
        "empty_cache and memory counters, which torch.cpu lacks, in veomni.utils.device",
        "the allocator's cache between the tensors of a load",
        _FOR,
        _answer_device_calls,
    ),
    StandIn(
        "group-gemm",
        "VeOmni's Triton kernels for products grouped by expert, by torch's products one after another",
        "the Triton kernels, and bfloat16 in them",
        _FOR,
        _replace_group_gemm,
    ),
    StandIn(
        "flat-gather",
        "the shape of what the counts of tokens are gathered into, which gloo wants flat",
        "NCCL's own way to take it",
        _FOR,
        _gather_flat,
    ),
    StandIn(
        "experts-kernel",
        "the entry of VeOmni's registry that computes experts over ranks, by one without a requirement of hardware",
        "the selection of the Triton or Quack kernel, and whole experts in one kernel",
        _FOR,
        _register_experts_kernel,
    ),
    StandIn(
        "expert-gradients",
        "the pre-multiplied sum of experts' gradients, which gloo lacks, by a sum that is divided (see sum_expert_gradients)",
        "NCCL's pre-multiplied sum",
        _FOR,
        lambda: None,
    ),
)
