"""Training step of one engine on its ranks: tokens/s, model FLOP/s and peak memory on a Qwen3-0.6B shape.

    python bench/gpu_step.py                                                  # one rank
    torchrun --nproc-per-node 2 bench/gpu_step.py --topology dp_shard=2       # each rank has its own rows
    torchrun --nproc-per-node 2 bench/gpu_step.py --topology usp=2 --shapes 2x8192   # two ranks share rows

A shape is rows x tokens of one *replica*. Model FLOPs = 3 x (2 x parameters that a token meets + 2 x layers x heads x head_dim x
sequence) a token (causal attention counted at half). Rank 0 prints one JSON object a line; tokens/s is that of all ranks together.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch

from rlctl.algorithms.losses import CrossEntropyLoss
from rlctl.batch import PackedBatch, pack
from rlctl.device import Device
from rlctl.engine import Engine
from rlctl.microbatch import MicroBatchPlan
from rlctl.plugins import load_plugins
from rlctl.registry import create_engine, resolve_backend
from rlctl.topology import Topology
from rlctl.verify.topologies import parse_topology

MODELS: dict[str, dict[str, Any]] = {
    "0.6b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True, "max_position_embeddings": 40960,
    },
    "moe-1b": {
        "model_type": "qwen3_moe", "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3072,
        "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": False, "max_position_embeddings": 40960,
    },
    "135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
    },
    "tiny": {
        "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
}  # fmt: skip


def build(backend: str, topology: Topology, device: Device, shape: dict[str, Any]) -> Engine:
    plugins = load_plugins()
    record = resolve_backend(plugins, backend, "train", "language_model", device.type, device.vendor)
    settings = {"device": device.type}
    engine = create_engine(plugins, record, role="actor", settings=settings)
    model = {"config": shape, "seed": 0, "dtype": "float32"}
    engine.build(topology, settings, model, {"lr": 1e-5, "clip_grad": 1.0})
    return engine


def active_parameters(shape: dict[str, Any], total: int) -> int:
    """Weights that one token meets: of a mixture's experts those that it is sent to."""
    experts = shape.get("num_experts", 0)
    if not experts:
        return total
    one = 3 * shape["hidden_size"] * shape["moe_intermediate_size"]
    return total - shape["num_hidden_layers"] * (experts - shape["num_experts_per_tok"]) * one


def rows_of(engine: Engine, rows: int, length: int, vocab: int) -> PackedBatch:
    assert engine.mesh is not None
    drawn = torch.Generator().manual_seed(engine.mesh.dp_rank)
    ids = torch.randint(0, vocab, (rows, length), generator=drawn)
    return pack({"input_ids": list(ids), "loss_mask": [[False] + [True] * (length - 1)] * rows})


def measure(engine: Engine, rows: int, length: int, steps: int, shape: dict[str, Any], device: str) -> dict[str, Any]:
    assert engine.mesh is not None
    assert engine.info is not None
    on_device = device != "cpu"
    batch, plan = rows_of(engine, rows, length, shape["vocab_size"]), MicroBatchPlan(max_tokens=rows * length)
    seconds, loss = [], 0.0
    for step in range(steps + 2):
        if on_device:
            torch.accelerator.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = engine.train_batch(batch, CrossEntropyLoss(), plan).loss
        if on_device:
            torch.accelerator.synchronize()
        if step >= 2:
            seconds.append(time.perf_counter() - start)
    median, ranks = statistics.median(seconds), engine.mesh.world_size
    tokens = rows * length * engine.mesh.dp_size
    layers, heads = shape["num_hidden_layers"], shape["num_attention_heads"]
    active = active_parameters(shape, engine.info.num_parameters)
    flops = 3 * (2 * active + 2 * layers * heads * shape["head_dim"] * length) * tokens / median
    return {
        "rows": rows,
        "length": length,
        "ranks": ranks,
        "tokens_per_s": tokens / median,
        "tokens_per_s_per_device": tokens / median / ranks,
        "model_tflops_per_device": flops / 1e12 / ranks,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_device else None,
        "loss": loss,
        "step_s": {"median": median, "min": min(seconds), "max": max(seconds)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fsdp2")
    parser.add_argument("--topology", default=None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="0.6b", choices=sorted(MODELS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--shapes", nargs="+", default=["16x1024", "2x8192"])
    args = parser.parse_args()
    device = Device(args.device, {"cuda": "nvidia", "npu": "ascend"}.get(args.device, "cpu"))
    topology = parse_topology(args.topology, int(os.environ.get("WORLD_SIZE", "1")))
    shape = MODELS[args.model]
    engine = build(args.backend, topology, device, shape)
    assert engine.mesh is not None
    assert engine.info is not None
    first = engine.mesh.rank == 0
    what = {"backend": args.backend, "topology": topology.axes(), "device": args.device, "model": args.model}
    if first:
        print(json.dumps({**what, "notes": dict(engine.info.notes), "parameters": engine.info.num_parameters}))
    for text in args.shapes:
        rows, length = map(int, text.split("x"))
        found = measure(engine, rows, length, args.steps, shape, args.device)
        if first:
            print(json.dumps({**what, **found}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
