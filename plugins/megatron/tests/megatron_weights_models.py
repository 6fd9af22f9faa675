"""Tiny models on disk, and a mapping to megatron's parameters written a second time, by hand and head by head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

LAYERS = 4
# 61 rows: neither two nor four ranks share them without padding.
_BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_BASE},
    "llama-tied": {"model_type": "llama", **_BASE, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_BASE},
    "qwen3": {"model_type": "qwen3", **_BASE, "head_dim": 16},
    "mistral": {"model_type": "mistral", **_BASE, "head_dim": 8},
    "qwen3-moe": {
        "model_type": "qwen3_moe", **_BASE, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "decoder_sparse_step": 1,
    },
    "mixtral": {"model_type": "mixtral", **_BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    """The whole config, defaults included."""
    return AutoConfig.for_model(**CONFIGS[name]).to_dict()


def write_model(name: str, directory: Path, *, value: bool = False, shard_size: str = "5GB") -> dict[str, torch.Tensor]:
    """Save a model whose every weight is a random number (no norm of ones, no bias of zeros); its tensors by name."""
    config = AutoConfig.for_model(**CONFIGS[name])
    if value:
        config.num_labels = 1
        config.token_classification_bias = False
    model = (AutoModelForTokenClassification if value else AutoModelForCausalLM).from_config(config)
    generator = torch.Generator().manual_seed(len(name) + value)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory, max_shard_size=shard_size)
    return read_directory(directory)


def read_directory(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every safetensors file."""
    return {k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()}


def reference(
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    layers: tuple[int, ...],
    ends: tuple[bool, bool],
    tp: tuple[int, int] = (0, 1),
    ep: tuple[int, int] = (0, 1),
    etp: tuple[int, int] = (0, 1),
) -> dict[str, torch.Tensor]:
    """One chunk's parameters. Each of ``tp``, ``ep`` and ``etp`` is (rank, size); ``ends``: embedding, final norm and head."""
    out: dict[str, torch.Tensor] = {}
    first, last = ends
    if first:
        out["embedding.word_embeddings.weight"] = _vocabulary(tensors["model.embed_tokens.weight"], tp)
    for index, layer in enumerate(layers):
        hf = {k.split(f"layers.{layer}.")[1]: v for k, v in tensors.items() if f"layers.{layer}." in k}
        mine = {**_attention(hf, config, tp), **_norms(hf)}
        mixtral = config["model_type"] == "mixtral"
        block = "block_sparse_moe." if mixtral else "mlp."
        if block + "gate.weight" in hf:
            mine["mlp.router.weight"] = hf[block + "gate.weight"]
            names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
            count = sum(1 for k in hf if k.endswith(f"{names[2]}.weight"))
            for local, expert in enumerate(range(ep[0] * count // ep[1], (ep[0] + 1) * count // ep[1])):
                gate, up, down = (hf[f"{block}experts.{expert}.{n}.weight"] for n in names)
                for fc, value in _mlp(gate, up, down, etp).items():
                    mine[f"mlp.experts.local_experts.{local}.{fc}"] = value
        else:
            gate, up, down = (hf[f"mlp.{n}.weight"] for n in ("gate_proj", "up_proj", "down_proj"))
            mine |= {f"mlp.{fc}": value for fc, value in _mlp(gate, up, down, tp).items()}
        out |= {f"decoder.layers.{index}.{k}": v for k, v in mine.items()}
    if last:
        out["decoder.final_layernorm.weight"] = tensors["model.norm.weight"]
        if "score.weight" in tensors:
            out["value_head.weight"] = tensors["score.weight"]
        elif "lm_head.weight" in tensors:
            out["output_layer.weight"] = _vocabulary(tensors["lm_head.weight"], tp)
        elif not first:
            out["output_layer.weight"] = _vocabulary(tensors["model.embed_tokens.weight"], tp)
    return out


def _vocabulary(weight: torch.Tensor, tp: tuple[int, int]) -> torch.Tensor:
    rows = (len(weight) + tp[1] - 1) // tp[1]
    out = torch.zeros(rows, weight.shape[1])
    for row in range(rows):
        if tp[0] * rows + row < len(weight):
            out[row] = weight[tp[0] * rows + row]
    return out


def _attention(hf: dict[str, torch.Tensor], config: dict[str, Any], tp: tuple[int, int]) -> dict[str, torch.Tensor]:
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = hf["self_attn.q_proj.weight"].shape[0] // heads
    out: dict[str, torch.Tensor] = {}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" not in hf:
            continue
        q, k, v = (hf[f"self_attn.{x}_proj.{kind}"] for x in "qkv")
        rows: list[torch.Tensor] = []
        for group in range(tp[0] * groups // tp[1], (tp[0] + 1) * groups // tp[1]):
            for head in range(group * heads // groups, (group + 1) * heads // groups):
                rows.append(q[head * size : (head + 1) * size])
            rows += [k[group * size : (group + 1) * size], v[group * size : (group + 1) * size]]
        out[f"self_attention.linear_qkv.{kind}"] = torch.cat(rows)
    out["self_attention.linear_proj.weight"] = _share(hf["self_attn.o_proj.weight"], tp, 1)
    for x in "qk":
        if f"self_attn.{x}_norm.weight" in hf:
            out[f"self_attention.{x}_layernorm.weight"] = hf[f"self_attn.{x}_norm.weight"]
    return out


def _norms(hf: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "input_layernorm.weight": hf["input_layernorm.weight"],
        "pre_mlp_layernorm.weight": hf["post_attention_layernorm.weight"],
    }


def _mlp(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, tp: tuple[int, int]) -> dict[str, torch.Tensor]:
    fc1 = torch.cat([_share(gate, tp, 0), _share(up, tp, 0)])
    return {"linear_fc1.weight": fc1, "linear_fc2.weight": _share(down, tp, 1)}


def _share(tensor: torch.Tensor, tp: tuple[int, int], axis: int) -> torch.Tensor:
    return tensor.chunk(tp[1], axis)[tp[0]]


def empty_module(wanted: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A module with parameters of these names and shapes, all NaN."""
    root = nn.Module()
    for name, tensor in wanted.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.full(tensor.shape, float("nan"), dtype=dtype)))
    return root


def differences(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one side has, or whose tensors are not the same bit for bit."""
    odd = sorted(found.keys() ^ wanted.keys())
    return odd + [n for n in found.keys() & wanted.keys() if not torch.equal(found[n].detach(), wanted[n])]


def edit_index(directory: Path, change: dict[str, str | None]) -> None:
    """Point tensors of a sharded directory at other files, or drop them (None)."""
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    for name, target in change.items():
        if target is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = target
    file.write_text(json.dumps(index))
