"""Hugging Face names against the modules of vLLM's live model.

Two sorts of Hugging Face names exist: those of published checkpoints (each expert's matrices by themselves) and those of a
module in memory (all experts of a layer in one tensor). Training engines export either; what is kept here is by published name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlctl.errors import CapabilityError
from rlctl_vllm import compat


@dataclass(frozen=True)
class Part:
    """One published tensor and where it lives.

    Args:
        name: published Hugging Face name.
        shape: of the whole tensor.
        module: name of the live module.
        parameter: of that module.
        shard: which slice of a fused parameter: ``q``, ``k``, ``v``, a number, or None for all of it.
        expert: number of the expert, or None.
        is_embedding: it is looked up, not multiplied with.
    """

    name: str
    shape: tuple[int, ...]
    module: str
    parameter: str
    shard: Any = None
    expert: int | None = None
    is_embedding: bool = False


@dataclass(frozen=True)
class WeightNames:
    """All weights of a model.

    Args:
        parts: published name -> where it lives.
        fused: name of a module in memory -> (its shape, the published names that it is made of).
        tied: names that are another name's tensor; an export may have them or not.
        sources: published name -> the tied names that are served from its tensor.
        groups: live module -> the published names that it needs all of at once.
        heads: live modules of tied heads.
    """

    parts: Mapping[str, Part]
    fused: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]
    tied: Mapping[str, Part]
    sources: Mapping[str, tuple[str, ...]]
    groups: Mapping[str, tuple[str, ...]]
    heads: tuple[str, ...]
    skeleton: PreTrainedModel = field(repr=False)

    def publish(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """One exported tensor under its published names; views where that is possible."""
        return {name: tensor} if name in self.parts else _publish(self.skeleton, {name: tensor})


def _publish(skeleton: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(skeleton, dict(tensors)))


def skeleton_of(config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def find_names(skeleton: PreTrainedModel, live: nn.Module) -> WeightNames:
    """Where each weight of ``skeleton`` lives in ``live``.

    Raises:
        CapabilityError: a weight of one has no place in the other: vLLM's model of this family is laid out in a way that
            nothing here knows, and its weights could not be read back.
    """
    family = str(skeleton.config.model_type)
    if compat.renames(live):
        raise _unknown(family, "vLLM renames weights of this family")
    tied_names: dict[str, str] = dict(getattr(skeleton, "all_tied_weights_keys", None) or {})
    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    parts: dict[str, Part] = {}
    fused: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    tied: dict[str, Part] = {}
    stacked = compat.stacked(live)
    for name, parameter in parameters.items():
        published = _publish(skeleton, {name: parameter})
        if name not in published:
            fused[name] = (tuple(parameter.shape), tuple(published))
        for own, tensor in published.items():
            part = _place(own, tuple(tensor.shape), live, stacked, family)
            (tied if name in tied_names else parts)[own] = part
    _require_all(parts, live, family)
    groups: dict[str, tuple[str, ...]] = {}
    for part in parts.values():
        groups[part.module] = (*groups.get(part.module, ()), part.name)
    heads = tuple(sorted({part.module for part in tied.values()}))
    sources: dict[str, tuple[str, ...]] = {}
    for name, source in tied_names.items():
        sources[source] = (*sources.get(source, ()), name)
    return WeightNames(parts, fused, tied, sources, groups, heads, skeleton)


def _place(
    name: str, shape: tuple[int, ...], live: nn.Module, stacked: Mapping[str, tuple[str, Any]], family: str
) -> Part:
    module, _, parameter = name.rpartition(".")
    head, found, tail = module.partition(".experts.")
    if found and tail.partition(".")[0].isdigit():
        number, _, matrix = tail.partition(".")
        kinds = {"gate_proj": ("w13_weight", 0), "up_proj": ("w13_weight", 1), "down_proj": ("w2_weight", None)}
        inside = next(
            (n for n, m in live.named_modules() if n.startswith(f"{head}.experts") and compat.is_experts(m)), ""
        )
        if matrix not in kinds or parameter != "weight" or not inside:
            raise _unknown(family, f"no place for {name}")
        return Part(name, shape, inside, *kinds[matrix], expert=int(number))
    shard: Any = None
    for theirs, (ours, which) in stacked.items():
        if module.endswith(theirs):
            module, shard = module.removesuffix(theirs) + ours, which
            break
    try:
        own = live.get_submodule(module)
        own.get_parameter(parameter)
    except AttributeError as error:
        raise _unknown(family, f"no place for {name}: {error}") from error
    if parameter == "weight" and (size := compat.matrix_size(own)) is not None:
        # A family that keeps its matrices the other way round has the same names.
        rows = shape[0] if shard is not None else size[0]
        if shape != (rows, size[1]):
            raise _unknown(family, f"{name} is {list(shape)}, and in vLLM {list(size)}")
    is_embedding = compat.split_of(own) == "vocab" and not module.endswith("lm_head")
    return Part(name, shape, module, parameter, shard, is_embedding=is_embedding)


def _require_all(parts: Mapping[str, Part], live: nn.Module, family: str) -> None:
    """Every parameter of the live model is filled by a name: what no sync reaches would keep what it was drawn as."""
    reached = {(part.module, part.parameter) for part in parts.values()}
    for name, _ in live.named_parameters():
        module, _, parameter = name.rpartition(".")
        if (module, parameter) not in reached:
            raise _unknown(family, f"nothing of the Hugging Face model fills {name}")


def _unknown(family: str, found: str) -> CapabilityError:
    return CapabilityError(
        f"weights of {family} models cannot be followed into vLLM",
        found=found,
        wanted="a family whose layers vLLM keeps as Hugging Face names them, such as llama, qwen2, qwen3 or qwen3_moe",
        next="take another rollout backend: rollout.backend=hf",
    )
