"""The models that this backend runs, and how VeOmni's parameters relate to the tensors of a Hugging Face checkpoint.

VeOmni keeps the matrices of all experts of a layer in two parameters; checkpoints have them expert by expert. Everything else
has the same name and shape on both sides.

Shapes: E experts, D hidden size, I size of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlctl.errors import CapabilityError, ConfigError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""``model_type`` of configs. VeOmni's registry lists more; these are the ones that are compared with transformers."""

_FUSED = re.compile(r"(?P<place>.+\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_PLAIN_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]


def is_fused(name: str) -> bool:
    """Whether a parameter holds the matrices of all experts of a layer."""
    return _FUSED.fullmatch(name) is not None


def stored(name: str, shape: tuple[int, ...], first: int = 0) -> Iterator[Stored]:
    """The checkpoint tensors of a parameter, in the order in which they lie in it.

    Args:
        name: of VeOmni's parameter.
        shape: of it: ``[E, 2 I, D]`` or ``[E, D, I]`` where it holds experts.
        first: number of the first expert in it.
    """
    found = _FUSED.fullmatch(name)
    if found is None:
        yield Stored(name, shape)
        return
    parts = _PARTS[found["kind"]]
    rows, columns = shape[1] // len(parts), shape[2]
    for expert in range(first, first + shape[0]):
        for part in parts:
            yield Stored(f"{found['place']}.{expert}.{part}.weight", (rows, columns))


def check_config(config: Any) -> None:
    """Refuse a config that VeOmni would build something else from, or that was never compared.

    Raises:
        CapabilityError: a family that this backend does not run, or positions whose encoding depends on the longest row.
        ConfigError: experts with another activation than the kernels compute.
    """
    if config.model_type not in FAMILIES:
        raise CapabilityError(
            f"veomni trains no {config.model_type} here",
            found=config.model_type,
            wanted=", ".join(FAMILIES),
            next="take fsdp2, which runs any causal language model of transformers",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in _PLAIN_ROPE:
        raise CapabilityError(
            "the position encoding of this model depends on the longest row of a micro-batch",
            found=f"rope_type {kind}",
            wanted=", ".join(_PLAIN_ROPE),
            next="take fsdp2, which refuses longer rows, or runs rows of equal length",
        )
    if getattr(config, "num_experts", None) and config.hidden_act != "silu":
        raise ConfigError(
            "VeOmni's kernels for experts compute silu, whatever the config says",
            found=f"hidden_act {config.hidden_act}",
            wanted="silu",
            next="take fsdp2 or megatron",
        )
