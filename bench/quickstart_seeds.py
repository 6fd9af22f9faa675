"""A recipe for several seeds: reward of the first and last tenth of the steps, greedy accuracy before and after, what a critic explains."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", default="quickstart")
    args = parser.parse_args()
    worst = 1.0
    for seed in args.seeds:
        start = time.time()
        command = [sys.executable, "-m", "rlctl_cli.main", "train", args.recipe, f"trainer.seed={seed}", "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        result = json.loads(done.stdout)
        reward, val = result["metrics"]["critic/score/mean"], result["validation"]
        gain = reward["last_tenth"] - reward["first_tenth"]
        worst = min(worst, gain)
        explained = result["metrics"].get("critic/vf_explained_var")
        words = f"explained {explained['first_tenth']:+.3f} -> {explained['last_tenth']:+.3f}, " if explained else ""
        print(
            f"seed {seed}: mean reward {reward['first_tenth']:.3f} -> {reward['last_tenth']:.3f} ({gain:+.3f}), "
            f"greedy {val['first']:.3f} -> {val['last']:.3f}, {words}{time.time() - start:.0f} s, {result['run']}",
            flush=True,
        )
        if val["last"] <= val["first"]:
            sys.exit(f"seed {seed}: greedy accuracy did not rise")
        if explained and explained["last_tenth"] <= explained["first_tenth"]:
            sys.exit(f"seed {seed}: the critic explains no more than at first")
    if worst < 0.15:
        sys.exit(f"the smallest gain {worst:.3f} is under 0.15")


if __name__ == "__main__":
    main()
