"""A Hugging Face model from a ``model`` section: weights on the CPU, or the same structure without memory.

A language model is transformers' causal LM. A value model is its token classifier with one label, the head called ``score``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel

from rlctl.errors import CapabilityError, ConfigError, EngineError
from rlctl.hf_config import load_config, load_error, make_value_config, starts_random
from rlctl.hf_quiet import quiet_transformers
from rlctl.parts.values import VALUE_BIAS, VALUE_HEAD, draw_value_head
from rlctl.records import ModelType

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def master_dtype(model: Mapping[str, Any]) -> torch.dtype:
    """dtype of the master weights.

    Raises:
        ConfigError: a dtype in which this backend cannot train.
    """
    name = str(model.get("dtype") or "float32")
    if name not in ("float32", "bfloat16"):
        raise ConfigError(
            "fsdp2 keeps no master weights in this dtype",
            found=f"model.dtype {name}",
            wanted="float32 or bfloat16 (float16 needs loss scaling, which this backend has not)",
            next="set model.dtype=float32",
        )
    return DTYPES[name]


def build_whole(model: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """The model with all its weights on the CPU, in the master dtype.

    Random weights depend on ``seed`` alone: neither the device nor the world size nor the process's own random state. A value
    model has the layers that a language model of the same section has; a head that no file holds is drawn too.

    Raises:
        CapabilityError: a family without a value head.
        EngineError: the model cannot be read, or its files lack weights.
    """
    dtype = master_dtype(model)
    if starts_random(model):
        config = load_config(model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drawn = _from_config(config, model, dtype, AutoModelForCausalLM)
        return _with_value_head(drawn, model, seed) if is_value_model(model) else drawn
    path = str(model["path"])
    auto, extra = AutoModelForCausalLM, {}
    if is_value_model(model):
        auto, extra = AutoModelForTokenClassification, {"config": value_config(model)}
    try:
        with quiet_transformers():
            result: Any = auto.from_pretrained(
                path,
                dtype=dtype,
                revision=model.get("revision"),
                trust_remote_code=bool(model.get("trust_remote_code")),
                output_loading_info=True,
                **extra,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise load_error(path, error) from error
    loaded, info = result
    missing = sorted(info["missing_keys"])
    if is_value_model(model):
        _check_value_files(path, loaded, info["unexpected_keys"])
        if VALUE_HEAD in missing:
            missing.remove(VALUE_HEAD)
            _fill_head(loaded, seed)
    if missing:
        raise EngineError(
            f"{path} lacks weights; they would start from random numbers",
            found=f"{len(missing)} missing, first {missing[0]}",
            wanted="a checkpoint of a causal language model"
            + (", or of a value model" if is_value_model(model) else ""),
            next="set model.init=random to train it from nothing",
        )
    return loaded


def build_empty(model: Mapping[str, Any]) -> PreTrainedModel:
    """The same structure on the meta device: no memory, no values."""
    value = is_value_model(model)
    config = value_config(model) if value else load_config(model)
    with torch.device("meta"):
        auto = AutoModelForTokenClassification if value else AutoModelForCausalLM
        return _from_config(config, model, master_dtype(model), auto)


def is_value_model(model: Mapping[str, Any]) -> bool:
    """Whether a ``model`` section asks for the head of a critic."""
    return model.get("model_type") == ModelType.VALUE_MODEL


def value_config(model: Mapping[str, Any]) -> PretrainedConfig:
    """The config of a value model on the layers that the section describes.

    Raises:
        CapabilityError: a family without a value head.
        ConfigError: the files are of a classifier with several labels.
    """
    config = load_config(model)
    make_value_config(config, reads_head=not starts_random(model), source=model.get("path"))
    with torch.device("meta"):
        empty = _from_config(config, model, torch.float32, AutoModelForTokenClassification)
    head = getattr(empty, "score", None)
    if not isinstance(head, nn.Linear) or empty.base_model is empty:
        raise CapabilityError(
            f"fsdp2 has no value model of {config.model_type}",
            found=f"transformers' {type(empty).__name__} has no linear head called score",
            wanted="a family whose token classifier has one, such as llama, qwen2, qwen3 or mistral",
            next="set critic.model.path to a model of such a family with the same tokens",
        )
    return config


def _with_value_head(drawn: PreTrainedModel, model: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """A value model around the layers of a language model, which is used up."""
    empty: Any = build_empty(model)
    setattr(empty, empty.base_model_prefix, drawn.base_model)
    empty.score.to_empty(device="cpu")
    _fill_head(empty, seed)
    return empty


@torch.no_grad()
def _fill_head(model: Any, seed: int) -> None:
    std = float(getattr(model.config.get_text_config(), "initializer_range", 0.02))
    model.score.weight.copy_(draw_value_head(model.score.weight.shape[1], std, seed))


def _check_value_files(path: str, loaded: Any, unexpected: Sequence[str]) -> None:
    """A bias that the files have and their config denies would be lost without a word.

    Raises:
        EngineError: there is one.
    """
    if loaded.score.bias is None and VALUE_BIAS in unexpected:
        raise EngineError(
            f"the value head of {path} has a bias that its config denies",
            found=f"{VALUE_BIAS} in its files, token_classification_bias off in config.json",
            wanted="a config that says what the files hold",
            next="set token_classification_bias to true in its config.json",
        )


def _from_config(config: PretrainedConfig, model: Mapping[str, Any], dtype: torch.dtype, auto: Any) -> PreTrainedModel:
    try:
        return auto.from_config(config, dtype=dtype, trust_remote_code=bool(model.get("trust_remote_code")))
    except (ValueError, KeyError, ImportError) as error:
        kind = "causal language model" if auto is AutoModelForCausalLM else "token classifier, which a value model is,"
        raise EngineError(
            f"transformers builds no {kind} of type {config.model_type!r}",
            found=str(error).split("\n")[0],
        ) from error


def compute_dtype(param_dtype: str, master: torch.dtype, device: torch.device) -> torch.dtype:
    """dtype of the computation, from ``engine.param_dtype``."""
    if param_dtype != "auto":
        return DTYPES[param_dtype]
    return master if device.type == "cpu" else torch.bfloat16


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only each layer's input for the backward pass.

    Raises:
        EngineError: the model cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise EngineError(
            f"{type(model).__name__} has no activation checkpointing",
            found="engine.activation_checkpointing=true",
            wanted="a model whose layers support it",
            next="set actor.engine.activation_checkpointing=false",
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
