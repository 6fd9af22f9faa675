"""The work in rlctl: one JSON object on stdout."""

from __future__ import annotations

import time

START = time.time()

import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from itertools import pairwise  # noqa: E402
from pathlib import Path  # noqa: E402

import yaml  # noqa: E402


def reward_source() -> str:
    """The reward of both sides: 1.0 for the bare answer, else 0.4 when the last number is right (chat work only)."""
    return str(Path(__file__).with_name("reward.py"))


def main() -> None:
    folder, threads, dtype = Path(sys.argv[1]).resolve(), int(sys.argv[2]), sys.argv[3]
    work = json.loads((folder / "work.json").read_text())
    config = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {
            "train_files": [str(folder / "prompts.jsonl")],
            "train_batch_size": work["prompts_per_step"],
            "max_prompt_length": work["max_prompt"],
            "max_response_length": work["max_new"],
            "shuffle": False,
            "system_prompt": work["system"] if work["chat"] else None,
        },
        "actor": {
            "optim": {"lr": work["lr"], "betas": [0.9, 0.95], "weight_decay": 0.0},
            "max_tokens_per_device": work["max_tokens_per_device"],
            "engine": {"param_dtype": dtype},
        },
        "rollout": {"n": work["samples"]},
        "reward": {"components": [{"name": f"{reward_source()}:reward", "args": {"chat": work["chat"]}}]},
        "trainer": {
            "total_training_steps": work["steps"],
            "num_threads": threads,
            "val_before_train": False,
            "save_best": False,
            "logger": ["jsonl"],
        },
    }
    path = Path(tempfile.mkdtemp()) / "bench.yaml"
    path.write_text(yaml.safe_dump(config))

    from rlctl.config.load import load_config
    from rlctl.plugins import load_plugins
    from rlctl.tracking.reporter import NullReporter
    from rlctl.trainers.run import Runner

    ends: list[float] = []

    class Clock(NullReporter):
        def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
            ends.append(time.time())

    plugins = load_plugins()
    runner = Runner(load_config(str(path), plugins=plugins), plugins, Clock(), run_dir=path.parent / "run")
    result = runner.execute()
    steps = [b - a for a, b in pairwise(ends)]
    samples = work["prompts_per_step"] * work["samples"]
    tokens = [m["response_length/mean"] * samples for m in result.history[1:]]
    print(
        json.dumps(
            {
                "side": "rlctl",
                "first_step_end_s": ends[0] - START,
                "steps_s": steps,
                "samples_per_step": samples,
                "tokens_per_step": sum(tokens) / len(tokens),
                "generate_s": sum(m["timing_s/gen"] for m in result.history[1:]) / len(steps),
                "reward_first": result.first["critic/score/mean"],
                "reward_last": result.last["critic/score/mean"],
                "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
                "threads": threads,
                "dtype": dtype,
                "malloc": os.environ.get("MALLOC_MMAP_MAX_", ""),
            }
        )
    )


if __name__ == "__main__":
    main()
