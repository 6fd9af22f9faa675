"""Which modules are sharded, how, and how the weights get into them.

Gradients are *summed* over ranks, of shards and of replicas: losses are globally weighted sums already (see
:mod:`rlctl.normalizer`), and a mean would be off by the number of ranks. FSDP's setters do not recurse, so every FSDP
module is told. Over a mesh of two dimensions the first one replicates: what was summed over shards is summed over replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from rlctl.errors import EngineError, RlctlError
from rlctl.parts import fsdp
from rlctl.parts.job import Root


def find_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of ``model``: those it says must not be split, else the children of its longest module list."""
    names = set(model._no_split_modules or ())
    found = [m for m in model.modules() if type(m).__name__ in names and m is not model]
    if not found:
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(c) for c in m}) == 1]
        found = list(max(lists, key=len)) if lists else []
    nested = {id(inner) for outer in found for inner in outer.modules() if inner is not outer}
    return [m for m in found if id(m) not in nested and next(m.parameters(), None) is not None]


def shard(root: Root, mesh: DeviceMesh, compute: torch.dtype, reduce: torch.dtype, reshard: bool) -> None:
    """``fully_shard`` each layer, then what is left with the root.

    Raises:
        EngineError: a weight is shared between two layers.
    """
    # Adapters may be kept in another dtype than the frozen weights around them.
    plain = {parameter.dtype for parameter in root.parameters()} == {compute}
    policy = MixedPrecisionPolicy(
        param_dtype=None if plain else compute, reduce_dtype=None if reduce == compute else reduce
    )
    for layer in find_layers(root.model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(root, mesh=mesh, mp_policy=policy)
    for module in fsdp.fsdp_modules(root):
        # Plain sums: gloo has no pre-multiplied sum, which is what a divide factor alone would ask for.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def _shared(root: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [p for p in places.values() if len(p) > 1]


def on_first_rank(build: Callable[[], PreTrainedModel]) -> PreTrainedModel | None:
    """What ``build`` makes on rank 0, None elsewhere.

    Raises:
        RlctlError: on every rank when it fails on rank 0; the others would wait for its weights.
    """
    source, problem = None, None
    if dist.get_rank() == 0:
        try:
            source = build()
        except RlctlError as error:
            problem = error
    word: list[str | None] = [None if problem is None else problem.what]
    dist.broadcast_object_list(word, src=0)
    if problem is not None:
        raise problem
    if word[0] is not None:
        raise EngineError("rank 0 could not build the model", found=word[0], next="see rank 0's own message")
    return source


def materialize(root: Root, source: PreTrainedModel | None, device: torch.device) -> None:
    """Give the sharded, empty ``root`` memory on ``device`` and the weights of ``source``, one tensor at a time.

    Args:
        source: the whole model on the CPU on rank 0, None elsewhere.

    Raises:
        EngineError: rank 0's model has another structure than this rank's.
    """
    ties = _shared(root)
    root.to_empty(device=device)
    for places in ties:
        # to_empty gives each place a tensor of its own; FSDP manages the first.
        first_module, first_name = places[0]
        for module, name in places[1:]:
            setattr(module, name, getattr(first_module, first_name))
    have: Mapping[str, torch.Tensor] = {}
    if source is not None:
        have = dict(source.named_parameters()) | dict(source.named_buffers())
    _same_structure(root, have if source is not None else None, device)
    with torch.no_grad():
        for name, parameter in root.model.named_parameters():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if source is not None:
                whole.copy_(have[name])
            assert isinstance(parameter, DTensor), f"{name} is not sharded"
            parts = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=0)
            parameter.to_local().copy_(parts.to_local())
        for name, buffer in root.model.named_buffers():
            if source is not None:
                buffer.copy_(have[name])
            dist.broadcast(buffer, src=0)


def _same_structure(root: Root, have: Mapping[str, torch.Tensor] | None, device: torch.device) -> None:
    """Compare names and shapes with rank 0 before the first tensor is sent: a later mismatch would hang."""
    mine = sorted((n, tuple(t.shape)) for n, t in [*root.model.named_parameters(), *root.model.named_buffers()])
    theirs = [None if have is None else sorted((n, tuple(t.shape)) for n, t in have.items())]
    dist.broadcast_object_list(theirs, src=0, device=device if device.type != "cpu" else None)
    if theirs[0] != mine:
        odd = sorted({n for n, _ in mine} ^ {n for n, _ in theirs[0] or ()})
        raise EngineError(
            "the model that rank 0 read has another structure than its config describes",
            found=", ".join(odd[:5]) or "other shapes",
            wanted="the weights that the config names",
            next="check that config.json belongs to the weight files",
        )
