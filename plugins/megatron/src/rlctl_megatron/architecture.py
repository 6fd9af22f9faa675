"""What a Hugging Face config comes to in megatron-core: the fields of its ``TransformerConfig``, and what is refused.

Everything that a config can ask for and megatron's local modules would do otherwise is refused here, by name: a silent
difference would train another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlctl.errors import CapabilityError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
_MOE = ("qwen3_moe", "mixtral")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Architecture:
    """A model's shape.

    Args:
        model_type: of the Hugging Face config.
        vocab_size: real rows of the embedding.
        tied: embedding and head are one weight.
        transformer: fields of ``TransformerConfig`` that do not depend on the ranks.
        inv_freq: ``[head_dim / 2]`` rotary frequencies, float32.
        max_positions: longest row that the model was made for.
        num_layers: transformer layers.
        num_experts: 0 for a dense model.
        padding: id whose row of the embedding is not trained by being looked up; None for none.
    """

    model_type: str
    vocab_size: int
    tied: bool
    inv_freq: torch.Tensor
    max_positions: int
    num_layers: int
    num_experts: int = 0
    padding: int | None = None
    transformer: Mapping[str, Any] = field(default_factory=dict)


def read_architecture(config: PretrainedConfig) -> Architecture:
    """The shape of a Hugging Face model.

    Raises:
        CapabilityError: a family that this backend has not, or a setting of it that megatron's modules do not follow.
    """
    kind = str(config.model_type)
    if kind not in SUPPORTED:
        raise CapabilityError(
            f"megatron builds no model of type {kind!r}",
            found=kind,
            wanted=", ".join(SUPPORTED),
            next="--backend fsdp2 trains any causal language model of transformers",
        )
    _refuse_other_settings(config)
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    inv_freq, factor = _rotary(config, head_dim)
    fields: dict[str, Any] = {
        "num_layers": int(config.num_hidden_layers),
        "hidden_size": int(config.hidden_size),
        "ffn_hidden_size": int(config.intermediate_size),
        "num_attention_heads": heads,
        "num_query_groups": int(getattr(config, "num_key_value_heads", None) or heads),
        "kv_channels": head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(config.rms_norm_eps),
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": kind == "qwen2",
        "qk_layernorm": kind in ("qwen3", "qwen3_moe"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Both rotated sides carry the factor, and attention is their product.
        "softmax_scale": factor**2 * head_dim**-0.5,
    }
    window = _window(config)
    if window is not None:
        fields["window_size"] = (window - 1, 0)
    num_experts = 0
    if kind in _MOE:
        num_experts = int(getattr(config, "num_experts", None) or config.num_local_experts)
        fields |= _experts(config, num_experts)
    return Architecture(
        model_type=kind,
        vocab_size=int(config.vocab_size),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        inv_freq=inv_freq,
        max_positions=int(config.max_position_embeddings),
        num_layers=int(config.num_hidden_layers),
        num_experts=num_experts,
        padding=_padding(config),
        transformer=fields,
    )


def _padding(config: PretrainedConfig) -> int | None:
    """The id of ``pad_token_id`` as ``torch.nn.Embedding`` takes it: a negative one counts from the end."""
    found = getattr(config, "pad_token_id", None)
    return None if found is None else int(found) % int(config.vocab_size)


def _experts(config: PretrainedConfig, num_experts: int) -> dict[str, Any]:
    renormalised = config.model_type == "mixtral" or bool(config.norm_topk_prob)
    return {
        "num_moe_experts": num_experts,
        "moe_router_topk": int(config.num_experts_per_tok),
        "moe_ffn_hidden_size": int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size),
        # Probabilities of the chosen experts alone, or of all and then the chosen ones' share.
        "moe_router_pre_softmax": not renormalised,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
    }


def _refuse_other_settings(config: PretrainedConfig) -> None:
    kind = str(config.model_type)
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "attention_dropout": (None, 0, 0.0),
        "router_jitter_noise": (None, 0, 0.0),
        "output_router_logits": (None, False),
        "mlp_only_layers": (None, [], ()),
        "decoder_sparse_step": (None, 1),
        "quantization_config": (None,),
        "is_causal": (None, True),
    }
    for name, values in wanted.items():
        found = getattr(config, name, None)
        if found not in values:
            shown = " or ".join(str(v).lower() for v in values if v is not None) or "nothing"
            raise CapabilityError(
                f"megatron builds {kind} only with other settings",
                found=f"{name}={found}",
                wanted=f"{name}: {shown}",
                next="--backend fsdp2 trains the model as its config says",
            )
    renormalised = kind == "mixtral" or bool(getattr(config, "norm_topk_prob", False))
    if renormalised and int(config.num_experts_per_tok) < 2:
        # megatron-core takes a softmax over the chosen experts alone only where there are several.
        raise CapabilityError(
            "megatron does not make the share of a single expert one",
            found=f"num_experts_per_tok={config.num_experts_per_tok}",
            wanted="two or more",
            next="--backend fsdp2 trains the model as its config says",
        )


def _window(config: PretrainedConfig) -> int | None:
    """Tokens that a token sees, itself included; None for all before it. As each family of transformers reads it: a llama has
    no window, whatever its config carries along.

    Raises:
        CapabilityError: layers of several kinds, or of one that this backend has not.
    """
    family = str(config.model_type)
    window = None if family == "llama" else getattr(config, "sliding_window", None)
    if family in ("qwen2", "qwen3"):
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds == {"full_attention"}:
            return None
        if kinds != {"sliding_attention"}:
            raise CapabilityError(
                "megatron gives every layer the same attention",
                found=f"layer_types {', '.join(sorted(kinds))}",
                wanted="full_attention in every layer, or sliding_attention in every layer",
                next="--backend fsdp2 trains the model as its config says",
            )
        window = window or 0
    if window is not None and int(window) < 1:
        raise CapabilityError(
            "a sliding window needs a length",
            found=f"sliding_window={config.sliding_window}",
            wanted="at least 1, or null and no layer of type sliding_attention",
            next="set sliding_window in the model's config (use_sliding_window too, where the family has it)",
        )
    return None if window is None else int(window)


def _rotary(config: PretrainedConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """``[head_dim / 2]`` frequencies, and the factor of cosines and sines.

    Raises:
        CapabilityError: frequencies that depend on the length of a row, or that turn only a part of each head.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if any(isinstance(v, Mapping) for v in rope.values()):
        raise CapabilityError(
            "megatron turns the heads of every layer alike",
            found=f"rope_parameters of {', '.join(rope)}",
            wanted="one set of rope_parameters",
            next="--backend fsdp2 trains the model as its config says",
        )
    kind = str(rope.get("rope_type", "default"))
    if kind not in _ROPE_TYPES or float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CapabilityError(
            "megatron turns whole heads by frequencies that do not depend on a row's length",
            found=f"rope_type {kind}, partial_rotary_factor {rope.get('partial_rotary_factor', 1.0)}",
            wanted=f"rope_type {', '.join(_ROPE_TYPES)}",
            next="--backend fsdp2 trains the model as its config says",
        )
    if kind == "default":
        base = float(rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0))
        return 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim), 1.0
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inv_freq.float(), float(factor)
