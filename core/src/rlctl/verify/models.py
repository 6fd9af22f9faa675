"""A user's model directory: is it one that both sides can load, and is it without dropout."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError
from rlctl.records import ModelType

_CLASSIFIERS = ("ForTokenClassification", "ForSequenceClassification")
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


def head_of(directory: Path) -> ModelType:
    """Which head the weights of a directory have, by the architecture that its config names.

    Raises:
        ConfigError: the config cannot be read, or a classifier has more labels than one.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("the config of the model to verify with cannot be read", found=f"{path}: {error}") from error
    names = [str(n) for n in config.get("architectures") or ()]
    if not any(name.endswith(_CLASSIFIERS) for name in names):
        return ModelType.LANGUAGE_MODEL
    # transformers writes the labels unless there are two of them.
    labels = len(config.get("id2label") or ("", ""))
    if labels != 1:
        raise ConfigError(
            "the model to verify with is no value model",
            found=f"{', '.join(names)} with {labels} labels in {directory}",
            wanted="one label: a value model says one number a token",
            next="--model tiny:qwen3",
        )
    return ModelType.VALUE_MODEL


def without_dropout(directory: Path, into: Path) -> tuple[Path, str]:
    """(the directory, or a copy of it whose config drops nothing; the keys that were changed).

    Training with dropout is random, so two runs of it cannot be compared. Weights are linked, not copied.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    changed: list[str] = []
    _silence(config, "", changed)
    if head_of(directory) is ModelType.VALUE_MODEL and "classifier_dropout" not in config:
        # Left to itself transformers drops a tenth in front of this head.
        config["classifier_dropout"] = 0.0
        changed.append("classifier_dropout")
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
