"""The veomni backend under the suite that every training backend must pass."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from rlctl.testing import TrainConformance

if importlib.util.find_spec("veomni") is None:  # not imported here: it would log all it does
    pytest.skip(
        "veomni is not installed (rlctl-plugin-veomni; it has an environment of its own)", allow_module_level=True
    )

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    # Not a power of two, and no multiple of anything that a vocabulary is padded to.
    "vocab_size": 35,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    # Wider than a real model's 0.02: a flat random distribution would show little of what is compared.
    "initializer_range": 0.2,
}
QWEN3_MOE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}


class TestVeOmni(TrainConformance):
    backend = "veomni"
    model: ClassVar[Mapping[str, Any]] = {"config": LLAMA}
    vocab_size = 35


class TestVeOmniWithEverything(TestVeOmni):
    """Experts, a tied head, layers computed again and logits in chunks."""

    model: ClassVar[Mapping[str, Any]] = {"config": QWEN3_MOE}
    settings: ClassVar[Mapping[str, Any]] = {
        "experts": "eager",
        "activation_checkpointing": True,
        "logits_budget_mib": 1,
        "share_prompts": False,
    }
