"""A ``model`` section's Hugging Face config, checked for the mistakes that transformers takes in silence.

Imports transformers, which training plugins depend on; nothing of core imports this module on its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from rlctl.errors import ConfigError, EngineError
from rlctl.models import require_language_model
from rlctl.records import ModelType


def load_config(model: Mapping[str, Any]) -> PretrainedConfig:
    """The Hugging Face config of a ``model`` section (``path`` or ``config``).

    Raises:
        ConfigError: an unknown model_type, a key that the config class does not have, or another head than a language model's
            where one is asked for (``model_type``).
        EngineError: no config at ``path``.
    """
    if model.get("config") is not None:
        return _config_from_mapping(dict(model["config"]))
    path = model.get("path")
    assert path, "the model section has a path or a config"
    try:
        found = AutoConfig.from_pretrained(
            path, revision=model.get("revision"), trust_remote_code=bool(model.get("trust_remote_code"))
        )
    except (OSError, ValueError, KeyError) as error:
        raise load_error(path, error) from error
    if model.get("model_type", ModelType.LANGUAGE_MODEL) == ModelType.LANGUAGE_MODEL:
        require_language_model(found.architectures, path)
    return found


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


def load_error(path: object, error: Exception) -> EngineError:
    """The error of a model that cannot be read."""
    return EngineError(
        f"the model {path} cannot be loaded",
        found=str(error).strip().split("\n")[0],
        wanted="a local Hugging Face directory with config.json, or a hub id",
        next="check model.path (a path in a file is relative to that file)",
    )


def make_value_config(config: PretrainedConfig, *, reads_head: bool, source: object = "model.config") -> None:
    """Change a config into that of a value model on the same layers: transformers' token classifier with one label.

    A fresh head has no bias. Files that have a head keep what they have, which transformers takes to be a bias too unless their
    config says not. Nothing is dropped in front of the head.

    Args:
        reads_head: the weights come from files; those of a token classifier have a head.
        source: what messages call the model.

    Raises:
        ConfigError: the files are of a classifier with several labels.
    """
    is_classifier = any(str(n).endswith("ForTokenClassification") for n in config.architectures or ())
    if is_classifier and reads_head and config.num_labels != 1:
        raise ConfigError(
            f"{source} is no value model",
            found=f"a classifier of {config.num_labels} labels",
            wanted="one label, or a language model, which gets a fresh value head",
            next="set critic.model.path",
        )
    config.num_labels = 1
    config.classifier_dropout = 0.0
    has_bias = is_classifier and reads_head and getattr(config, "token_classification_bias", True)
    config.token_classification_bias = bool(has_bias)
