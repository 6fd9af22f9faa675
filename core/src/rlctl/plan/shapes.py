"""The sizes of a model, from its ``config.json``. Keys that the file leaves out have the defaults of transformers.

Legend: D hidden size, F feed-forward size, H query heads, G key/value heads, E head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Norm = Literal["rms", "gemma", "layer"]


@dataclass(frozen=True)
class Family:
    """What one ``model_type`` is built of, and the defaults of its config class.

    Args:
        norm: Llama's RMSNorm, Gemma's (float32 to the end), or LayerNorm with a bias.
        gated: a feed-forward of three matrices (gate, up, down) instead of two.
        fused_qkv: one matrix for queries, keys and values; every head has keys and values of its own.
        qk_norm: queries and keys are normalised head by head.
        post_norms: the results of attention and feed-forward are normalised too (four norms a layer).
        qkv_bias, out_bias, mlp_bias: True, False, or the key of the config that says so.
        windowed: which layers have a sliding window: by the list ``layer_types``, from ``max_window_layers`` on, or all.
        expert_size: the key of an expert's feed-forward size; empty for a dense model.
    """

    defaults: Mapping[str, Any]
    norm: Norm = "rms"
    gated: bool = True
    fused_qkv: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    windowed: Literal["types", "from", "all"] = "all"
    expert_size: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)


def _sizes(vocab: int, hidden: int, feed: int, layers: int, heads: int, kv: int | None, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": feed,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": None,
        "tie_word_embeddings": False,
        "sliding_window": None,
        **more,
    }


FAMILIES: dict[str, Family] = {
    "llama": Family(
        _sizes(32000, 4096, 11008, 32, 32, None, attention_bias=False, mlp_bias=False),
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Family(_sizes(32000, 4096, 14336, 32, 32, 8, sliding_window=4096)),
    "qwen2": Family(
        _sizes(151936, 4096, 22016, 32, 32, 32, use_sliding_window=False, max_window_layers=28),
        qkv_bias=True,
        windowed="from",
    ),
    "qwen3": Family(
        _sizes(
            151936, 4096, 22016, 32, 32, 32,
            head_dim=128, attention_bias=False, use_sliding_window=False, max_window_layers=28,
        ),
        qk_norm=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        windowed="from",
    ),
    "qwen3_moe": Family(
        _sizes(
            151936, 2048, 6144, 24, 32, 4,
            attention_bias=False, use_sliding_window=False, max_window_layers=0, moe_intermediate_size=768,
            num_local_experts=128, num_experts_per_tok=8, decoder_sparse_step=1, mlp_only_layers=[],
        ),
        qk_norm=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        expert_size="moe_intermediate_size",
        aliases={"num_experts": "num_local_experts"},
    ),
    "mixtral": Family(
        _sizes(32000, 4096, 14336, 32, 32, 8, num_local_experts=8, num_experts_per_tok=2),
        expert_size="intermediate_size",
        aliases={"num_experts": "num_local_experts"},
    ),
    "gemma3_text": Family(
        _sizes(
            262208, 2304, 9216, 26, 8, 4,
            head_dim=256, tie_word_embeddings=True, attention_bias=False, sliding_window=4096, sliding_window_pattern=6,
        ),
        norm="gemma",
        qk_norm=True,
        post_norms=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        windowed="types",
    ),
    "gpt_neox": Family(
        _sizes(50432, 6144, 24576, 44, 64, None, attention_bias=True, use_parallel_residual=True),
        norm="layer",
        gated=False,
        fused_qkv=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias=True,
    ),
}  # fmt: skip
"""Families whose weights are counted exactly; a test compares defaults and counts with transformers."""

_SIGLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_channels": 3,
           "image_size": 224, "patch_size": 16, "vision_use_head": True}  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. Layers are alike, apart from ``moe_layers`` of them that have experts.

    Args:
        intermediate_size: feed-forward size of a dense layer.
        expert_size: feed-forward size of one expert.
        sliding_layers: layers with a window of ``sliding_window`` tokens.
        unused_parameters: weights that text never reaches (the vision part of a multimodal model).
    """

    model_type: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    parallel_residual: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    moe_layers: int = 0
    sliding_window: int | None = None
    sliding_layers: int = 0
    unused_parameters: int = 0

    @property
    def query_size(self) -> int:
        """H x E."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """G x E."""
        return self.num_kv_heads * self.head_dim


def model_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a Hugging Face config describes; None for a family that is not known here.

    Raises:
        ValueError: a size is no positive whole number; says which.
    """
    kind = config.get("model_type")
    if kind == "gemma3":
        text = model_shape({**(config.get("text_config") or {}), "model_type": "gemma3_text"})
        assert text is not None, "its text part is a known family"
        unused = _vision_parameters(config.get("vision_config") or {}, text.hidden_size)
        return ModelShape(**{**vars(text), "model_type": "gemma3", "unused_parameters": unused})
    family = FAMILIES.get(str(kind))
    if family is None:
        return None
    given = {family.aliases.get(k, k): v for k, v in config.items()}
    values = {**family.defaults, **{k: v for k, v in given.items() if k in family.defaults and v is not None}}
    heads = _whole(values, "num_attention_heads")
    hidden = _whole(values, "hidden_size")
    layers = _whole(values, "num_hidden_layers")
    moe = _moe_layers(values, layers) if family.expert_size else 0
    window, windowed = _windows(family, values, given, layers)
    return ModelShape(
        model_type=str(kind),
        family=family,
        vocab_size=_whole(values, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_whole(values, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads if values["num_key_value_heads"] is None else _whole(values, "num_key_value_heads"),
        head_dim=hidden // heads if values["head_dim"] is None else _whole(values, "head_dim"),
        tied=bool(values["tie_word_embeddings"]),
        qkv_bias=_switch(family.qkv_bias, values),
        out_bias=_switch(family.out_bias, values),
        mlp_bias=_switch(family.mlp_bias, values),
        parallel_residual=bool(values.get("use_parallel_residual", False)),
        num_experts=_whole(values, "num_local_experts") if family.expert_size else 0,
        experts_per_token=_whole(values, "num_experts_per_tok") if family.expert_size else 0,
        expert_size=_whole(values, family.expert_size) if family.expert_size else 0,
        moe_layers=moe,
        sliding_window=window,
        sliding_layers=windowed,
    )


def _whole(values: Mapping[str, Any], key: str) -> int:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {value!r}, not a positive whole number")
    return value


def _switch(rule: bool | str, values: Mapping[str, Any]) -> bool:
    return bool(values[rule]) if isinstance(rule, str) else rule


def _moe_layers(values: Mapping[str, Any], layers: int) -> int:
    """Layers with experts: every ``decoder_sparse_step``-th, apart from those listed as dense."""
    step = _whole(values, "decoder_sparse_step") if "decoder_sparse_step" in values else 1
    dense: Sequence[int] = values.get("mlp_only_layers") or ()
    if not isinstance(dense, Sequence):
        raise ValueError(f"mlp_only_layers is {dense!r}, not a list")
    return sum(1 for i in range(layers) if i not in dense and (i + 1) % step == 0)


def _windows(
    family: Family, values: Mapping[str, Any], given: Mapping[str, Any], layers: int
) -> tuple[int | None, int]:
    """(window in tokens or None, layers that have it)."""
    if values["sliding_window"] is None or values.get("use_sliding_window") is False:
        return None, 0
    window = _whole(values, "sliding_window")
    types = given.get("layer_types")
    if isinstance(types, Sequence) and family.windowed != "all":
        return window, sum(1 for t in types if t == "sliding_attention")
    if family.windowed == "types":
        pattern = _whole(values, "sliding_window_pattern")
        return window, sum(1 for i in range(layers) if (i + 1) % pattern)
    if family.windowed == "from":
        first = values["max_window_layers"]
        if not isinstance(first, int):
            raise ValueError(f"max_window_layers is {first!r}, not a whole number")
        return window, max(0, layers - first)
    return window, layers


def _vision_parameters(config: Mapping[str, Any], text_hidden: int) -> int:
    """Weights of a SigLIP tower and of the projection into the text model."""
    values = {**_SIGLIP, **{k: v for k, v in config.items() if k in _SIGLIP and v is not None}}
    for key in _SIGLIP.keys() - {"vision_use_head"}:
        _whole(values, key)
    size, feed = values["hidden_size"], values["intermediate_size"]
    patches = (values["image_size"] // values["patch_size"]) ** 2
    embedding = size * values["num_channels"] * values["patch_size"] ** 2 + size + patches * size
    attention = 4 * (size * size + size)
    layer = attention + 2 * size * feed + feed + size + 4 * size
    pooling = attention + size + 2 * size + 2 * size * feed + feed + size if values["vision_use_head"] else 0
    return embedding + values["num_hidden_layers"] * layer + 2 * size + pooling + size * text_hidden + size
