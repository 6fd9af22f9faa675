"""What it saves to keep the samples of a prompt together, and what it costs in balance.

Rows of made-up GRPO batches go over ranks and into micro-batches as the runtime does it, by tokens alone and with the
prompt as each row's group. An engine that computes a prompt once for the rows of a micro-batch that share it then has
``computed`` tokens to do; a step ends with the slowest rank of each micro-batch (``step``). Both are shares of all tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from rlctl.balance import split_rows
from rlctl.microbatch import MicroBatchPlan, assign, min_count


@dataclass(frozen=True)
class Shape:
    """``prompts`` x ``samples`` rows over ``dp`` ranks; lengths are means."""

    prompts: int
    samples: int
    dp: int
    prompt_tokens: int
    answer_tokens: int
    budget: int


SHAPES = (
    Shape(128, 8, 8, 150, 450, 16_384),
    Shape(512, 8, 64, 150, 450, 16_384),
    Shape(512, 8, 256, 150, 450, 16_384),
    Shape(64, 16, 8, 150, 450, 8_192),
    Shape(13, 8, 4, 150, 450, 8_192),
    Shape(64, 8, 4, 1000, 300, 16_384),
    Shape(100, 8, 16, 300, 2000, 32_768),
)


def make_rows(shape: Shape, seed: int) -> tuple[list[int], list[int], list[int]]:
    """(length, group, prompt length) of each row. Answers to one prompt are of like lengths, as they are in training."""
    random = Random(seed)
    lengths: list[int] = []
    prompts: list[int] = []
    for _ in range(shape.prompts):
        prompt = max(20, int(random.lognormvariate(0, 0.5) * shape.prompt_tokens))
        base = random.lognormvariate(0, 0.3)
        for _ in range(shape.samples):
            answer = base * random.lognormvariate(0, 0.5) * shape.answer_tokens
            lengths.append(prompt + max(5, min(4 * shape.answer_tokens, int(answer))))
            prompts.append(prompt)
    return lengths, [i // shape.samples for i in range(len(lengths))], prompts


def measure(shape: Shape, seed: int, grouped: bool) -> dict[str, float]:
    """Shares of all tokens, and the micro-batches of each rank."""
    lengths, groups, prompts = make_rows(shape, seed)
    own = groups if grouped else None
    plan = MicroBatchPlan(max_tokens=shape.budget)
    parts = split_rows(lengths, shape.dp, groups=own)
    count = max(min_count([lengths[row] for row in part], plan) for part in parts)

    def computed(rows: Sequence[int]) -> int:
        return sum(lengths[row] - prompts[row] for row in rows) + sum({groups[r]: prompts[r] for r in rows}.values())

    slots = [0] * count
    total = 0
    for part in parts:
        part_groups = [groups[row] for row in part] if grouped else None
        for slot, rows in enumerate(assign([lengths[row] for row in part], plan, count, groups=part_groups)):
            work = computed([part[i] for i in rows])
            total += work
            slots[slot] = max(slots[slot], work)
    tokens = sum(lengths)
    longest = max(sum(lengths[row] for row in part) for part in parts)
    return {
        "computed": total / tokens,
        "step": sum(slots) * shape.dp / tokens,
        "longest_rank": longest * shape.dp / tokens,
        "micro_batches": count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args()
    cases = []
    for shape in SHAPES:
        case: dict[str, object] = dict(vars(shape))
        for name, grouped in (("by_tokens", False), ("by_groups", True)):
            found = [measure(shape, seed, grouped) for seed in range(args.seeds)]
            case[name] = {key: round(sum(f[key] for f in found) / len(found), 3) for key in found[0]}
        cases.append(case)
    if args.json:
        print(json.dumps({"schema": 1, "seeds": args.seeds, "cases": cases}))
        return
    print(f"{'prompts x n':>12}{'dp':>5}{'tokens':>12}{'budget':>8}  computed        step            longest rank")
    for shape, case in zip(SHAPES, cases, strict=True):
        head = (
            f"{shape.prompts} x {shape.samples}",
            shape.dp,
            f"{shape.prompt_tokens} + {shape.answer_tokens}",
            shape.budget,
        )
        print("{:>12}{:>5}{:>12}{:>8}".format(*head), end="  ")
        a, b = case["by_tokens"], case["by_groups"]
        assert isinstance(a, dict)
        assert isinstance(b, dict)
        print("   ".join(f"{a[k]:.3f} -> {b[k]:.3f}" for k in ("computed", "step", "longest_rank")))


if __name__ == "__main__":
    main()
