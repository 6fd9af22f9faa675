"""Records of the memory model: what is held, at which moment, under which setting. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlctl.catalogue_memory import MemoryPolicy
from rlctl.plan.parameters import DTYPE_BYTES

GIB = 2**30


@dataclass(frozen=True)
class Item:
    """One thing that takes memory.

    Args:
        name: weights, gradients, optimizer, activations, logits, gathered weights, working memory ...
        role: actor, ref, rollout ...
        num_bytes: on this rank.
        formula: how the number comes about, in words.
    """

    name: str
    role: str
    num_bytes: int
    formula: str


@dataclass(frozen=True)
class Moment:
    """Everything that a rank holds at one moment of a step."""

    name: str
    items: tuple[Item, ...]

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


@dataclass(frozen=True)
class Load:
    """The largest micro-batch of a rank, already divided by the ranks that share its sequence.

    Args:
        tokens: that the model runs.
        scored: tokens whose logits are needed.
        longest: tokens of the longest row.
        ragged: rows of several lengths.
        micro_batches: of one optimizer step.
        entropy: the loss reads the entropy beside log-probs.
        scaled: logits are divided by a temperature other than 1.
    """

    tokens: int
    scored: int
    longest: int
    ragged: bool = True
    micro_batches: int = 1
    entropy: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class Setting:
    """How a training engine runs.

    Args:
        shards: ranks that share one replica's state.
        moments: the optimizer keeps state (plain gradient descent keeps none); ``moments_away``: on the host between steps.
        wrapped: layers are gathered for use; False for a plain module on one rank.
        reshard: gathered layers are freed after the forward pass and gathered again.
        checkpointing: only each layer's input is kept.
        logits_budget: bytes of logits that are kept for the backward pass; None where all of them are kept.
        chunk_bytes: float32 logits of one chunk.
        flash: see :func:`rlctl.plan.activations.layer_saved`.
        reduce: dtype of the gradient reduction.
        tp, pp, ep: ranks that share a layer's matrices, stages that share the layers, ranks that share the experts.
    """

    policy: MemoryPolicy = field(default_factory=MemoryPolicy)
    shards: int = 1
    moments: bool = True
    moments_away: bool = False
    wrapped: bool = False
    reshard: bool = True
    checkpointing: bool = False
    logits_budget: int | None = 1 << 30
    chunk_bytes: int = 8 << 20
    flash: bool = False
    reduce: str = "float32"
    tp: int = 1
    pp: int = 1
    ep: int = 1


def state_bytes(num_parameters: int, weights: int, gradients: int, moments: Sequence[int], shards: int = 1) -> int:
    """Bytes a rank of weights, gradients and optimizer state, each given in bytes a parameter, over ``shards`` ranks."""
    return -(-num_parameters * (weights + gradients + sum(moments)) // shards)


def tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a dense tensor."""
    size = DTYPE_BYTES[dtype]
    for dim in shape:
        size *= dim
    return size


def kv_bytes_a_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes of keys and values that one token leaves in the cache: 2 x layers x key/value heads x head size x dtype."""
    return tensor_bytes((2, num_layers, num_kv_heads, head_dim), dtype)
