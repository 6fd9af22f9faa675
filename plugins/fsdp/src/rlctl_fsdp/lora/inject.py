"""Adapters around a model's linear layers: which layers, their first weights, and the switch that turns them off.

The base weights are frozen in the dtype of the section (``model.dtype``); adapters are float32, whatever that is. Their first
weights follow from the run's seed and the layer's name alone, so every rank and every topology starts from the same ones.

Legend: r rank, I inputs and O outputs of a layer. A is ``[r, I]``, B is ``[O, r]``.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlctl.config.schema_lora import ALL_LINEAR, chosen_layers, matching, names_hint
from rlctl.errors import ConfigError, EngineError
from rlctl_fsdp.plugin import LORA_HINT, LORA_REQUIREMENT

if TYPE_CHECKING:
    from peft.tuners.lora.layer import Linear as Adapted

NAME = "default"
"""The one adapter of a model, by peft's name."""
_VALUE_HEAD = "score"
_LINEAR = (nn.Linear, Conv1D)


def require_peft() -> Any:
    """peft, imported.

    Raises:
        EngineError: it is not installed, or does not import.
    """
    try:
        import peft
    except Exception as error:  # an older accelerate, or another build of torch, breaks its import in ways of its own
        absent = isinstance(error, ModuleNotFoundError) and error.name == "peft"
        raise EngineError(
            "model.lora needs peft, which this environment has not"
            if absent
            else "model.lora needs peft, and peft does not import",
            found="no module peft" if absent else f"{type(error).__name__}: {str(error).splitlines()[0]}",
            wanted=LORA_REQUIREMENT,
            next=LORA_HINT,
        ) from error
    return peft


def add_adapters(model: PreTrainedModel, section: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """Put adapters into ``model`` in place, draw them where it has memory, and freeze everything else.

    Args:
        model: on the CPU, or without memory (the meta device).
        section: ``model.lora``.

    Raises:
        ConfigError: the target modules match nothing, or something that takes no adapter.
        EngineError: peft is missing, or made other adapters than were chosen.
    """
    peft = require_peft()
    chosen = choose_layers(model, section.get("target_modules", ALL_LINEAR), section.get("exclude_modules"))
    config = peft.LoraConfig(
        r=int(section["rank"]),
        lora_alpha=section["alpha"],
        lora_dropout=float(section["dropout"]),
        use_rslora=bool(section["use_rslora"]),
        target_modules=_as_targets(model, chosen),
        bias="none",
        fan_in_fan_out=all(isinstance(model.get_submodule(name), Conv1D) for name in chosen),
        task_type=None if _has_value_head(model) else "CAUSAL_LM",
    )
    peft.inject_adapter_in_model(config, model, adapter_name=NAME, low_cpu_mem_usage=_without_memory(model))
    found = dict(adapted_layers(model))
    if set(found) != set(chosen):
        raise EngineError(
            "peft put adapters on other layers than were chosen",
            found=", ".join(sorted(set(found) ^ set(chosen))[:5]),
            wanted=f"{len(chosen)} linear layers",
            next="name the layers in model.lora.target_modules, and report this with the model's config",
        )
    for layer in found.values():
        for part in (layer.lora_A, layer.lora_B):
            part.to(torch.float32)
    if not _without_memory(model):
        _draw(found, seed)
    freeze(model)
    return model


def freeze(model: nn.Module) -> None:
    """Gradients for adapters alone, and for a value head, which starts from nothing."""
    trained = {
        id(p) for _, layer in adapted_layers(model) for p in (*layer.lora_A.parameters(), *layer.lora_B.parameters())
    }
    if _has_value_head(model):
        trained |= {id(p) for p in model.get_submodule(_VALUE_HEAD).parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """(name as in the model without adapters, layer) of every layer that has one."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module  # pyright: ignore[reportReturnType]


def parts(layer: Adapted) -> tuple[nn.Parameter, nn.Parameter]:
    """(A ``[r, I]``, B ``[O, r]``), live."""
    down, up = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    assert isinstance(down, nn.Parameter), "A is a linear layer's weight"
    assert isinstance(up, nn.Parameter), "B is a linear layer's weight"
    return down, up


def switch(model: nn.Module, enabled: bool) -> None:
    """Compute with adapters, or as if there were none. What is trained does not change."""
    for name, layer in adapted_layers(model):
        # peft's own enable_adapters would also take the adapters' gradients away, and FSDP keeps what it was told of them.
        layer._disable_adapters = not enabled
        assert layer.disable_adapters is not enabled, f"{name} was not switched"


def _draw(layers: Mapping[str, Adapted], seed: int) -> None:
    """A as ``nn.Linear`` draws its weights (uniform, of variance ``1 / 3 I``), B zero: the adapted model starts as the base model."""
    with torch.no_grad():
        for name, layer in layers.items():
            down, up = parts(layer)
            generator = torch.Generator().manual_seed((seed << 32 | zlib.crc32(name.encode())) % 2**63)
            bound = 1 / math.sqrt(down.shape[1])
            down.copy_((torch.rand(down.shape, generator=generator) * 2 - 1) * bound)
            up.zero_()


# ---- which layers -------------------------------------------------------------------------------------------------
def choose_layers(
    model: PreTrainedModel, targets: str | Sequence[str], exclude: str | Sequence[str] | None
) -> list[str]:
    """Names of the layers that get an adapter, in the model's order.

    Args:
        targets: ``all-linear``, a regular expression for whole names, or names that a layer's name ends with.
        exclude: the same, of what gets none.

    Raises:
        ConfigError: they match nothing, one of the names matches nothing, or a layer that takes no adapter.
    """
    linears = _linear_layers(model)
    if targets != ALL_LINEAR:
        _check_targets(model, targets, linears)
    chosen = chosen_layers(linears, targets, exclude)
    if not chosen:
        raise _no_match(
            model, targets, linears, f"nothing is left of {_shown(targets)} without {_shown(exclude or [])}"
        )
    kinds = {type(model.get_submodule(name)) for name in chosen}
    if Conv1D in kinds and len(kinds) > 1:
        raise _no_match(model, targets, linears, "layers whose weights lie both ways (Conv1D and Linear)")
    return chosen


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Linear layers other than the head: its weight is read by the loss itself, where an adapter would not count."""
    head = model.get_output_embeddings()
    out: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, _LINEAR) and module is not head and name != _VALUE_HEAD:
            out.append(name)
    return out


def _check_targets(model: PreTrainedModel, targets: str | Sequence[str], linears: Sequence[str]) -> None:
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            raise ConfigError(
                "model.lora.target_modules is no regular expression",
                found=f"'{targets}': {error}",
                wanted="all-linear, a list of names, or a regular expression for whole names",
                next="write a list for names: target_modules: [q_proj, v_proj]",
            ) from error
    others = [name for name, _ in model.named_modules() if name and name not in set(linears)]
    for pattern in [targets] if isinstance(targets, str) else targets:
        wanted: str | list[str] = pattern if isinstance(targets, str) else [pattern]
        if matching(linears, wanted):
            continue
        hit = matching(others, wanted)
        found = f"'{pattern}' matches no layer"
        if hit:
            module = model.get_submodule(hit[0])
            found = f"'{pattern}' matches {hit[0]}, a {type(module).__name__}"
            if module is model.get_output_embeddings():
                found += ": the head, which takes no adapter, as the loss reads its weight by itself"
        raise _no_match(model, targets, linears, found)


def _shown(patterns: str | Sequence[str]) -> str:
    # Not by repr, which doubles the backslashes of a regular expression.
    return f"'{patterns}'" if isinstance(patterns, str) else f"[{', '.join(patterns)}]"


def _no_match(model: PreTrainedModel, targets: str | Sequence[str], linears: Sequence[str], found: str) -> ConfigError:
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
    experts = ""
    if _has_fused_experts(model):
        experts = ". The experts of this model are one tensor for all of them, which takes no adapter"
    next_step = "set model.lora.target_modules=all-linear" if targets != ALL_LINEAR else "take model.lora out"
    if (hint := names_hint(linears, targets)) is not None:
        next_step = f"model.lora.{hint}"
    return ConfigError(
        f"model.lora.target_modules does not fit {type(model).__name__}",
        found=found,
        wanted=f"linear layers inside the model: {', '.join(known) or 'it has none'}{experts}",
        next=next_step,
    )


def _as_targets(model: PreTrainedModel, chosen: Sequence[str]) -> list[str]:
    """The last parts of the names, where they mean the same layers and no others; else the whole names.

    Other programs read them in adapter_config.json, and know short names best. peft takes some of those for fused experts.
    """
    short = sorted({name.rpartition(".")[2] for name in chosen})
    everything = [name for name, _ in model.named_modules()]
    same = set(matching(everything, short)) == set(chosen)
    return short if same and not _has_fused_experts(model) else list(chosen)


def _has_fused_experts(model: nn.Module) -> bool:
    return any(p.ndim == 3 and "expert" in name for name, p in model.named_parameters())


def fused_experts_note(model: nn.Module) -> str:
    """What to say of a mixture of experts, whose experts stay as they are; empty of any other model."""
    return "; fused experts have none and stay as they are" if _has_fused_experts(model) else ""


def _has_value_head(model: nn.Module) -> bool:
    return isinstance(getattr(model, _VALUE_HEAD, None), nn.Linear)


def _without_memory(model: nn.Module) -> bool:
    return next(model.parameters()).is_meta
