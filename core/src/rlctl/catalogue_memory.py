"""How backends keep a model in memory, for ``rlctl plan``: data, like the rest of the catalogue.

Only what ``checked`` says was compared with live bytes; the others follow what the backend's own documentation says it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryPolicy:
    """What a training engine keeps for each parameter, and over which axes it shares it.

    dtypes are ``master`` (``model.dtype``), ``compute`` (the dtype of matrix products), ``main`` (float32, beside weights of a
    lower precision only) or a name.

    Args:
        weights, gradients: dtype between calls.
        optimizer: (name, dtype) of each tensor that the optimizer keeps.
        sharded: which of ``weights``, ``gradients``, ``optimizer`` the ranks of dp_shard share; the others are whole on each.
        buffered_gradients: gradients are added up in buffers that live as long as the engine, beside weights: they take memory
            while others generate or score, too.
        gathers: layers are gathered whole for use.
        shards_optimizer: key of the engine's section that is ``always``, ``never``, or ``auto`` (AdamW's, between two or more
            replicas) where the optimizer's share of ``sharded`` is a choice; empty where it is none.
        autocast: one rank alone keeps its weights and casts the operands of each product.
        lends_module: on one rank alone, an embedded rollout may generate from the training module itself.
        chunked_logits: logits are worked on in chunks, within ``logits_budget_mib`` of the engine's section.
        checkpointing: key of the engine's section, and its values without and with recomputed layers.
        param_offload, optimizer_offload, reshard, compute, reduce, wrap: keys of the engine's section.
        checked: the model of this backend's memory is compared with live bytes in the test suite.
    """

    weights: str = "master"
    gradients: str = "master"
    optimizer: tuple[tuple[str, str], ...] = (("first Adam moment", "master"), ("second Adam moment", "master"))
    sharded: tuple[str, ...] = ("weights", "gradients", "optimizer")
    buffered_gradients: bool = False
    gathers: bool = True
    shards_optimizer: str = ""
    autocast: bool = False
    lends_module: bool = False
    chunked_logits: bool = False
    checkpointing: tuple[str, object, object] = ("activation_checkpointing", False, True)
    param_offload: str = "param_offload"
    optimizer_offload: str = "optimizer_offload"
    reshard: str = "reshard_after_forward"
    compute: str = "param_dtype"
    reduce: str = "reduce_dtype"
    wrap: str = "wrap"
    checked: bool = False


@dataclass(frozen=True)
class RolloutPolicy:
    """What a rollout engine keeps.

    Args:
        shares_module: it can generate from the training module itself when both live in one process.
        rows_key, tokens_key: keys of its section that bound what is decoded together; empty: it pages its cache.
        prefill_tokens: prompt tokens that it reads in one pass; 0 where it is not known.
        dtype_key: key of its section with the dtype of an own copy of the weights.
        cache_key: key of its section with the MiB of a cache that is set aside at the start, whatever is decoded later.
        cache_mib_on_cpu: what it sets aside on a CPU where that key is not set.
    """

    shares_module: bool = False
    rows_key: str = ""
    tokens_key: str = ""
    prefill_tokens: int = 0
    dtype_key: str = "dtype"
    cache_key: str = ""
    cache_mib_on_cpu: int = 0


_MEGATRON = MemoryPolicy(
    weights="compute",
    gradients="float32",
    optimizer=(("float32 master copy", "main"), ("first Adam moment", "float32"), ("second Adam moment", "float32")),
    sharded=("optimizer",),
    buffered_gradients=True,
    gathers=False,
    shards_optimizer="distributed_optimizer",
    chunked_logits=True,
    checkpointing=("recompute", "none", "full"),
)

TRAIN: Mapping[str, MemoryPolicy] = {
    "fsdp2": MemoryPolicy(autocast=True, lends_module=True, chunked_logits=True, checked=True),
    "megatron": _MEGATRON,
    "veomni": MemoryPolicy(chunked_logits=True),
    "mindspeed_megatron": _MEGATRON,
}
"""By backend name. A backend that is not here shares everything over dp_shard and gathers layers, as FSDP does."""

ROLLOUT: Mapping[str, RolloutPolicy] = {
    "hf": RolloutPolicy(
        shares_module=True, rows_key="max_batch_rows", tokens_key="max_batch_tokens", prefill_tokens=16_384
    ),
    "vllm": RolloutPolicy(cache_key="kv_cache_mib", cache_mib_on_cpu=256),
}


def train_policy(backend: str) -> MemoryPolicy:
    """How ``backend`` keeps a model that it trains."""
    return TRAIN.get(backend, MemoryPolicy())


def rollout_policy(backend: str) -> RolloutPolicy:
    """How ``backend`` keeps a model that it generates with."""
    return ROLLOUT.get(backend, RolloutPolicy())
