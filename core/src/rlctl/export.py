"""Write a stream of weights as a Hugging Face directory that ``from_pretrained`` reloads exactly.

Never holds more than one shard. The directory is written beside, synced and renamed, so that a reader finds the old
export or the new one. Imports torch and transformers inside its functions.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl import files
from rlctl.errors import CheckpointError, GuardError, RlctlError
from rlctl.records import ModelType

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from rlctl.config.schema import ModelConfig

MAX_SHARD_BYTES = 5 * 10**9


def write_hf_directory(
    weights: Iterator[tuple[str, torch.Tensor]],
    *,
    model: ModelConfig | PretrainedConfig | str | Path,
    tokenizer: Any,
    dest: Path,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    is_writer: bool = True,
    head: ModelType = ModelType.LANGUAGE_MODEL,
) -> Path:
    """Stream ``weights`` into ``dest``: safetensors shards, index, config, generation config and tokenizer.

    Args:
        weights: (Hugging Face name, full tensor), on any device; names of a loaded module (fused experts) are written
            under the names that published checkpoints have. Always consumed to its end, also on an error, so that
            ranks that take part in its collectives are not left waiting.
        model: where the config comes from: the model section of a run, a config object, or a directory or hub id.
        tokenizer: written with ``save_pretrained``; None writes none.
        dest: replaced as a whole when it exists.
        dtype: ``float32``, ``bfloat16`` or ``float16`` for floating tensors; None keeps each tensor's own.
        max_shard_bytes: largest shard; a single larger tensor gets a shard of its own.
        head: a value model is written as transformers' token classifier with one label.
        is_writer: False on ranks that only take part in the collectives of ``weights``.

    Returns:
        ``dest``.

    Raises:
        GuardError: a name is unknown, missing or repeated, or a shape is not the model's.
        CheckpointError: the directory cannot be written; an older ``dest`` is intact.
    """
    if not is_writer:
        for _ in weights:
            pass
        return dest
    beside = dest.with_name(f".tmp-{dest.name}-{os.getpid()}")
    export: _Export | None = None
    failure: Exception | None = None
    try:
        try:
            export = _Export(beside, model, dtype, max_shard_bytes, head)
        except Exception as error:  # kept until the weights are consumed (see above), then raised
            failure = error
        for name, tensor in weights:
            if export is not None and failure is None:
                try:
                    export.add(name, tensor)
                except Exception as error:  # as above
                    failure = error
        if failure is not None:
            raise failure
        assert export is not None
        export.finish(tokenizer)
        files.publish_directory(beside, dest)
    except Exception as error:
        if isinstance(error, RlctlError) or not files.is_disk_error(error):
            raise
        raise CheckpointError(
            f"the weights were not written to {dest}",
            found=f"{type(error).__name__}: {error}",
            wanted="a disk with room that can be written (an older export there is intact)",
            next="free disk space (df -h), then resume",
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return dest


class _Export:
    """The directory being written: coverage, shards and description."""

    def __init__(self, folder: Path, model: Any, dtype: str | None, max_shard_bytes: int, head: ModelType) -> None:
        import torch

        self._folder = folder
        self._model = model
        self._dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        self._config = load_model_config(model)
        if head is ModelType.VALUE_MODEL:
            from rlctl.hf_config import make_value_config

            random = getattr(model, "config", None) is not None or getattr(model, "init", None) == "random"
            make_value_config(self._config, reads_head=not random, source=getattr(model, "path", None))
        self._coverage = _Coverage.of(self._config, bool(getattr(model, "trust_remote_code", False)), head)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._writer = _ShardWriter(folder, max_shard_bytes)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        for published, value in self._coverage.take(name, tensor):
            self._writer.add(published, _own_copy(value, self._dtype))

    def finish(self, tokenizer: Any) -> None:
        self._coverage.finish()
        self._config.dtype = self._writer.float_dtype or self._config.dtype
        _write_description(self._folder, self._config, self._model, tokenizer)
        self._writer.finish()


def load_model_config(model: ModelConfig | PretrainedConfig | str | Path) -> PretrainedConfig:
    """The Hugging Face config of a model section, a directory or a hub id; a config object is copied."""
    import copy

    from transformers import AutoConfig, PretrainedConfig

    if isinstance(model, PretrainedConfig):
        return copy.deepcopy(model)
    if isinstance(model, (str, Path)):
        return AutoConfig.from_pretrained(str(model))
    if model.config is not None:
        values = dict(model.config)
        return AutoConfig.for_model(values.pop("model_type"), **values)
    return AutoConfig.from_pretrained(
        str(model.path), revision=model.revision, trust_remote_code=model.trust_remote_code
    )


@dataclass
class _Coverage:
    """Which names a model has, in the module and in published checkpoints, and which have come."""

    skeleton: PreTrainedModel
    module_names: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]
    optional: frozenset[str]
    tied: frozenset[str]
    seen: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, config: PretrainedConfig, trust_remote_code: bool, head: ModelType) -> _Coverage:
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

        value = head is ModelType.VALUE_MODEL
        auto = AutoModelForTokenClassification if value else AutoModelForCausalLM
        with torch.device("meta"):
            skeleton: Any = auto.from_config(config, trust_remote_code=trust_remote_code)
        if value and not getattr(config, "token_classification_bias", True):
            skeleton.score.bias = None  # transformers before 5.17 does not know the key
        state = skeleton.state_dict()
        tied = frozenset(getattr(skeleton, "all_tied_weights_keys", None) or {})
        published = _publish(skeleton, {k: v for k, v in state.items() if k not in tied})
        parameters = dict(skeleton.named_parameters(remove_duplicate=False))
        buffers = _publish(skeleton, {k: v for k, v in state.items() if k not in parameters})
        config.architectures = [type(skeleton).__name__]
        return cls(
            skeleton,
            frozenset(state),
            {name: tuple(tensor.shape) for name, tensor in published.items()},
            frozenset(buffers),
            tied,
        )

    def take(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The published (name, tensor) pairs of one exported tensor; none for a tied copy."""
        if name in self.seen:
            raise GuardError(
                "the export repeats a weight",
                found=f"{name} twice",
                wanted="each name once",
                next="report it to the author of the training backend",
            )
        self.seen.add(name)
        if name in self.tied:
            return []
        known = name in self.shapes or name not in self.module_names
        pairs = {name: tensor} if known else _publish(self.skeleton, {name: tensor})
        for published, value in pairs.items():
            wanted = self.shapes.get(published)
            if wanted is None:
                raise GuardError(
                    "the export has a weight that the model has not",
                    found=name,
                    wanted=f"names of {type(self.skeleton).__name__}, for example {next(iter(self.shapes), '')}",
                )
            if tuple(value.shape) != wanted:
                raise GuardError(
                    f"the exported {published} has another shape than the model's",
                    found=tuple(value.shape),
                    wanted=wanted,
                )
            self.seen.add(published)
        return list(pairs.items())

    def finish(self) -> None:
        missing = sorted(set(self.shapes) - self.seen - self.optional)
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise GuardError(
                "the export does not cover the model",
                found=f"{len(missing)} of {len(self.shapes)} weights missing: {shown}",
                wanted="every weight of the model once",
                next="report it to the author of the training backend",
            )


def _publish(skeleton: PreTrainedModel, state: dict[str, Any]) -> dict[str, Any]:
    """Module names to the names of published checkpoints (experts one by one), as ``save_pretrained`` does."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(skeleton, state) if state else {}


class _ShardWriter:
    """Collects tensors up to a shard's size, writes it, forgets it. Names are final once the count is known."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self.float_dtype: torch.dtype | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += size
        self._total_bytes += size
        if self.float_dtype is None and tensor.is_floating_point():
            self.float_dtype = tensor.dtype

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._pending, self._folder / f"shard-{len(self._shards)}", metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending = {}
        self._pending_bytes = 0

    def finish(self) -> None:
        if self._pending:
            self._flush()
        count = len(self._shards)
        for index in range(count):
            # safetensors writes for its owner alone; a model is as readable as the run's other files.
            shutil.copymode(self._folder / "config.json", self._folder / f"shard-{index}")
        if count == 1:
            os.rename(self._folder / "shard-0", self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            os.rename(self._folder / f"shard-{index}", self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        body = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def _own_copy(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A contiguous CPU copy: an engine may reuse the buffer of what it yielded for the next name."""
    import torch

    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device="cpu", dtype=wanted, copy=True, memory_format=torch.contiguous_format)


def _write_description(folder: Path, config: PretrainedConfig, model: Any, tokenizer: Any) -> None:
    """Config, generation config, tokenizer and, for models with their own code, that code."""
    from transformers import GenerationConfig
    from transformers.utils.hub import cached_file

    config.save_pretrained(folder)
    source = model if isinstance(model, (str, Path)) else getattr(model, "path", None)
    found = None
    if source is not None:
        found = cached_file(
            str(source),
            "generation_config.json",
            revision=getattr(model, "revision", None),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    if found is not None:
        shutil.copyfile(found, folder / "generation_config.json")
    else:
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if source is not None and getattr(config, "auto_map", None) and Path(source).is_dir():
        for code in Path(source).glob("*.py"):
            shutil.copyfile(code, folder / code.name)
