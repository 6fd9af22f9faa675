"""Four ranks (or two) of one process group: random cases, named cases, refusals and faults, on every mesh.

Started by test_fsdp_axes.py as one process that imports once and forks the ranks. The results that one process gives are
computed here too, each by one of the ranks, and written beside what the ranks saw.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fsdp_axes_faults import (
    after_a_failed_call,
    checkpoint_on_another_mesh,
    refusals,
    scores_without_an_optimizer,
    with_faults,
)
from fsdp_axes_models import CURVED_HEAD, register
from fsdp_cases import PER_ENGINE, Bench, draw
from fsdp_two_ranks import LORA, WITH_PEFT, run_case

from rlctl.topology import Topology

RANDOM_CASES = {4: 66, 2: 24, 1: 12}
"""World size -> how many; those of four ranks all run in one process group."""

NAMED: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "replicas": ((2, 2, 1), {"family": "llama-tied", "split": "uneven", "calls": 2}),
    "replicas-whole": ((4, 1, 1), {"family": "qwen3", "split": "uneven"}),
    "usp-kv-replicated": ((1, 1, 4), {"family": "llama-tied", "split": "even", "loss": "ppo"}),
    "usp-shards": ((1, 2, 2), {"family": "qwen3", "split": "uneven", "loss": "ppo"}),
    "usp-no-rows": ((1, 2, 2), {"family": "llama", "split": "none"}),
    "usp-replicas": ((2, 1, 2), {"family": "gemma3", "split": "uneven", "calls": 2}),
    "usp-shared-prompts": ((2, 1, 2), {"family": "qwen3-moe", "split": "uneven", "prompts": True, "loss": "ppo"}),
    "usp-checkpointing": ((1, 2, 2), {"family": "llama", "split": "even", "engine": {"activation_checkpointing": True}}),
    "usp-recomputed-logits": ((1, 1, 4), {"family": "gpt-neox", "split": "even", "chunked": True, "loss": "ppo"}),
    "usp-own-logits": ((1, 2, 2), {"model": {"config": CURVED_HEAD}, "split": "uneven", "loss": "ppo"}),
    "usp-from-directory": ((2, 1, 2), {"model": {"path": "DIRECTORY"}, "split": "uneven"}),
    "usp-offload": (
        (1, 2, 2),
        {"family": "llama-tied", "split": "uneven", "engine": {"param_offload": True, "optimizer_offload": True}},
    ),
    "lora-replicas": ((2, 2, 1), {"family": "qwen2", "split": "uneven", "lora": {}, "engine": {"activation_checkpointing": True}}),
    "lora-usp": ((1, 2, 2), {"family": "llama", "split": "uneven", "lora": {"target_modules": ["q_proj", "down_proj"]}}),
    "usp-bfloat16": ((1, 2, 2), {"family": "llama", "split": "uneven", "engine": {"param_dtype": "bfloat16"}}),
}  # fmt: skip
NAMED_OF_TWO: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "usp-two": ((1, 1, 2), {"family": "llama-tied", "split": "even", "loss": "ppo", "prompts": True}),
    "usp-two-bfloat16": ((1, 1, 2), {"family": "qwen3", "split": "even", "engine": {"param_dtype": "bfloat16"}}),
    "lora-usp-two": ((1, 1, 2), {"family": "qwen3", "split": "even", "lora": {"use_rslora": True}, "loss": "ppo"}),
    "replicas-two": ((2, 1, 1), {"family": "llama-tied", "split": "uneven"}),
}

if not WITH_PEFT:
    NAMED = {name: (sizes, case) for name, (sizes, case) in NAMED.items() if "lora" not in case}
    NAMED_OF_TWO = {name: (sizes, case) for name, (sizes, case) in NAMED_OF_TWO.items() if "lora" not in case}


def join(store: Path, rank: int, world: int, device: str) -> None:
    """One more process group, of ranks that meet in a file."""
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device]
    timeout = datetime.timedelta(seconds=90)
    dist.init_process_group(
        backend, store=dist.FileStore(str(store), world), rank=rank, world_size=world, timeout=timeout
    )


def random_cases(results: dict[str, Any], rank: int, world: int, device: str, index: int = 0, groups: int = 1) -> None:
    """The cases of ``world`` ranks that this of several groups takes; each rank computes its share of the references."""
    for first in range(index * PER_ENGINE, RANDOM_CASES[world], groups * PER_ENGINE):
        bench, reference = Bench(draw(first, world), device), None
        for number in range(first, first + PER_ENGINE):
            case, name = draw(number, world), f"random-{world}-{number}"
            got = bench.run(case)
            # Every rank's numbers and the checksum of its weights, the weights themselves once.
            results[name] = got if rank == 0 else {k: v for k, v in got.items() if k != "weights"}
            if first // PER_ENGINE % world == rank:
                reference = reference or Bench(case, device, alone=True)
                results[f"{name} alone"] = reference.run(case)


def named_cases(
    results: dict[str, Any], cases: dict[str, Any], rank: int, world: int, scratch: Path, device: str
) -> None:
    """Three steps, scores, export, save and resume of each case; and the same on one process."""
    for number, (name, ((replicate, shard, usp), case)) in enumerate(cases.items()):
        own = scratch / name
        if rank == 0:
            own.mkdir(exist_ok=True)
            (own / "directory").symlink_to(scratch / "directory")
        dist.barrier()
        topology = Topology(world_size=world, dp_replicate=replicate, dp_shard=shard, usp=usp)
        results[name] = run_case(case, rank, world, own, device, topology)
        if number % world == rank:
            results[f"{name} alone"] = run_case(case, 0, 1, own, device)


def rank_main(rank: int, world: int, scratch: Path, device: str) -> None:
    torch.set_num_threads(1)
    register()
    os.environ["LOCAL_RANK"] = str(rank)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
    began = time.process_time()
    results: dict[str, Any] = {}

    def lap(what: str) -> None:
        if rank == 0:
            print(f"{what}: {time.process_time() - began:.1f} s of CPU", flush=True)

    join(scratch / "store", rank, world, device)
    random_cases(results, rank, world, device)
    lap("random cases")
    named_cases(results, NAMED if world == 4 else NAMED_OF_TWO, rank, world, scratch, device)
    lap("named cases")
    if world == 4:
        results["faults"] = with_faults(device)
        lap("faults")
        results["refusals"] = refusals(rank, device)
        results["checkpoint"] = checkpoint_on_another_mesh(device, scratch / "checkpoint")
        if WITH_PEFT:
            results["checkpoint lora"] = checkpoint_on_another_mesh(device, scratch / "checkpoint-lora", LORA)
        results["scorer"] = scores_without_an_optimizer(device)
        results["failed"] = after_a_failed_call(device)
        lap("refusals")
    dist.barrier()
    dist.destroy_process_group()
    if world == 4 and device == "cpu":
        # Two groups of two ranks side by side, then every rank by itself.
        pair, place = divmod(rank, 2)
        join(scratch / f"store-{pair}", place, 2, device)
        random_cases(results, place, 2, device, pair, 2)
        if pair == 0:
            named_cases(results, NAMED_OF_TWO, place, 2, scratch, device)
        dist.barrier()
        dist.destroy_process_group()
        lap("two ranks")
        # A group of one rank is made by each engine for itself.
        random_cases(results, 0, 1, device, rank, world)
        dist.destroy_process_group()
        lap("one rank")
    torch.save(results, scratch / f"rank{rank}.pt")


if __name__ == "__main__":
    folder, kind, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    mp.start_processes(rank_main, args=(count, folder, kind), nprocs=count, start_method="fork")
