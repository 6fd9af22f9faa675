"""The fsdp2 backend under the suite that every training backend must pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlctl.testing import TrainConformance

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    # Wider than a real model's 0.02: a flat random distribution would show little of what is compared.
    "initializer_range": 0.2,
}
NEOX: dict[str, Any] = {
    "model_type": "gpt_neox",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


class TestPlain(TrainConformance):
    backend = "fsdp2"
    model: ClassVar[Mapping[str, Any]] = {"config": LLAMA}
    vocab_size = 32
    dropout_model: ClassVar[Mapping[str, Any] | None] = {"config": {**NEOX, "hidden_dropout": 0.5}}


class TestSharded(TestPlain):
    """Wrapped by fully_shard on one rank, with activation checkpointing and offload: the same promises."""

    settings: ClassVar[Mapping[str, Any]] = {
        "wrap": "always",
        "activation_checkpointing": True,
        "param_offload": True,
        "optimizer_offload": True,
    }


class TestTiedAndChunked(TestPlain):
    """A tied head, rows one by one, and logits in chunks."""

    model: ClassVar[Mapping[str, Any]] = {"config": {**LLAMA, "tie_word_embeddings": True}}
    settings: ClassVar[Mapping[str, Any]] = {"attention": "per_row", "logits_budget_mib": 1}
