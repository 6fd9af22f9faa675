"""Eight algorithms on the quickstart's task, from one warm-started model: what each makes of the same steps and samples.

Writes ``bench/algorithms.json`` and, from it, the table of ``docs/algorithms.md``. ``--table`` writes the table alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "algorithms.json"
PAGE = ROOT / "docs" / "algorithms.md"
START = "<!-- algorithms: made by make bench-algorithms; do not edit by hand -->\n"
END = "<!-- end of algorithms -->\n"

STEPS = 30
PROMPTS = 32
SAMPLES = 8
COMMON = (
    f"trainer.total_training_steps={STEPS}",
    f"data.train_batch_size={PROMPTS}",
    f"actor.ppo_mini_batch_size={PROMPTS // 2}",
    f"rollout.n={SAMPLES}",
    # Three tokens more than an answer has: room for DAPO's overlong buffer, which would else punish right answers.
    "data.max_response_length=12",
    "trainer.test_freq=0",
    "trainer.logger=[jsonl]",
)
"""Two optimizer steps a batch: in one alone every ratio is 1, and no clip would ever act."""

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "GRPO": ("algorithm.adv_estimator=grpo", "actor.loss_agg_mode=seq-mean-token-mean"),
    "RLOO": ("algorithm.adv_estimator=rloo", "actor.loss_agg_mode=seq-mean-token-sum"),
    "REINFORCE++": ("algorithm.adv_estimator=reinforce_plus_plus",),
    "Dr.GRPO": ("algorithm.adv_estimator=dr_grpo", "actor.loss_agg_mode=seq-mean-token-sum-norm"),
    "GSPO": (
        "algorithm.adv_estimator=grpo",
        "actor.policy_loss.loss_mode=gspo",
        "actor.loss_agg_mode=seq-mean-token-mean",
    ),
    "DAPO": (
        "algorithm.adv_estimator=grpo",
        "actor.policy_loss.clip_ratio_low=0.2",
        "actor.policy_loss.clip_ratio_high=0.28",
        "algorithm.filter_groups={metric: score, max_num_gen_batches: 10}",
        "algorithm.mask_truncated_completions=true",
        "reward.overlong_buffer={len: 2}",
    ),
    "CISPO": ("algorithm.adv_estimator=grpo", "actor.policy_loss.loss_mode=cispo"),
    "ReMax": ("algorithm.adv_estimator=remax", "actor.loss_agg_mode=seq-mean-token-sum"),
}
"""Name to what it sets; where nothing is said, rlctl's defaults: loss vanilla, token-mean."""
RATES: dict[str, str] = {}
"""Learning rates other than the quickstart's, 1e-4."""


def overrides(name: str) -> list[str]:
    """Everything that a run of an algorithm sets on the quickstart, apart from its start weights."""
    return [*COMMON, *ALGORITHMS[name], f"actor.optim.lr={RATES.get(name, '1e-4')}"]


def train(folder: Path, *settings: str) -> dict[str, Any]:
    """One run in ``folder``: what ``rlctl train --json`` says of it."""
    command = [
        sys.executable,
        "-m",
        "rlctl_cli.main",
        "train",
        "quickstart",
        *settings,
        "--run-dir",
        str(folder),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout)


def measure(name: str, folder: Path, model: Path, seed: int) -> dict[str, Any]:
    """One algorithm's numbers, from its metrics."""
    start = [f"model.path={model}", "model.init=pretrained", "warm_start=null", f"trainer.seed={seed}"]
    result = train(folder, *start, *overrides(name))
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in steps if "critic/score/mean" in line]
    assert len(steps) == STEPS, f"{name} has {len(steps)} steps"
    # Of all prompts that were sampled, not only of those that a filter left.
    rewards = [line.get("dynamic_sampling/score_mean", line["critic/score/mean"]) for line in steps]
    tenth = STEPS // 10
    batches = sum(line.get("train/num_gen_batches", 1) for line in steps)
    return {
        "settings": list(ALGORITHMS[name]),
        "lr": RATES.get(name, "1e-4"),
        "reward": [sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth],
        "held_out": [result["validation"]["first"], result["validation"]["last"]],
        "prompts_sampled": round(batches * PROMPTS),
    }


def improved(row: dict[str, Any]) -> bool:
    """True where reward and held-out score are higher at the end."""
    return all(row[key][1] > row[key][0] for key in ("reward", "held_out"))


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    columns = ("algorithm", "set beside the defaults", "lr", "mean reward", "held-out greedy score", "prompts sampled")
    lines = [
        f"Seed {results['seed']}, {results['steps']} steps of {results['prompts']} prompts x {results['samples']} samples, two optimizer",
        "steps a batch, from one model after a warm start. Mean reward: first tenth -> last tenth of the steps; held out: before -> after.",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
    ]
    for name, row in results["algorithms"].items():
        settings = ", ".join(f"`{s}`" for s in row["settings"])
        reward, held_out = (f"{a:.3f} -> {b:.3f}" for a, b in (row["reward"], row["held_out"]))
        lines.append(f"| {name} | {settings} | {row['lr']} | {reward} | {held_out} | {row['prompts_sampled']:,} |")
    return "\n".join(lines) + "\n"


def write_table() -> None:
    """The table of the page, from the results that are there."""
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    assert after, f"{PAGE} has no place for the table"
    PAGE.write_text(before + START + table(json.loads(RESULTS.read_text())) + END + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="+", choices=ALGORITHMS, help="measure these again, and keep the others' results"
    )
    parser.add_argument("--table", action="store_true", help="write the table again, from the results that are there")
    parser.add_argument("--model", type=Path, help="start weights; default: the quickstart's warm start is run first")
    args = parser.parse_args()
    if args.table:
        write_table()
        return
    work = Path(tempfile.mkdtemp(prefix="rlctl-bench-algorithms-"))
    try:
        model = args.model
        if model is None:
            train(work / "start", f"trainer.seed={args.seed}", *COMMON, "trainer.total_training_steps=1")
            model = work / "start" / "warm_start" / "export"
        results: dict[str, Any] = {"seed": args.seed, "steps": STEPS, "prompts": PROMPTS, "samples": SAMPLES}
        known = json.loads(RESULTS.read_text()) if args.only else {}
        if args.only and {k: v for k, v in known.items() if k != "algorithms"} != results:
            sys.exit("the other results are of other settings: measure all")
        found: dict[str, Any] = known.get("algorithms", {})
        for name in args.only or ALGORITHMS:
            found[name] = row = measure(name, work / name, model, args.seed)
            print(f"{name}: reward {row['reward']}, held out {row['held_out']}", flush=True)
            RESULTS.write_text(json.dumps({**results, "algorithms": found}, indent=2) + "\n")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    write_table()
    if bad := [name for name, row in found.items() if not improved(row)]:
        sys.exit(f"no better at the end: {', '.join(bad)}")


if __name__ == "__main__":
    main()
