"""The planner's counts of weights and its default sizes against transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.plan.parameters import count_in_files, count_parameters
from rlctl.plan.shapes import FAMILIES, model_shape


def count_by_transformers(config: dict[str, Any]) -> int:
    """``sum(p.numel())`` of the model on the meta device; tied weights count once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(p.numel() for p in model.parameters())


def planned(config: dict[str, Any]) -> int:
    shape = model_shape(config)
    assert shape is not None
    return count_parameters(shape).total


TINY = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 101}
VARIANTS: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True},
    {"model_type": "llama", "head_dim": 20, "attention_bias": True, "mlp_bias": True},
    {"model_type": "mistral", "num_key_value_heads": 2},
    {"model_type": "qwen2", "num_key_value_heads": 2},
    {"model_type": "qwen2", "num_key_value_heads": 4, "tie_word_embeddings": True},
    {"model_type": "qwen3", "num_key_value_heads": 2},
    {
        "model_type": "qwen3",
        "num_key_value_heads": 1,
        "head_dim": 16,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    {"model_type": "qwen3_moe", "num_experts": 4, "num_key_value_heads": 2, "moe_intermediate_size": 24},
    {"model_type": "qwen3_moe", "num_local_experts": 4, "decoder_sparse_step": 2, "moe_intermediate_size": 24},
    {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [1], "moe_intermediate_size": 24, "head_dim": 8},
    {"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 2},
    {"model_type": "mixtral", "num_key_value_heads": 4, "head_dim": 20, "tie_word_embeddings": True},
    {"model_type": "gemma3_text", "num_key_value_heads": 2},
    {"model_type": "gemma3_text", "num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": False},
    {"model_type": "gpt_neox"},
    {"model_type": "gpt_neox", "attention_bias": False, "tie_word_embeddings": True},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
def test_tiny_models_are_counted_exactly(variant: dict[str, Any]) -> None:
    config = {**TINY, **variant}
    assert planned(config) == count_by_transformers(config)


def sizes(layers: int, hidden: int, feed: int, heads: int, kv: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": feed, "num_attention_heads": heads,
        "num_key_value_heads": kv, "vocab_size": vocab, **more,
    }  # fmt: skip


NEOX = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_attention_heads": 32,
    "vocab_size": 50432,
}
SIGLIP = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896,
    "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
REAL: dict[str, tuple[dict[str, Any], int]] = {
    "SmolLM2-135M": (
        {"model_type": "llama", **sizes(30, 576, 1536, 9, 3, 49152, tie_word_embeddings=True)},
        134_515_008,
    ),
    "Llama-3.2-1B": (
        {"model_type": "llama", **sizes(16, 2048, 8192, 32, 8, 128256, head_dim=64, tie_word_embeddings=True)},
        1_235_814_400,
    ),
    "Llama-3.1-8B": ({"model_type": "llama", **sizes(32, 4096, 14336, 32, 8, 128256)}, 8_030_261_248),
    "Mistral-7B": ({"model_type": "mistral", **sizes(32, 4096, 14336, 32, 8, 32000)}, 7_241_732_096),
    "Qwen2.5-0.5B": (
        {"model_type": "qwen2", **sizes(24, 896, 4864, 14, 2, 151936, tie_word_embeddings=True)},
        494_032_768,
    ),
    "Qwen2.5-7B": ({"model_type": "qwen2", **sizes(28, 3584, 18944, 28, 4, 152064)}, 7_615_616_512),
    "Qwen3-0.6B": (
        {"model_type": "qwen3", **sizes(28, 1024, 3072, 16, 8, 151936, tie_word_embeddings=True)},
        596_049_920,
    ),
    "Qwen3-8B": ({"model_type": "qwen3", **sizes(36, 4096, 12288, 32, 8, 151936)}, 8_190_735_360),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            **sizes(48, 2048, 6144, 32, 4, 151936, head_dim=128, num_experts=128, moe_intermediate_size=768),
        },
        30_532_122_624,
    ),
    "Mixtral-8x7B": ({"model_type": "mixtral", **sizes(32, 4096, 14336, 32, 8, 32000)}, 46_702_792_704),
    "Gemma-3-1B": ({"model_type": "gemma3_text", **sizes(26, 1152, 6912, 4, 1, 262144, head_dim=256)}, 999_885_952),
    "Gemma-3-4B": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
            },
            "vision_config": {"model_type": "siglip_vision_model", **SIGLIP},
        },
        4_300_079_472,
    ),
    "Pythia-6.9B": ({"model_type": "gpt_neox", **NEOX}, 6_857_302_016),
}


@pytest.mark.parametrize("name", REAL)
def test_real_models_are_counted_exactly(name: str) -> None:
    config, total = REAL[name]
    assert planned(config) == count_by_transformers(config) == total


@pytest.mark.parametrize("family", FAMILIES)
def test_default_sizes_are_those_of_transformers(family: str) -> None:
    own = AutoConfig.for_model(family)
    shape = model_shape({"model_type": family})
    assert shape is not None
    assert (shape.vocab_size, shape.hidden_size, shape.intermediate_size) == (
        own.vocab_size, own.hidden_size, own.intermediate_size,
    )  # fmt: skip
    heads = own.num_attention_heads
    assert (shape.num_layers, shape.num_heads) == (own.num_hidden_layers, heads)
    assert shape.num_kv_heads == getattr(own, "num_key_value_heads", heads)
    assert shape.head_dim == (getattr(own, "head_dim", None) or own.hidden_size // heads)
    assert shape.tied == own.tie_word_embeddings
    windows = [t for t in getattr(own, "layer_types", None) or [] if t == "sliding_attention"]
    if windows or getattr(own, "layer_types", None):
        assert shape.sliding_layers == len(windows)
    assert shape.sliding_window == getattr(own, "sliding_window", None)


def test_every_known_family_has_a_variant_and_a_real_model() -> None:
    assert {v["model_type"] for v in VARIANTS} == set(FAMILIES)
    assert {c["model_type"] for c, _ in REAL.values()} - {"gemma3"} == set(FAMILIES)


def test_the_weights_of_an_unknown_family_are_read_from_its_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(2, 2, 2)}, tmp_path / "model-2.safetensors")
    assert count_in_files(tmp_path) == 15 + 7 + 8
    index = {"metadata": {"total_size": 1}, "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert count_in_files(tmp_path) == 15 + 7
    index["weight_map"] = {"a": "model-1.safetensors", "d": "model-3.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert count_in_files(tmp_path) is None
