"""The planner's memory model against the CUDA allocator's peak: one training step on one device, printed as JSON.

The engine is built from a configuration and the forecast is made from the same one, as `rlctl plan` makes it. Rows have one
length. Peaks are of allocated tensors, kernels' workspaces included; the CUDA context and fragmentation are not.

    python bench/plan_cuda.py [--rows 8] [--length 1024]
"""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import replace
from typing import Any

import torch

from rlctl.algorithms.losses import CrossEntropyLoss, PolicyLoss
from rlctl.batch import pack
from rlctl.catalogue_memory import train_policy
from rlctl.config.schema import RunConfig
from rlctl.microbatch import MicroBatchPlan
from rlctl.plan.engine_memory import engine_load, engine_setting
from rlctl.plan.memory import GIB
from rlctl.plan.parameters import count_parameters
from rlctl.plan.shapes import model_shape
from rlctl.plan.training import TrainMemory
from rlctl.plugins import load_plugins
from rlctl.registry import create_engine, resolve_backend
from rlctl.topology import Topology

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 40960, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
CASES: tuple[tuple[str, str, dict[str, Any], bool], ...] = (
    ("bf16 weights", "bfloat16", {}, False),
    ("bf16 weights, checkpointing", "bfloat16", {"activation_checkpointing": True}, False),
    ("fp32 weights, bf16 autocast", "float32", {}, False),
    ("fp32 weights, bf16 autocast, checkpointing", "float32", {"activation_checkpointing": True}, False),
    ("fp32 weights, bf16 autocast, policy loss", "float32", {}, True),
    ("fp32 weights, bf16, wrapped", "float32", {"wrap": "always"}, False),
    (
        "fp32 weights, bf16, wrapped, checkpointing",
        "float32",
        {"wrap": "always", "activation_checkpointing": True},
        False,
    ),
)
"""(name, dtype of the master weights, engine section, policy loss instead of cross-entropy)."""


def config(dtype: str, engine: dict[str, Any], rl: bool, rows: int, length: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"config": QWEN3, "tokenizer": "unused", "dtype": dtype},
            "data": {
                "task": {"name": "sort_digits"},
                "train_batch_size": rows // (2 if rl else 1),
                "max_prompt_length": 1,
                "max_response_length": length - 1,
            },
            "actor": {"engine": engine, "micro_batch_size_per_device": rows},
            "rollout": {"n": 2, "temperature": 0.7},
            "trainer": {"type": "rl" if rl else "sft"},
        }
    )


def forecast(run: RunConfig, engine: dict[str, Any]) -> tuple[str, int]:
    """(fullest moment, bytes)."""
    shape = model_shape(QWEN3)
    assert shape is not None, "the family is known"
    precision, setting = engine_setting(train_policy("fsdp2"), engine, Topology(), run, "cuda", shape)
    load = replace(engine_load(run.actor, Topology(), run), ragged=False)
    memory = TrainMemory("actor", shape, count_parameters(shape), precision, setting, load)
    best = max(memory.moments(), key=lambda moment: moment.num_bytes)
    return best.name, best.num_bytes


def measure(run: RunConfig, section: dict[str, Any], rl: bool, rows: int, length: int) -> int:
    """The allocator's peak in the second step, when the optimizer's state exists."""
    plugins = load_plugins()
    record = resolve_backend(plugins, "fsdp2", "train", "language_model", "cuda", "nvidia")
    settings = {"device": "cuda", **section}
    engine = create_engine(plugins, record, role="actor", settings=settings)
    engine.build(Topology(), settings, {**run.model.model_dump(), "seed": 0}, {"lr": 1e-5})
    ids = torch.randint(2, QWEN3["vocab_size"], (rows, length))
    mask = [[False] + [True] * (length - 1)] * rows
    batch = pack({"input_ids": list(ids), "loss_mask": mask}, meta={"temperature": 0.7} if rl else {})
    if rl:
        batch = batch.with_items(advantages=torch.ones(batch.num_items))
    loss = PolicyLoss(run.actor) if rl else CrossEntropyLoss()
    plan = MicroBatchPlan(max_rows=rows)
    engine.train_batch(batch, loss, plan)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    engine.train_batch(batch, loss, plan)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    engine.shutdown()
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--forecast-only", action="store_true", help="measure nothing: needs no device")
    args = parser.parse_args()
    cases = []
    for name, dtype, section, rl in CASES:
        run = config(dtype, section, rl, args.rows, args.length)
        moment, planned = forecast(run, section)
        peak = None if args.forecast_only else measure(run, section, rl, args.rows, args.length)
        cases.append(
            {
                "case": name,
                "plan_gib": round(planned / GIB, 3),
                "plan_moment": moment,
                "measured_gib": None if peak is None else round(peak / GIB, 3),
                "plan_over_measured": None if peak is None else round(planned / peak, 3),
            }
        )
    device = None if args.forecast_only else torch.cuda.get_device_name()
    shape = f"qwen3, 28 layers, D 1024, {args.rows} x {args.length} tokens"
    print(
        json.dumps(
            {"schema": 1, "device": device, "torch": torch.__version__, "shape": shape, "cases": cases}, indent=1
        )
    )


if __name__ == "__main__":
    main()
