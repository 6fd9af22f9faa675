"""The work in TRL's GRPOTrainer: one JSON object on stdout. Runs in TRL's own environment."""

from __future__ import annotations

import time

START = time.time()

import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from itertools import pairwise  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from reward import score  # noqa: E402


def main() -> None:
    folder, threads, dtype = Path(sys.argv[1]).resolve(), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(threads)
    work = json.loads((folder / "work.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]

    def prompt(text: str) -> object:
        if not work["chat"]:
            return text
        return [{"role": "system", "content": work["system"]}, {"role": "user", "content": text}]

    def reward(completions: list, answer: list[str], **_: object) -> list[float]:
        texts = [c[0]["content"] if work["chat"] else c for c in completions]
        return [score(t, a, work["chat"]) for t, a in zip(texts, answer, strict=True)]

    samples = work["prompts_per_step"] * work["samples"]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=samples,
        num_generations=work["samples"],
        max_completion_length=work["max_new"],
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_steps=work["steps"],
        use_cpu=True,
        bf16=dtype == "bfloat16",
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        max_grad_norm=1.0,
        adam_beta2=0.95,
        weight_decay=0.0,
        shuffle_dataset=False,
        disable_tqdm=True,
        seed=0,
    )
    ends: list[float] = []
    logs: list[dict] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(time.time())

        def on_log(
            self, args: object, state: object, control: object, logs: dict | None = None, **kwargs: object
        ) -> None:
            if logs and "reward" in logs:
                all_logs.append(logs)

    all_logs = logs
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        callbacks=[Clock()],
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": prompt(r["prompt"]), "answer": r["answer"]} for r in rows]),
    )
    trainer.train()
    steps = [b - a for a, b in pairwise(ends)]
    lengths = [float(entry["completions/mean_length"]) for entry in logs[1:]]
    print(
        json.dumps(
            {
                "side": "trl",
                "first_step_end_s": ends[0] - START,
                "steps_s": steps,
                "samples_per_step": samples,
                "tokens_per_step": sum(lengths) / len(lengths) * samples,
                "reward_first": float(logs[0]["reward"]),
                "reward_last": float(logs[-1]["reward"]),
                "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
                "threads": threads,
                "dtype": dtype,
                "malloc": os.environ.get("MALLOC_MMAP_MAX_", ""),
            }
        )
    )


if __name__ == "__main__":
    main()
