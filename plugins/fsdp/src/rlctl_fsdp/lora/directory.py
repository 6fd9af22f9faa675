"""Adapters alone, as the directory that peft reads: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from rlctl import files
from rlctl_fsdp.lora.inject import NAME
from rlctl_fsdp.lora.merge import adapter_tensors, whole

_PREFIX = "base_model.model."
"""peft's names are those of its wrapper around the model."""


@torch.no_grad()
def write_adapters(model: PreTrainedModel, dest: Path, base: str | None, *, writer: bool) -> None:
    """Write ``dest``, replacing it as a whole. Collective: every rank takes part, one writes.

    Args:
        base: what ``base_model_name_or_path`` says; None for a model from a config, which has no path.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in adapter_tensors(model).items():
        value = whole(tensor)
        if writer:
            # peft's files leave the adapter's own name out.
            tensors[_PREFIX + name.replace(f".{NAME}.", ".")] = value.cpu().clone().contiguous()
    if not writer:
        return
    held: Any = model
    config = copy.deepcopy(held.peft_config[NAME])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.target_modules = sorted(config.target_modules)  # a set, whose order would differ from run to run
    beside = dest.with_name(f".tmp-{dest.name}-{os.getpid()}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save_file(tensors, beside / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(beside))
        shutil.copymode(beside / "adapter_config.json", beside / "adapter_model.safetensors")
        files.publish_directory(beside, dest)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
