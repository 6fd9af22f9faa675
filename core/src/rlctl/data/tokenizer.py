"""The tokenizer of a model. transformers is imported inside: its Auto classes import torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl import extensions
from rlctl.data.faults import show_path
from rlctl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlctl.config.schema import ModelConfig

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load ``model.tokenizer`` or the tokenizer beside ``model.path``; ``model.chat_template`` replaces its template.

    ``model.path`` must be a directory or hub id here (:func:`rlctl.models.resolve_model_source` has seen to that).
    Importing transformers' AutoTokenizer takes torch with it (checked with transformers 5.24), so call this after
    everything that needs no tokenizer.

    Raises:
        DataError: there is no tokenizer, or it does not load.
    """
    source = model.tokenizer or model.path
    assert source is not None, "ModelConfig asks for one of them"
    setting = "model.tokenizer" if model.tokenizer else "model.path"
    directory = Path(source)
    if directory.is_dir() and not any((directory / name).exists() for name in FILES):
        raise DataError(
            f"the directory {show_path(source)} ({setting}) holds no tokenizer",
            found=", ".join(sorted(child.name for child in directory.iterdir())[:8]) or "nothing",
            wanted="tokenizer.json or tokenizer.model",
            next="model.tokenizer=DIRECTORY_OR_HUB_ID",
        )
    if not directory.is_dir() and (source.startswith(("/", ".", "~")) or source.count("/") > 1):
        raise DataError(f"there is no directory {show_path(source)} ({setting})", next=f"check {setting}")
    if importlib.util.find_spec("transformers") is None:
        raise DataError(
            "tokenizers need the transformers library, which is not installed", next="pip install rlctl-plugin-fsdp"
        )
    extensions.shield()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:  # the library raises OSError, ValueError, KeyError, its own and Rust's plain Exception
        reason = str(error).strip().splitlines()
        raise DataError(
            f"the tokenizer of {show_path(source) if directory.is_dir() else source} ({setting}) does not load",
            found=f"{type(error).__name__}: {reason[0] if reason else ''}",
            wanted="a directory with a tokenizer, or a hub id that this machine can reach",
            next=f"check {setting}" + ("" if directory.is_dir() else ", the network, and HF_HOME"),
        ) from error
    if model.chat_template is not None:
        tokenizer.chat_template = model.chat_template
    return tokenizer
