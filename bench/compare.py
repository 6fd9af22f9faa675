"""Alternate the two sides of the benchmark and print the table (and one JSON line with --json)."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from prepare import WORKS, prepare

HERE = Path(__file__).parent


def run(python: str, side: str, folder: Path, threads: int, dtype: str, malloc: bool) -> dict[str, Any]:
    env = dict(os.environ, OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if malloc:
        env |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
    command = [python, str(HERE / f"side_{side}.py"), str(folder), str(threads), dtype]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("works", nargs="*", default=sorted(WORKS), help=f"among {', '.join(sorted(WORKS))}")
    parser.add_argument("--trl-python", default=".venvs/trl/bin/python")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--malloc", action="store_true", help="glibc settings that keep freed memory, on both sides")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    out: dict[str, Any] = {}
    for name in args.works:
        folder = prepare(name, Path(".bench"))
        results: dict[str, list[dict[str, Any]]] = {"rlctl": [], "trl": []}
        for pair in range(args.pairs):
            for side, python in (("rlctl", sys.executable), ("trl", args.trl_python)):
                results[side].append(run(python, side, folder, args.threads, args.dtype, args.malloc))
                print(
                    f"{name} pair {pair + 1} {side}: median {statistics.median(results[side][-1]['steps_s']):.3f} s a step",
                    file=sys.stderr,
                )
        rows = {}
        for side, runs in results.items():
            seconds = statistics.median(statistics.median(r["steps_s"]) for r in runs)
            rows[side] = {
                "s_per_step": seconds,
                "samples_per_s": runs[0]["samples_per_step"] / seconds,
                "tokens_per_s": statistics.mean(r["tokens_per_step"] for r in runs) / seconds,
                "peak_rss_gb": max(r["peak_rss_gb"] for r in runs),
                "first_step_end_s": statistics.median(r["first_step_end_s"] for r in runs),
            }
        ratios = [
            statistics.median(b["steps_s"]) / statistics.median(a["steps_s"])
            for a, b in zip(results["rlctl"], results["trl"], strict=True)
        ]
        print(
            f"\n{name}: {args.dtype}, {args.threads} threads, malloc settings {'on' if args.malloc else 'off'}, "
            f"{args.pairs} alternating pairs"
        )
        print(f"{'':8}{'s/step':>10}{'samples/s':>12}{'tokens/s':>12}{'peak GB':>10}{'start to end of step 1':>26}")
        for side, row in rows.items():
            print(
                f"{side:8}{row['s_per_step']:>10.3f}{row['samples_per_s']:>12.1f}{row['tokens_per_s']:>12.0f}"
                f"{row['peak_rss_gb']:>10.2f}{row['first_step_end_s']:>24.1f} s"
            )
        print(f"TRL / rlctl time a step, pair by pair: {', '.join(f'{r:.2f}' for r in ratios)}")
        out[name] = {"rows": rows, "ratios": ratios}
    if args.json:
        print(json.dumps({"schema": 1, **out}))


if __name__ == "__main__":
    main()
