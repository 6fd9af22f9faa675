"""What the controller itself costs a step: ranks are simulated and answer at once, so nothing else is measured.

A step is one pass of scores (old log-probs) and one update: row weights, rows over data parallel ranks, a call to every
rank, answers from the collectors, scores back in order. Packing a part for its journey is the transport's work and grows
with the bytes; it is measured beside, as the gathering of every field of every part.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from rlctl.batch import GROUP, PackedBatch
from rlctl.config.schema import ActorConfig
from rlctl.generation import GenerateRequest, SamplingParams
from rlctl.microbatch import MicroBatchPlan
from rlctl.roles.actor import ActorRole
from rlctl.roles.budget import SkipBudget
from rlctl.runtime.group import WorkerGroup
from rlctl.runtime.records import Boot, BuildSpec, RankPlace
from rlctl.runtime.remote import RemoteEngine
from rlctl.runtime.worker import Worker
from rlctl.testing.fake_transport import CannedTransport
from rlctl.topology import Topology

T = TypeVar("T")


def grpo_batch(num_rows: int, seed: int, n: int = 8, mean_tokens: int = 600) -> PackedBatch:
    """Rows as a GRPO step has them: ``n`` samples a prompt, a quarter of the tokens prompt, lengths spread."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(0.5 * torch.randn(num_rows // n, 2, generator=generator))
    prompts = (0.22 * mean_tokens * spread[:, 0]).long().repeat_interleave(n) + 8
    own = torch.exp(0.5 * torch.randn(num_rows, generator=generator))
    answers = (0.58 * mean_tokens * spread[:, 1].repeat_interleave(n) * own).long() + 2
    lengths = prompts + answers
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    tokens = int(cu[-1])
    position = torch.arange(tokens) - cu[:-1].repeat_interleave(lengths)
    items = {
        "input_ids": torch.randint(0, 150_000, (tokens,), generator=generator),
        "loss_mask": position >= prompts.repeat_interleave(lengths),
        "rollout_log_probs": -torch.rand(tokens, generator=generator),
        "advantages": torch.randn(tokens, generator=generator),
    }
    return PackedBatch(cu, items, {GROUP: torch.arange(num_rows) // n}, {"temperature": 1.0})


def actor_on(world_size: int, tp: int) -> tuple[ActorRole, CannedTransport]:
    """An actor on ``world_size`` simulated ranks, of which ``tp`` hold one replica."""
    topology = Topology(world_size, dp_shard=world_size // tp, tp=tp)
    places = [
        RankPlace(rank, topology.dp_rank(rank), topology.dp_size, topology.is_collector(rank))
        for rank in range(world_size)
    ]
    transport = CannedTransport(places)
    boots = [Boot(rank=rank, world_size=world_size) for rank in range(world_size)]
    group = WorkerGroup("main", transport, boots, Worker)
    group.start()
    engine = RemoteEngine.build(group, BuildSpec("actor", "train", "none", {}, {}, {}))
    plan = MicroBatchPlan(max_tokens=32_768)
    return ActorRole(engine, ActorConfig(), plan, 512, SkipBudget(3), check_rollout=False), transport


class Clock:
    """Milliseconds that a core works for the controller: what the simulated ranks spend is taken off.

    Processor time, since the controller waits for nothing here, and other programs of the machine are no part of it.
    """

    def __init__(self, transport: CannedTransport) -> None:
        self._transport = transport

    def __call__(self, work: Callable[[], T]) -> tuple[float, T]:
        elsewhere, start = self._transport.seconds, time.thread_time()
        result = work()
        took = time.thread_time() - start - (self._transport.seconds - elsewhere)
        return 1000 * took, result


def measure(batches: Sequence[PackedBatch], world_size: int, tp: int, steps: int) -> dict[str, float]:
    """Medians over ``steps`` steps, in milliseconds; ``best_step_ms`` is the quickest one, with the caches to itself."""
    actor, transport = actor_on(world_size, tp)
    clock = Clock(transport)
    seen: dict[str, list[float]] = {name: [] for name in ("score", "update", "step", "generate", "packing")}
    for step in range(steps + 2):
        # Another batch than the step before: nothing that is kept of one serves the next.
        batch = batches[step % len(batches)]
        keep = set(range(batch.num_rows))
        score, scores = clock(lambda b=batch: actor.score(b)["log_probs"])
        ready = batch.with_items(old_log_probs=scores)
        generator = torch.Generator().manual_seed(step)
        update, _ = clock(lambda b=ready, k=keep, g=generator: actor.update(b, b.num_rows, k, g))
        request = GenerateRequest([[1]] * (batch.num_rows // 8), SamplingParams(n=8, seed=step))
        generate, _ = clock(lambda r=request: actor.engine.generate(r))
        parts, _ = actor.engine._split(ready)
        packing, _ = clock(lambda p=parts: [list(part.items.values()) for part in p])
        if step >= 2:
            for name, value in zip(seen, (score, update, score + update, generate, packing), strict=True):
                seen[name].append(value)
        gc.collect()
    medians = {f"{name}_ms": round(statistics.median(values), 1) for name, values in seen.items()}
    return {"dp": world_size // tp, "tp": tp, **medians, "best_step_ms": round(min(seen["step"]), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 4, 16], help="ranks that hold one replica")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    batches = [grpo_batch(args.rows, seed) for seed in range(2)]
    found = [measure(batches, args.ranks, tp, args.steps) for tp in args.tp]
    tokens = sum(b.num_items for b in batches) // len(batches)
    if args.json:
        print(json.dumps({"schema": 1, "ranks": args.ranks, "rows": args.rows, "tokens": tokens, "cases": found}))
        return
    print(f"controller, {args.ranks} simulated ranks, {args.rows} rows, {tokens} tokens: milliseconds of one core")
    columns = {"dp": 6, "tp": 4, "score": 9, "update": 9, "step": 9, "best_step": 11, "generate": 10, "packing": 9}
    print("".join(f"{name.replace('_', ' '):>{width}}" for name, width in columns.items()))
    for case in found:
        print("".join(f"{case.get(f'{key}_ms', case.get(key)):>{width}}" for key, width in columns.items()))


if __name__ == "__main__":
    main()
