"""One rank of a two-rank group: runs every case and writes what it saw. Started by test_fsdp_ranks.py, and run there on
one process too, so that both sides execute the same code."""

from __future__ import annotations

import datetime
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_helpers import batch_of, build_engine, model_section, nll, ppo_like, rows

from rlctl.batch import PackedBatch, pack
from rlctl.engine import Engine
from rlctl.errors import RlctlError
from rlctl.microbatch import MicroBatchPlan
from rlctl.normalizer import item_weights
from rlctl.parts import fsdp
from rlctl.parts.outputs import ALIGNMENT
from rlctl.topology import Topology
from rlctl_fsdp import build

LENGTHS = (9, 4, 13, 9, 2, 7)
SPLITS: dict[str, tuple[list[int], list[int]]] = {
    "uneven": ([2], [0, 1, 3, 4, 5]),
    "even": ([0, 1, 2], [3, 4, 5]),
    "none": ([], [0, 1, 2, 3, 4, 5]),
}
MAMBA = {
    "model_type": "mamba", "vocab_size": 61, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

LORA = {
    "rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear", "exclude_modules": None, "use_rslora": False,
}  # fmt: skip
"""``model.lora``, as a run hands it to the engine."""

CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "split": "uneven"},
    "llama-tied": {"family": "llama-tied", "split": "uneven"},
    "llama-even": {"family": "llama", "split": "even", "loss": "ppo"},
    "llama-no-rows": {"family": "llama", "split": "none"},
    "llama-two-calls": {"family": "llama", "split": "uneven", "calls": 2},
    "llama-checkpointing": {"family": "llama", "split": "uneven", "engine": {"activation_checkpointing": True}},
    "llama-no-reshard": {"family": "llama-tied", "split": "uneven", "engine": {"reshard_after_forward": False}},
    "llama-recomputed-logits": {"family": "llama", "split": "even", "chunked": True, "loss": "ppo"},
    "llama-clipped": {"family": "llama", "split": "uneven", "optim": {"lr": 1e-2, "clip_grad": 0.1}},
    "qwen3": {"family": "qwen3", "split": "uneven"},
    "qwen2-window": {"family": "qwen2-window", "split": "uneven"},
    "gemma3": {"family": "gemma3", "split": "uneven"},
    "qwen3-moe": {"family": "qwen3-moe", "split": "uneven"},
    "gpt2": {"family": "gpt2", "split": "uneven"},
    "mamba": {"model": {"config": MAMBA}, "split": "uneven"},
    "per-row": {"family": "llama", "split": "uneven", "engine": {"attention": "per_row"}, "loss": "ppo"},
    "from-directory": {"model": {"path": "DIRECTORY"}, "split": "uneven"},
    "shared-prompts": {"family": "qwen3-moe", "split": "uneven", "prompts": True, "loss": "ppo"},
    "offload": {
        "family": "llama-tied",
        "split": "uneven",
        "engine": {"param_offload": True, "optimizer_offload": True},
    },
    "bfloat16": {"family": "llama", "split": "uneven", "engine": {"param_dtype": "bfloat16"}},
    "lora": {"family": "llama-tied", "split": "uneven", "lora": {"rank": 3}, "calls": 2},
    "lora-bfloat16": {
        "family": "llama",
        "split": "uneven",
        "lora": {},
        "dtype": "bfloat16",
        "engine": {"param_dtype": "bfloat16"},
    },
}

WITH_PEFT = importlib.util.find_spec("peft") is not None
if not WITH_PEFT:
    CASES = {name: case for name, case in CASES.items() if "lora" not in case}


def _train(engine: Engine, batch: PackedBatch, loss_fn: Any, calls: int) -> dict[str, float]:
    if calls == 1:
        out = engine.train_batch(batch, loss_fn, MicroBatchPlan(max_tokens=24), "seq-mean-token-mean")
        sums = {k: v for k, v in out.sums.items() if k != ALIGNMENT}
        return {"loss": out.loss, "grad_norm": out.step.grad_norm, **sums, **out.maxes}
    # The same mini-batch as two forward_backward calls before one step, under the same global weights.
    batch = batch.with_items(item_weight=item_weights(batch, "seq-mean-token-mean", reduce=engine.reduce))
    middle = (batch.num_rows + 1) // 2
    loss = 0.0
    for part in (range(middle), range(middle, batch.num_rows)):
        micro_batches, _ = engine.micro_batches(batch.select(part), MicroBatchPlan(max_rows=1))
        loss += sum(o.loss for o in engine.forward_backward(micro_batches, loss_fn, forward_only=False))
    return {"loss": engine.reduce([loss])[0], "grad_norm": engine.optimizer_step().grad_norm}


def _my_rows(split: str, dp_rank: int, dp_size: int) -> list[int]:
    if dp_size == 2:
        return SPLITS[split][dp_rank]
    if split == "even":
        return list(range(len(LENGTHS)))[dp_rank::dp_size]
    # One row a rank and the rest on the last, or nothing anywhere else.
    own = [dp_rank] if split == "uneven" and dp_rank < dp_size - 1 else []
    start = dp_size - 1 if split == "uneven" else 0
    return own if dp_rank < dp_size - 1 else list(range(start, len(LENGTHS)))


def run_case(
    case: dict[str, Any], rank: int, world: int, scratch: Path, device: str = "cpu", topology: Topology | None = None
) -> dict[str, Any]:
    """Three steps, then scores, an export, and a save that a second engine resumes from.

    Args:
        topology: of the ranks; by default the weights are sharded over all of them.
    """
    topology = topology or Topology(world_size=world, dp_shard=world)
    model = dict(case["model"]) if "model" in case else model_section(case["family"])
    if model.get("path"):
        model["path"] = str(scratch / "directory")
    if "lora" in case:
        model |= {"lora": {**LORA, **case["lora"]}, "seed": 3, "dtype": case.get("dtype", "float32")}
    settings = {"device": device, "param_dtype": "float32", **case.get("engine", {})}
    engine = build_engine(model, case.get("optim"), topology=topology, **settings)
    if case.get("chunked"):
        # No budget at all: every logit is computed again in the backward pass.
        engine._pm.get_plugin("provider")._config = engine._pm.get_plugin("provider")._config.model_copy(
            update={"logits_budget_mib": 0}
        )
    tokens = rows(LENGTHS)
    if case.get("prompts"):
        prompt, other = rows((6, 3), seed=9)
        tokens = [torch.cat([other if i % 3 else prompt, t]) for i, t in enumerate(tokens)]
        masks = [torch.arange(len(t)) >= (3 if i % 3 else 6) for i, t in enumerate(tokens)]
        whole = pack({"input_ids": tokens, "loss_mask": masks})
    else:
        whole = batch_of(tokens)
    mine = _my_rows(case["split"], topology.dp_rank(rank), topology.dp_size)
    batch = whole.select(mine)
    loss_fn = {"nll": nll, "ppo": ppo_like}[case.get("loss", "nll")]
    before = {n: t.cpu().clone() for n, t in engine.export_weights()}
    steps = [_train(engine, batch, loss_fn, case.get("calls", 1)) for _ in range(2)]
    scores = engine.infer_batch(batch, MicroBatchPlan(max_rows=2), ("log_probs", "entropy"))
    saved = scratch / f"state-{world}"
    engine.save_state(saved)
    steps.append(_train(engine, batch, loss_fn, case.get("calls", 1)))
    weights = {n: t.cpu().clone() for n, t in engine.export_weights()}
    resumed = build_engine(model, case.get("optim"), topology=topology, **settings)
    resumed.load_state(saved)
    again = _train(resumed, batch, loss_fn, case.get("calls", 1))
    same = all(torch.equal(weights[n], t.cpu()) for n, t in resumed.export_weights())
    return {
        "steps": steps,
        "scores": {k: batch.split_items(v) for k, v in scores.items()},
        "rows": mine,
        "before": before,
        "weights": weights,
        "resume_equal": same and again == steps[-1],
        "wrap": engine.info.notes["wrap"] if engine.info else "",
        "family": engine.info.model_family if engine.info else "",
    }


def _without_cures(world: int, device: str) -> dict[str, float]:
    """The uneven case with FSDP's own gradient mean, as it is without :func:`rlctl_fsdp.shard.shard`'s setters."""
    engine = build_engine(model_section("llama"), None, world, device=device, param_dtype="float32")
    for module in fsdp.fsdp_modules(engine._pm.get_plugin("provider")._root):
        module.set_force_sum_reduction_for_comms(False)
        module.set_gradient_divide_factor(float(world))
    batch = batch_of(rows(LENGTHS)).select(SPLITS["uneven"][dist.get_rank()])
    return _train(engine, batch, nll, 1)


def _refusals(rank: int, device: str, scratch: Path) -> list[str]:
    """What each rank says when only one of them has a reason: nobody may wait for the other."""
    said = []
    engine = build_engine(model_section("llama"), None, 2, device=device)
    batch = batch_of(rows((5, 4)))
    if rank == 1:
        batch = batch.with_items(input_ids=batch.items["input_ids"] + 61)
    # The file is only seen by rank 0, which alone reads weights.
    lacking = {"path": str(scratch / "lacking")}
    for call in (
        lambda: engine.infer_batch(batch, MicroBatchPlan(max_rows=2)),
        lambda: build_engine(lacking, None, 2, device=device),
    ):
        try:
            call()
        except RlctlError as error:
            said.append(error.what)
    return said


def main(scratch: Path, device: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device]
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    results: dict[str, Any] = {}
    whole_models = 0
    build_whole = build.build_whole

    def counting(*args: Any) -> Any:
        nonlocal whole_models
        whole_models += 1
        return build_whole(*args)

    build.build_whole = counting
    for name, case in CASES.items():
        # Each case saves below its own directory, made by rank 0.
        own = scratch / name
        if rank == 0:
            own.mkdir(exist_ok=True)
            if not (own / "directory").exists():
                (own / "directory").symlink_to(scratch / "directory")
        dist.barrier()
        results[name] = run_case(case, rank, 2, own, device)
    results["without-cures"] = _without_cures(2, device)
    results["refusals"] = _refusals(rank, device, scratch)
    results["whole-models"] = whole_models
    torch.save(results, scratch / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
