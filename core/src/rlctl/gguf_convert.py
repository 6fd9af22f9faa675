"""A llama-architecture GGUF file as a Hugging Face directory: config, weights, tokenizer, chat template.

Read with the ``gguf`` package (its reader and its dequantisation); written without torch or transformers. What is not
understood is refused by name: a converted model either is the model, or does not exist.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

CONVERTER_VERSION = 1

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED = 3, 4
"""Token types of GGUF: control tokens never come from text; user-defined ones are matched in it verbatim."""


def convert(file: Path, directory: Path, dtype: str) -> None:
    """Write ``file`` into the existing, empty ``directory``.

    Args:
        dtype: ``float32`` (exact) or ``bfloat16`` (rounded to nearest even) of the stored weights.

    Raises:
        ConfigError: the ``gguf`` package is missing, the file is damaged, or it holds something that is not understood.
    """
    source = _Gguf(file)
    config = _model_config(source, dtype)
    tokenizer, tokenizer_config = _tokenizer(source)
    _write_weights(source, config, directory / "model.safetensors", dtype)
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}
    for name, value in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
        ("rlctl_source.json", {"file": file.name, "converter": CONVERTER_VERSION, "name": source.get("general.name")}),
    ):
        (directory / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    tokenizer.save(str(directory / "tokenizer.json"))


class _Gguf:
    """The key-value part and the tensors of a file."""

    def __init__(self, file: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ConfigError(
                "GGUF weights need the gguf package", found=str(error), next="pip install 'rlctl-core[gguf]'"
            ) from error
        try:
            self.reader = gguf.GGUFReader(file)
        except (ValueError, OSError, KeyError, IndexError) as error:
            raise ConfigError(
                f"{file.name} cannot be read as GGUF", found=str(error), next="check model.path"
            ) from error
        self.file = file
        self._dequantize = gguf.quants.dequantize

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise self.refuse(f"no {key}", f"a file with {key}")
        return value

    def tensors(self) -> dict[str, Any]:
        return {t.name: t for t in self.reader.tensors}

    def values(self, tensor: Any) -> np.ndarray:
        """Dequantised float32, in Hugging Face's (row-major) shape."""
        try:
            values = self._dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise self.refuse(
                f"{tensor.name} as {tensor.tensor_type.name}", "a quantisation that gguf reads"
            ) from error
        return values.reshape([int(n) for n in reversed(tensor.shape)])

    def refuse(self, found: str, wanted: str) -> ConfigError:
        return ConfigError(
            f"{self.file.name} cannot be converted to a Hugging Face model",
            found=found,
            wanted=wanted,
            next="set model.path to a Hugging Face directory of this model instead",
        )


def _model_config(source: _Gguf, dtype: str) -> dict[str, Any]:
    architecture = source.need("general.architecture")
    if architecture != "llama":
        raise source.refuse(f"architecture {architecture!r}", "architecture 'llama'")
    if source.get("llama.expert_count"):
        raise source.refuse(f"{source.get('llama.expert_count')} experts", "a dense llama")
    scaling = source.get("llama.rope.scaling.type")
    if scaling not in (None, "none"):
        raise source.refuse(f"rope scaling {scaling!r}", "plain rotary positions")
    hidden, heads = int(source.need("llama.embedding_length")), int(source.need("llama.attention.head_count"))
    head_dim = int(source.get("llama.attention.key_length", hidden // heads))
    rotary = int(source.get("llama.rope.dimension_count", head_dim))
    if rotary != head_dim:
        raise source.refuse(f"{rotary} rotary dimensions of {head_dim}", "rotary positions on the whole head")
    tokens = source.need("tokenizer.ggml.tokens")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": int(source.need("llama.feed_forward_length")),
        "num_hidden_layers": int(source.need("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(source.get("llama.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(source.need("llama.context_length")),
        "rms_norm_eps": float(source.need("llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(source.get("llama.rope.freq_base", 10000.0))},
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in source.tensors(),
        "dtype": dtype,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = source.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            config[f"{name}_token_id"] = int(value)
    return config


def _hugging_face_name(name: str, source: _Gguf) -> str:
    if name in _TOP:
        return _TOP[name]
    if name == "output.weight":
        return "lm_head.weight"
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
    raise source.refuse(f"the tensor {name}", "the tensors of a plain llama")


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of each rotary head (pairs side by side); Hugging Face keeps them apart."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, rounded to nearest, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def _write_weights(source: _Gguf, config: dict[str, Any], path: Path, dtype: str) -> None:
    """Write safetensors one tensor at a time, so that memory holds the largest one and not the model.

    The layout is the format's own (a length, a JSON header, the bytes); the safetensors package only writes tensors
    that are all in memory, and has no bfloat16 without torch.
    """
    import numpy as np

    code, size = ("BF16", 2) if dtype == "bfloat16" else ("F32", 4)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {_hugging_face_name(name, source): tensor for name, tensor in source.tensors().items()}
    missing = _expected(config) - set(tensors)
    if missing:
        raise source.refuse(f"no {sorted(missing)[0]}", "all weights of a llama")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        shape = [int(n) for n in reversed(tensor.shape)]
        end = offset + int(np.prod(shape)) * size
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            values = source.values(tensor)
            kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
            if kind in heads:
                values = _unpermute(values, heads[kind])
            out.write((_to_bfloat16(values) if size == 2 else np.ascontiguousarray(values, np.float32)).tobytes())


def _expected(config: dict[str, Any]) -> set[str]:
    layers = range(config["num_hidden_layers"])
    return set(_TOP.values()) | {f"model.layers.{i}.{part}.weight" for i in layers for part in _LAYER.values()}


def _tokenizer(source: _Gguf) -> tuple[Any, dict[str, Any]]:
    """(``tokenizers.Tokenizer``, content of tokenizer_config.json)."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    except ImportError as error:
        raise ConfigError(
            "GGUF tokenizers need the tokenizers package", found=str(error), next="pip install 'rlctl-core[gguf]'"
        ) from error
    model = source.need("tokenizer.ggml.model")
    split = source.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or split not in ("smollm", "gpt-2", "default"):
        raise source.refuse(f"tokenizer {model!r} with pre-tokenizer {split!r}", "'gpt2' with 'smollm' or 'gpt-2'")
    tokens: list[str] = source.need("tokenizer.ggml.tokens")
    merges = [tuple(line.split(" ")) for line in source.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(source.get("tokenizer.ggml.add_space_prefix", False)))
    # SmolLM splits every digit off; a tokenizer without that rule merges digits, and arithmetic falls apart.
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    types = source.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(source.need("llama.context_length")),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = source.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{name}_token"] = tokens[int(index)]
    if source.get("tokenizer.ggml.add_bos_token") and "bos_token" in config:
        bos = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    template = source.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return tokenizer, config
