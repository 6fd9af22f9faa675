"""Tiny models, rows and engines that the tests of this backend share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlctl.batch import PackedBatch, pack
from rlctl.engine import Engine
from rlctl.logits import LogitsReader, LossOutput
from rlctl.records import BackendKind
from rlctl.topology import Topology
from rlctl_fsdp.engine import FSDPEngine

VOCAB = 61
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_GQA = {**_BASE, "num_key_value_heads": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_GQA},
    "llama-tied": {"model_type": "llama", **_GQA, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_GQA},
    "qwen2-window": {
        "model_type": "qwen2", **_GQA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **_GQA, "head_dim": 8, "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text", **_GQA, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0,
    },
    "gemma2": {
        "model_type": "gemma2", **_GQA, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "pad_token_id": 0,
    },
    "mistral": {"model_type": "mistral", **_GQA, "sliding_window": 5, "head_dim": 8},
    "gpt-neox": {"model_type": "gpt_neox", **_BASE},
    "olmo2": {"model_type": "olmo2", **_GQA},
    "qwen3-moe": {
        "model_type": "qwen3_moe", **_GQA, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "decoder_sparse_step": 1, "norm_topk_prob": True,
    },
    "cohere": {"model_type": "cohere", **_GQA, "logit_scale": 0.0625},
    "granite": {"model_type": "granite", **_GQA, "logits_scaling": 8.0},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": 1,
    },
}  # fmt: skip


def model_section(name: str, **more: Any) -> dict[str, Any]:
    """A ``model`` section that starts from random weights."""
    return {"config": dict(CONFIGS[name]), "tokenizer": "unused", "dtype": "float32", **more}


def build_engine(
    model: dict[str, Any],
    optim: dict[str, Any] | None = None,
    world_size: int = 1,
    forward_only: bool = False,
    topology: Topology | None = None,
    **settings: Any,
) -> Engine:
    """A built ``fsdp2`` engine on the CPU, sharded over ``world_size`` ranks unless a topology says otherwise."""
    engine = Engine(FSDPEngine(), BackendKind.TRAIN, "fsdp2")
    topology = topology or Topology(world_size=world_size, dp_shard=world_size)
    optimizer = None if forward_only else optim or {"lr": 1e-2}
    engine.build(topology, {"device": "cpu", **settings}, model, optimizer, forward_only)
    return engine


def rows(lengths: Sequence[int], seed: int = 0, vocab: int = VOCAB) -> list[torch.Tensor]:
    """Random token ids, one tensor a row."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (n,), generator=generator) for n in lengths]


def batch_of(tokens: Sequence[torch.Tensor], prompt: int = 2, **meta: Any) -> PackedBatch:
    """Rows whose tokens from index ``prompt`` on (at least one) are scored."""
    masks = [torch.arange(len(t)) >= max(1, min(prompt, len(t) - 1)) for t in tokens]
    return pack({"input_ids": list(tokens), "loss_mask": masks}, meta=meta)


def nll(reader: LogitsReader, batch: PackedBatch) -> LossOutput:
    """Weighted negative log-likelihood, with a metric and per-item results."""
    log_probs = reader.log_prob()
    weight = batch.items["item_weight"]
    return LossOutput(
        loss=-(weight * log_probs).sum(),
        sums={"nll": -(weight * log_probs).sum(), "tokens": batch.items["loss_mask"].sum()},
        maxes={"worst": -log_probs.min()},
        items={"log_probs": log_probs.detach()},
    )


def ppo_like(reader: LogitsReader, batch: PackedBatch) -> LossOutput:
    """A loss that is not linear in log-probs and uses the entropy: clipped ratio plus an entropy bonus."""
    log_probs, entropy = reader.log_prob_and_entropy()
    weight = batch.items["item_weight"]
    advantage = torch.sin(batch.items["input_ids"].float())
    ratio = torch.exp(torch.where(batch.items["loss_mask"].bool(), log_probs + 4.0, 0.0))
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return LossOutput(loss=-(weight * (surrogate + 0.1 * entropy)).sum(), items={"entropy": entropy.detach()})


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Gradients of an unsharded engine's model by name."""
    return {n: p.grad.clone() for n, p in engine.local_module().named_parameters() if p.grad is not None}


def padded_logits(model: torch.nn.Module, tokens: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain Hugging Face: right-padded rows ``[R, L]`` and an attention mask -> (logits, ids)."""
    longest = max(len(t) for t in tokens)
    ids = torch.zeros(len(tokens), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, t in enumerate(tokens):
        ids[i, : len(t)] = t
        mask[i, : len(t)] = 1
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float(), ids


def padded_log_probs(model: torch.nn.Module, batch: PackedBatch, temperature: float = 1.0) -> torch.Tensor:
    """``[N, V]`` log-softmax that predicts each item (zeros at the first item of a row), from padded rows."""
    tokens = batch.split_items(batch.items["input_ids"])
    logits, _ = padded_logits(model, tokens)
    log_p = (logits / temperature).log_softmax(-1)
    parts = []
    for i, t in enumerate(tokens):
        parts += [log_p.new_zeros(1, log_p.shape[-1]), log_p[i, : len(t) - 1]]
    return torch.cat(parts)


Loss = Callable[[LogitsReader, PackedBatch], LossOutput]
