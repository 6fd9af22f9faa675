"""A user's model directory: is it one that both sides can load, and is it without dropout."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError

_DROPOUT = re.compile(r"dropout|_pdrop")


def require_model(directory: Path) -> None:
    """Refuse what is no Hugging Face directory with safetensors files.

    Raises:
        ConfigError: the directory, its config or its weights are missing.
    """
    if not (directory / "config.json").is_file():
        raise ConfigError(
            "the model to verify with is no Hugging Face directory",
            found=f"no config.json in {directory}" if directory.is_dir() else f"no directory {directory}",
            wanted="a local directory with config.json and safetensors files, or tiny:FAMILY",
            next="--model tiny:qwen3",
        )
    if not list(directory.glob("*.safetensors")):
        raise ConfigError(
            "the weights of the model to verify with cannot be compared",
            found=f"no safetensors file in {directory}",
            wanted="weights in safetensors files",
            next="load it with transformers and save it again with save_pretrained",
        )


def without_dropout(directory: Path, into: Path) -> tuple[Path, str]:
    """(the directory, or a copy of it whose config drops nothing; the keys that were changed).

    Training with dropout is random, so two runs of it cannot be compared. Weights are linked, not copied.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    changed: list[str] = []
    _silence(config, "", changed)
    if not changed:
        return directory, ""
    copy = into / f"{directory.name}-without-dropout"
    copy.mkdir(parents=True)
    for path in directory.iterdir():
        if path.name != "config.json":
            os.symlink(path.resolve(), copy / path.name)
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy, ", ".join(changed)


def _silence(config: dict[str, Any], prefix: str, changed: list[str]) -> None:
    for key, value in config.items():
        if isinstance(value, dict):
            _silence(value, f"{prefix}{key}.", changed)
        elif _DROPOUT.search(key) and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            config[key] = 0.0
            changed.append(f"{prefix}{key}")
