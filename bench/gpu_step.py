"""Training step of the engine on one accelerator: tokens/s, model FLOP/s and peak memory on a Qwen3-0.6B shape.

Model FLOPs = 3 x (2 x parameters + 2 x layers x heads x head_dim x sequence) a token (causal attention counted at half).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from rlctl.algorithms.losses import CrossEntropyLoss
from rlctl.batch import pack
from rlctl.engine import Engine
from rlctl.microbatch import MicroBatchPlan
from rlctl.plugins import load_plugins
from rlctl.registry import create_engine, resolve_backend
from rlctl.topology import Topology

SHAPE = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}  # fmt: skip


def build(settings: dict) -> Engine:
    plugins = load_plugins()
    record = resolve_backend(plugins, "fsdp2", "train", "language_model", "cuda", "nvidia")
    engine = create_engine(plugins, record, role="actor", settings={"device": "cuda", **settings})
    model = {"config": SHAPE, "seed": 0, "dtype": "float32"}
    engine.build(Topology(), {"device": "cuda", **settings}, model, {"lr": 1e-5, "clip_grad": 1.0})
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--shapes", nargs="+", default=["16x1024", "2x8192"])
    args = parser.parse_args()
    engine = build({})
    assert engine.info is not None
    print(json.dumps({"notes": dict(engine.info.notes), "parameters": engine.info.num_parameters}))
    for shape in args.shapes:
        rows, length = map(int, shape.split("x"))
        ids = torch.randint(0, SHAPE["vocab_size"], (rows, length))
        batch = pack({"input_ids": list(ids), "loss_mask": [[False] + [True] * (length - 1)] * rows})
        plan = MicroBatchPlan(max_tokens=rows * length)
        seconds = []
        for step in range(args.steps + 2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            out = engine.train_batch(batch, CrossEntropyLoss(), plan)
            torch.cuda.synchronize()
            if step >= 2:
                seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds)
        tokens = rows * length
        attention = 2 * 28 * 16 * 128 * length
        flops = 3 * (2 * engine.info.num_parameters + attention) * tokens / median
        print(
            f"{shape}: {tokens / median:,.0f} tokens/s, {flops / 1e12:.0f} model TFLOP/s, "
            f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, loss {out.loss:.3f}, {median * 1e3:.0f} ms a step "
            f"(min {min(seconds) * 1e3:.0f}, max {max(seconds) * 1e3:.0f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
