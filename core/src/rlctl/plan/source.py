"""A model's ``config.json`` and files, found without a network and without anything being converted."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.config.schema import ModelConfig
from rlctl.errors import ConfigError
from rlctl.models import converted_directory

_MAX_CONFIG_BYTES = 4 * 2**20


@dataclass(frozen=True)
class ModelSource:
    """What is at hand of a model.

    Args:
        config: its Hugging Face config, or None.
        directory: where its files are, or None.
        words: where the config was found.
        missing: why there is none, and what would bring it; empty when there is one.
    """

    config: Mapping[str, Any] | None = None
    directory: Path | None = None
    words: str = ""
    missing: str = ""


def find_model(model: ModelConfig) -> ModelSource:
    """Look at ``model.config``, a local directory, a converted package, or the hub's cache on this machine."""
    if model.config is not None:
        return ModelSource(model.config, None, "model.config")
    path = str(model.path)
    if path.startswith(("package:", "gguf:")):
        return _converted(path, model.dtype)
    directory = Path(path)
    if directory.is_dir():
        return _read(directory, f"{path}/config.json")
    cached = _hub_cache(path, model.revision)
    if cached is not None:
        return _read(cached, f"{path} in the hub's cache")
    return ModelSource(
        missing=f"{path} is not on this machine: give a local directory with config.json (rlctl plan asks no hub)"
    )


def _converted(path: str, dtype: str) -> ModelSource:
    try:
        directory = converted_directory(path, "model.path", dtype)
    except ConfigError as error:
        return ModelSource(missing=f"{error.what} ({error.found})" + (f": {error.next}" if error.next else ""))
    if directory is None:
        return ModelSource(missing=f"{path} is not converted yet: rlctl train or rlctl data check converts it once")
    return _read(directory, f"{path}, converted")


def _read(directory: Path, words: str) -> ModelSource:
    try:
        with (directory / "config.json").open("rb") as stream:
            config = json.loads(stream.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        return ModelSource(None, directory, "", f"{directory}/config.json cannot be read: {error}")
    if not isinstance(config, dict):
        return ModelSource(None, directory, "", f"{directory}/config.json is no JSON object")
    return ModelSource(config, directory, words)


def _hub_cache(name: str, revision: str | None) -> Path | None:
    """The snapshot of a hub id that an earlier download left, by the layout of huggingface_hub's cache."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    root = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    folder = root / ("models--" + name.replace("/", "--"))
    try:
        ref = folder / "refs" / (revision or "main")
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision or ""
        snapshot = folder / "snapshots" / commit
        return snapshot if commit and (snapshot / "config.json").is_file() else None
    except (OSError, ValueError):
        return None
