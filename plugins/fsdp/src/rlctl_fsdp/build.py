"""A Hugging Face causal LM from a ``model`` section: weights on the CPU, or the same structure without memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from rlctl.errors import ConfigError, EngineError
from rlctl.hf_config import load_config, load_error, starts_random

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
        raise load_error(path, error) from error
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
