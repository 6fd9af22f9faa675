"""The hf rollout under the suite that every rollout backend must pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.testing import RolloutConformance

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


class TestLlama(RolloutConformance):
    backend = "hf"
    model: ClassVar[Mapping[str, Any]] = {"config": LLAMA}
    vocab_size = 32

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        config = dict(self.model["config"])
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        tied = set(module._tied_weights_keys or ()) if module.config.tie_word_embeddings else set()
        return {name: t.detach().clone() for name, t in module.state_dict().items() if name not in tied}


class TestTiedQwen(TestLlama):
    """A tied head, whose export has one name for both; one engine serves all tests."""

    fresh_engine = False

    model: ClassVar[Mapping[str, Any]] = {
        "config": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True, "initializer_range": 0.5}
    }
