"""A Hugging Face causal LM from a ``model`` section: weights on the CPU, or the same structure without memory."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from rlctl.errors import ConfigError, EngineError

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


def load_config(model: Mapping[str, Any]) -> PretrainedConfig:
    """The Hugging Face config of a ``model`` section (``path`` or ``config``).

    Raises:
        ConfigError: an unknown model_type or a key that the config class does not have.
        EngineError: no config at ``path``.
    """
    if model.get("config") is not None:
        return _config_from_mapping(dict(model["config"]))
    path = model.get("path")
    assert path, "the model section has a path or a config"
    try:
        return AutoConfig.from_pretrained(
            path, revision=model.get("revision"), trust_remote_code=bool(model.get("trust_remote_code"))
        )
    except (OSError, ValueError, KeyError) as error:
        raise _load_error(path, error) from error


def _config_from_mapping(values: dict[str, Any]) -> PretrainedConfig:
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise ConfigError("model.config has no model_type", wanted="for example model_type: llama")
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError as error:
        known_types = list(CONFIG_MAPPING)
        near = difflib.get_close_matches(str(model_type), known_types, n=1)
        raise ConfigError(
            f"transformers knows no model_type {model_type!r}",
            found=model_type,
            wanted=f"one of its {len(known_types)} model types" + (f", such as {near[0]}" if near else ""),
        ) from error
    # Config classes take any keyword in silence, so a typo would train another model than the one written down. Some
    # models read keys that their class does not declare: only near misses are refused.
    known = set(default.to_dict()) | set(default.attribute_map)
    for key in sorted(set(values) - known):
        near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.85)
        if near:
            raise ConfigError(
                f"the config of {model_type} has no key {key!r}",
                found=f"model.config.{key}",
                wanted=near[0],
                next=f"write model.config.{near[0]}",
            )
    try:
        return AutoConfig.for_model(model_type, **values)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError("model.config is refused by transformers", found=str(error)) from error


def starts_random(model: Mapping[str, Any]) -> bool:
    """True when the weights are drawn from a seed instead of being read."""
    return model.get("config") is not None or model.get("init") == "random"


def build_whole(model: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """The model with all its weights on the CPU, in the master dtype.

    Random weights depend on ``seed`` alone: neither the device nor the world size nor the process's own random state.

    Raises:
        EngineError: the model cannot be read, or its files lack weights.
    """
    dtype = master_dtype(model)
    if starts_random(model):
        config = load_config(model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _from_config(config, model, dtype)
    path = str(model["path"])
    try:
        with _no_progress_bars():
            result: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                revision=model.get("revision"),
                trust_remote_code=bool(model.get("trust_remote_code")),
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _load_error(path, error) from error
    loaded, info = result
    missing = sorted(info["missing_keys"])
    if missing:
        raise EngineError(
            f"{path} lacks weights; they would start from random numbers",
            found=f"{len(missing)} missing, first {missing[0]}",
            wanted="a checkpoint of a causal language model",
            next="set model.init=random to train it from nothing",
        )
    return loaded


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """The command line shows progress itself; transformers' bars would run through it."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def build_empty(model: Mapping[str, Any]) -> PreTrainedModel:
    """The same structure on the meta device: no memory, no values."""
    config = load_config(model)
    with torch.device("meta"):
        return _from_config(config, model, master_dtype(model))


def _from_config(config: PretrainedConfig, model: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=bool(model.get("trust_remote_code"))
        )
    except (ValueError, KeyError, ImportError) as error:
        raise EngineError(
            f"transformers builds no causal language model of type {config.model_type!r}",
            found=str(error).split("\n")[0],
        ) from error


def _load_error(path: object, error: Exception) -> EngineError:
    return EngineError(
        f"the model {path} cannot be loaded",
        found=str(error).strip().split("\n")[0],
        wanted="a local Hugging Face directory with config.json, or a hub id",
        next="check model.path (a path in a file is relative to that file)",
    )
