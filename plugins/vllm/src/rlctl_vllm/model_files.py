"""What vLLM wants on disk before it builds a model, and which tokens end a row."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedConfig

from rlctl.errors import EngineError
from rlctl.hf_config import load_error


def config_directory(config: PreTrainedConfig, architecture: str, dtype: str) -> tempfile.TemporaryDirectory[str]:
    """A directory with the config alone: weights come by a sync, and tokens are all that goes in and out."""
    folder = tempfile.TemporaryDirectory(prefix="rlctl-vllm-")
    config.architectures = [architecture]
    config.dtype = getattr(torch, dtype)
    config.save_pretrained(folder.name)
    return folder


def stored_weights(model: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The published tensors of ``model.path``.

    Raises:
        EngineError: no safetensors files there, or damaged ones.
    """
    path = str(model["path"])
    try:
        folder = Path(path)
        if not folder.is_dir():
            folder = Path(snapshot_download(path, revision=model.get("revision"), allow_patterns=["*.safetensors"]))
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise OSError(f"no *.safetensors in {folder}")
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                    yield name, opened.get_tensor(name)
    except (OSError, ValueError, SafetensorError) as error:
        raise load_error(path, error) from error


def model_tokenizer(model: Mapping[str, Any]) -> Any:
    """The tokenizer of the ``model`` section, or None where it names none and there is none beside the weights."""
    from rlctl.config.schema import ModelConfig
    from rlctl.data.tokenizer import FILES, load_tokenizer

    if not model.get("tokenizer"):
        path = model.get("path")
        if path is None or (Path(path).is_dir() and not any(Path(path, name).exists() for name in FILES)):
            return None

    return load_tokenizer(ModelConfig(**{k: v for k, v in model.items() if k in ModelConfig.model_fields}))


def end_token_ids(model: Mapping[str, Any], config: PreTrainedConfig, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a row: of the generation config, the model config and the tokenizer, which often disagree."""
    sources: list[Any] = [config, config.get_text_config(decoder=True)]
    path = model.get("path")
    if path is not None and Path(path, "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(path))
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found |= set(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    return tuple(sorted(found))


def positions_of(config: PreTrainedConfig) -> int | None:
    """The most positions that the model has; None where its config says nothing."""
    found = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return None if found is None else int(found)


def require_kernel_sizes(config: PreTrainedConfig, device: str, alignment: int) -> None:
    """Refuse experts that the CPU kernels pad: their weights could be read back, but no longer written in place.

    Raises:
        EngineError: names the size.
    """
    text = config.get_text_config(decoder=True)
    inner = getattr(text, "moe_intermediate_size", None)
    if device != "cpu" or inner is None or not (getattr(text, "num_experts", 0) or 0):
        return
    for key, size in (("moe_intermediate_size", inner), ("hidden_size", text.hidden_size)):
        if size % alignment:
            raise EngineError(
                f"the CPU kernels of vLLM do not take experts of this {key}",
                found=size,
                wanted=f"a multiple of {alignment}",
                next="take rollout.backend=hf for this model",
            )
