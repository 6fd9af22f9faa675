"""Models that sequence parallelism must refuse, or run in a particular way."""

from __future__ import annotations

from typing import Any

import torch
from fsdp_helpers import CONFIGS, VOCAB
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

_LLAMA = {k: v for k, v in CONFIGS["llama"].items() if k != "model_type"}


class BorderMixingModel(LlamaModel):
    """Each hidden state takes a little of its left neighbour's, except at the start of a row: rows may be packed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        hidden, positions = out.last_hidden_state, kwargs.get("position_ids")
        before = torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        if positions is not None:
            before = torch.where((positions > 0)[..., None], before, 0.0)
        out.last_hidden_state = hidden + 0.02 * before
        return out


class BorderMixingConfig(LlamaConfig):
    model_type = "rlctl_test_border_mixing"


class BorderMixingForCausalLM(LlamaForCausalLM):
    config_class = BorderMixingConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = BorderMixingModel(config)
        self.post_init()


class CurvedHeadConfig(LlamaConfig):
    model_type = "rlctl_test_curved_head"


class CurvedHeadForCausalLM(LlamaForCausalLM):
    """A head that no scale and cap explain: the model's own forward makes the logits."""

    config_class = CurvedHeadConfig

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = torch.asinh(out.logits)
        return out


def register() -> None:
    """Make them known to transformers."""
    for config, model in (
        (BorderMixingConfig, BorderMixingForCausalLM),
        (CurvedHeadConfig, CurvedHeadForCausalLM),
    ):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)


BORDER_MIXING = {"model_type": BorderMixingConfig.model_type, **_LLAMA}
CURVED_HEAD = {"model_type": CurvedHeadConfig.model_type, **_LLAMA, "initializer_range": 0.2}
CONVOLUTION = {
    "model_type": "lfm2", **_LLAMA, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
}  # fmt: skip
RECURRENCE = {
    "model_type": "mamba", "vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SIX_HEADS = {"model_type": "llama", **_LLAMA, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
LONG_ROPE = {
    "model_type": "phi3", **_LLAMA, "pad_token_id": 0, "max_position_embeddings": 64,
    "original_max_position_embeddings": 20, "initializer_range": 0.2,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 20,
    },
}  # fmt: skip
"""Rotary frequencies change for every token once a position beyond 20 is in sight."""
DYNAMIC_ROPE = {
    "model_type": "llama", **_LLAMA, "max_position_embeddings": 20, "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}  # fmt: skip
