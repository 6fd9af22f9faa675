"""How many weights a model has: counted from its sizes, or read from the headers of its files.

Legend as in :mod:`rlctl.plan.shapes`: D hidden, F feed-forward, H query heads, G key/value heads, E head size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from rlctl.plan.shapes import ModelShape

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True)
class LayerCount:
    """Weights of one layer: ``matrices`` (two dimensions or more) and ``vectors`` (biases, norms), and how many such."""

    num_layers: int
    matrices: int
    vectors: int

    @property
    def parameters(self) -> int:
        return self.matrices + self.vectors


@dataclass(frozen=True)
class ParameterCount:
    """Weights of a model by where they are.

    Args:
        embedding: V x D.
        head: V x D, 0 where it is the embedding's own matrix.
        final: the last norm.
        layers: kinds of layers.
        unused: weights that text never reaches; they get neither gradients nor moments.
    """

    embedding: int
    head: int
    final: int
    layers: tuple[LayerCount, ...]
    unused: int = 0

    @property
    def total(self) -> int:
        return self.outside_layers + sum(kind.num_layers * kind.parameters for kind in self.layers)

    @property
    def outside_layers(self) -> int:
        return self.embedding + self.head + self.final + self.unused

    @property
    def trained(self) -> int:
        return self.total - self.unused

    @property
    def largest_layer(self) -> LayerCount:
        return max(self.layers, key=lambda kind: kind.parameters)

    @property
    def layer_matrices(self) -> int:
        """Elements of all matrices inside layers."""
        return sum(kind.num_layers * kind.matrices for kind in self.layers)


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Count exactly, as ``sum(p.numel() for p in model.parameters())`` does."""
    wide = shape.vocab_size * shape.hidden_size
    norm = shape.hidden_size * (2 if shape.family.norm == "layer" else 1)
    kinds = []
    dense = shape.num_layers - shape.moe_layers
    if dense:
        kinds.append(_layer(shape, dense, moe=False))
    if shape.moe_layers:
        kinds.append(_layer(shape, shape.moe_layers, moe=True))
    return ParameterCount(wide, 0 if shape.tied else wide, norm, tuple(kinds), shape.unused_parameters)


def _layer(shape: ModelShape, num: int, *, moe: bool) -> LayerCount:
    d, q, kv, f = shape.hidden_size, shape.query_size, shape.kv_size, shape.intermediate_size
    matrices = d * (q + 2 * kv) + q * d
    vectors = (q + 2 * kv if shape.qkv_bias else 0) + (d if shape.out_bias else 0)
    vectors += 2 * shape.head_dim if shape.family.qk_norm else 0
    norms = 4 if shape.family.post_norms else 2
    vectors += norms * d * (2 if shape.family.norm == "layer" else 1)
    if moe:
        # Experts are kept as two tensors of three dimensions; the router is a matrix of D x experts.
        matrices += shape.num_experts * 3 * d * shape.expert_size + shape.num_experts * d
    else:
        matrices += (3 if shape.family.gated else 2) * d * f
        vectors += ((2 if shape.family.gated else 1) * f + d) if shape.mlp_bias else 0
    return LayerCount(num, matrices, vectors)


def count_in_files(directory: Path) -> int | None:
    """Elements of all tensors in a directory's safetensors files, from their headers alone; None when there are none.

    A file that its index names and that is not there makes the answer None: a part of the weights is no count.
    """
    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        else:
            names = {path.name for path in directory.glob("*.safetensors")}
        counts = [_elements(directory / str(name)) for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return sum(counts) or None


def _elements(path: Path) -> int:
    """Elements in one safetensors file: an eight-byte length and a JSON header come before the data."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} has no safetensors header")
        header = json.loads(stream.read(length))
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
