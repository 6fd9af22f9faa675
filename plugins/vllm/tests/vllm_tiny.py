"""Tiny models whose sizes vLLM's CPU kernels take, their weights, and an engine that serves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlctl.config.schema import ModelConfig
from rlctl.engine import Engine
from rlctl.records import BackendKind
from rlctl.topology import Topology

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    # No multiple of what a vocabulary is padded to.
    "vocab_size": 35,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
QWEN2_TIED: dict[str, Any] = {
    **{k: v for k, v in LLAMA.items() if k != "head_dim"},
    "model_type": "qwen2",
    "tie_word_embeddings": True,
}
QWEN3: dict[str, Any] = {**LLAMA, "model_type": "qwen3"}
QWEN3_MOE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def hf_model(config: Mapping[str, Any], seed: int) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**dict(config)))
        for name, parameter in module.named_parameters():
            # Biases start at zero, which would hide one in the wrong place.
            if name.endswith("bias"):
                parameter.data.normal_(0, 0.2)
    return module.eval()


def weights_of(module: PreTrainedModel) -> dict[str, torch.Tensor]:
    tied = set(getattr(module, "all_tied_weights_keys", None) or {})
    return {name: t.detach().clone() for name, t in module.state_dict().items() if name not in tied}


def make_engine(
    config: Mapping[str, Any] | None = None, model: Mapping[str, Any] | None = None, **settings: Any
) -> Engine:
    """A built engine; ``model`` is its section, or made from ``config``."""
    from rlctl_vllm.config import VLLMConfig
    from rlctl_vllm.engine import VLLMRollout

    engine = Engine(VLLMRollout(), BackendKind.ROLLOUT, "vllm")
    defaults = {name: field.get_default() for name, field in ModelConfig.model_fields.items()}
    section = {**defaults, **(model or {"config": dict(config or LLAMA)})}
    values = {**VLLMConfig(**settings).model_dump(), "device": "cpu"}
    engine.build(Topology(), values, {**section, "seed": 0}, None, True)
    return engine
