"""The rollout engine's own copy of a model: build it, fill it by Hugging Face names, read single weights back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from rlctl.errors import EngineError
from rlctl.hf_config import load_config
from rlctl.hf_quiet import quiet_transformers
from rlctl_fsdp.build import build_whole


def model_tokenizer(model: Mapping[str, Any]) -> Any:
    """The tokenizer of the ``model`` section, or None where it names none."""
    if not (model.get("tokenizer") or model.get("path")):
        return None
    from rlctl.config.schema import ModelConfig
    from rlctl.data.tokenizer import load_tokenizer

    return load_tokenizer(ModelConfig(**{k: v for k, v in model.items() if k in ModelConfig.model_fields}))


def end_token_ids(
    model: Mapping[str, Any], config: PreTrainedConfig, tokenizer: Any, module: Any = None
) -> tuple[int, ...]:
    """Every id that ends a row: from the generation config, the model config and the tokenizer.

    They often disagree (a chat model's turn end is in one and its document end in the other), and any of them ends a
    completion.
    """
    sources: list[Any] = [config, config.get_text_config(decoder=True), getattr(module, "generation_config", None)]
    path = model.get("path")
    if path is not None and module is None and Path(path, "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(path))
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found |= set(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    return tuple(sorted(found))


def own_module(model: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The pretrained weights of the ``model`` section, in ``dtype`` on ``device``."""
    return build_whole(model, seed=0).to(device=device, dtype=dtype)  # pyright: ignore[reportCallIssue]


def empty_module(model: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The architecture without drawing weights: they hold whatever memory holds. Buffers (rotary frequencies) are right."""
    with no_init_weights():
        module = AutoModelForCausalLM.from_config(
            load_config(model), dtype=dtype, trust_remote_code=bool(model.get("trust_remote_code"))
        )
    # Tying is part of the initialisation that was left out.
    module.tie_weights()
    return module.eval().to(device)


def _parameters(module: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every name of every weight, tied ones under each of their names."""
    return dict(module.state_dict(keep_vars=True))


@torch.no_grad()
def load_named(module: PreTrainedModel, weights: Iterator[tuple[str, torch.Tensor]]) -> dict[str, list[str]]:
    """Copy ``weights`` into ``module``.

    Returns:
        ``loaded``: the given names that were used; ``missing``: names of this model that none of them filled (a tied
        weight is filled under each of its names); ``unexpected``: given names that the model does not have.

    Raises:
        EngineError: a weight has another shape.
    """
    targets = _parameters(module)
    loaded: list[str] = []
    filled: set[int] = set()
    others: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            others[name] = tensor.clone()  # the next may be written where this one lies
            continue
        if target.shape != tensor.shape:
            raise EngineError(
                f"weight {name!r} has another shape in the rollout engine",
                found=tuple(tensor.shape),
                wanted=tuple(target.shape),
                next="the training and the rollout model must be one architecture: check model.path and model.config",
            )
        target.copy_(tensor)
        loaded.append(name)
        filled.add(target.data_ptr())
    if others:
        loaded += _load_converted(module, others, targets, filled)
    missing = sorted(name for name, target in targets.items() if target.data_ptr() not in filled)
    return {"loaded": loaded, "missing": missing, "unexpected": sorted(set(others) - set(loaded))}


def _load_converted(
    module: PreTrainedModel, others: dict[str, torch.Tensor], targets: Mapping[str, torch.Tensor], filled: set[int]
) -> list[str]:
    """Weights whose names in files differ from those in memory (transformers merges experts, for example).

    transformers' own loader does the conversion, on a module of its own. Returns the names that it could use.
    """
    with quiet_transformers():
        answer: Any = type(module).from_pretrained(
            None,
            config=module.config,
            state_dict=others,
            dtype=module.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    reader, report = answer
    # A fused weight with a part missing has another shape: it was not loaded either.
    absent = set(report["missing_keys"]) | {name for name, *_ in report["mismatched_keys"]}
    for name, tensor in reader.state_dict().items():
        if name in absent or name not in targets or targets[name].data_ptr() in filled:
            continue
        targets[name].copy_(tensor)
        filled.add(targets[name].data_ptr())
    return sorted(set(others) - set(report["unexpected_keys"]))


def named_weights(module: PreTrainedModel, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The weights of ``names``, whole. Names that only exist in files are made by transformers' own conversion.

    On a sharded module this is a collective: every rank asks for the same names.

    Raises:
        EngineError: the model has no such name.
    """
    own = module.state_dict()
    out: dict[str, torch.Tensor] = {}
    absent = [name for name in names if name not in own]
    if absent:
        from transformers.core_model_loading import revert_weight_conversion

        whole = {name: _whole(tensor) for name, tensor in own.items()}
        out = {name: t for name, t in revert_weight_conversion(module, whole).items() if name in set(absent)}
        unknown = sorted(set(absent) - set(out))
        if unknown:
            raise EngineError(
                "the rollout model has no weight of this name",
                found=unknown[0],
                wanted="a name of the Hugging Face model",
            )
    return {name: out[name] if name in out else _whole(own[name]) for name in names}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
