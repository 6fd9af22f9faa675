"""The stages of run_two_gpus.sh, each in a process of its own with a time limit; OUT/summary.json says what came of them.

Exit codes: 0 every stage did all that it should, 1 one did not, 2 the machine has not what was asked for.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from rlctl.device import detect_device
from rlctl.errors import CapabilityError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUDGET_S = 570.0
LIMITS_S = {"verify": 330.0, "step": 150.0, "weights": 75.0, "grpo": 110.0}
"""Of the stages, none of which may take the time of those after it."""
DENSE = ("qwen3",)
MOE = ("qwen3_moe",)


@dataclass(frozen=True)
class Case:
    """One topology of a backend, with tiny models; on a CPU in float32 alone."""

    backend: str
    topology: str
    models: tuple[str, ...] = DENSE
    ranks: int = 2
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


CASES = (
    Case("fsdp2", "dp_shard=2"),
    Case("fsdp2", "usp=2"),
    Case("fsdp2", "dp_replicate=2"),
    Case("megatron", "tp=2"),
    Case("megatron", "tp=2,sp=1"),
    Case("megatron", "pp=2"),
    Case("megatron", "cp=2"),
    Case("megatron", "dp_shard=2,ep=2", MOE),
    Case("megatron", "dp_shard=2", dtypes=("float32",)),
    Case("megatron", "pp=2,vpp=2", dtypes=("float32",)),
    Case("megatron", "tp=2,sp=1,etp=2", MOE, dtypes=("float32",)),
    Case("veomni", "", MOE, ranks=1),
    Case("veomni", "dp_shard=2"),
    Case("veomni", "usp=2"),
    Case("veomni", "dp_shard=2,ep=2", MOE),
    Case("veomni", "usp=2,ep=2", MOE),
)
LIBRARIES = {"fsdp2": "rlctl_fsdp", "megatron": "megatron.core", "veomni": "veomni"}
"""A backend whose library is not in this environment is left out: VeOmni has one of its own."""
"""HSDP with two ranks is two replicas: dp_replicate 2 x dp_shard 2 needs four."""
SINGLE = (
    Case("fsdp2", "", ranks=1),
    Case("megatron", "", ranks=1),
    Case("megatron", "", MOE, 1),
    Case("veomni", "", MOE, 1),
)
SMALL = (Case("fsdp2", "usp=2"), Case("megatron", "tp=2,sp=1"))

GRPO: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "qwen3", "vocab_size": 64, "hidden_size": 1024, "intermediate_size": 3072,
            "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 4096, "tie_word_embeddings": True,
        },
    },
    "data": {
        "task": {"name": "sort_digits", "args": {"length": 12}, "train_size": 2000, "val_size": 8},
        "train_batch_size": 32, "val_batch_size": 8, "max_prompt_length": 40, "max_response_length": 16,
    },
    "actor": {"optim": {"lr": 1.0e-6}, "skip_zero_advantage": False},
    "rollout": {"n": 8, "temperature": 1.0},
    "reward": {"components": [{"name": "contains", "args": {"text": "1"}}]},
    "trainer": {"type": "rl", "total_training_steps": 20, "val_before_train": False, "save_freq": 0, "logger": ["jsonl"]},
}  # fmt: skip


@dataclass
class Run:
    """One run of this script."""

    out: Path
    device: str
    ranks: int
    layers: tuple[str, ...]
    started: float

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    def left(self, stage: str) -> float:
        return max(1.0, min(LIMITS_S[stage], BUDGET_S - (time.monotonic() - self.started)))

    def call(self, name: str, command: Sequence[str], limit_s: float) -> tuple[int, str]:
        """(exit status, standard output); both streams are kept in OUT/NAME.txt. -1: it ran into its limit."""
        log = self.out / f"{name}.txt"
        with log.open("w") as errors:
            process = subprocess.Popen(
                list(command), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
            try:
                output, status = process.communicate(timeout=limit_s)[0], process.returncode
            except subprocess.TimeoutExpired:
                # Its ranks too: they are of the same session.
                os.killpg(process.pid, 9)
                output, status = process.communicate()[0], -1
        with log.open("a") as file:
            file.write(output)
        return status, output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2))
    parser.add_argument("--only", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument(
        "--layers", nargs="+", default=["local", "transformer_engine"], help="of megatron, where present"
    )
    parser.add_argument("--verify-cases", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.verify_cases:
        return verify_cases(args.device, args.ranks, args.layers, args.dtype)
    problem = _missing(args.device, args.ranks)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    run = Run(args.out.resolve(), args.device, args.ranks, tuple(args.layers), time.monotonic())
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    summary: dict[str, Any] = {
        "schema": 1,
        "date": today,
        "device": args.device,
        "ranks": args.ranks,
        **_machine(args.device),
    }
    stages: dict[str, Any] = {}
    for name in args.only:
        begin = time.monotonic()
        stages[name] = STAGES[name](run)
        stages[name]["seconds"] = round(time.monotonic() - begin, 1)
        summary["stages"] = stages
        (run.out / "summary.json").write_text(json.dumps(summary, indent=1))
        print(f"{name}: {'ok' if stages[name]['ok'] else 'FAILED'}, {stages[name]['seconds']} s", flush=True)
    return 0 if all(stage["ok"] for stage in stages.values()) else 1


def _missing(device: str, ranks: int) -> str | None:
    try:
        detect_device(device)
    except CapabilityError as error:
        return str(error)
    if device != "cpu" and torch.accelerator.device_count() < ranks:
        return f"{ranks} devices are needed; found {torch.accelerator.device_count()}; --ranks 1 needs one"
    return None


def _machine(device: str) -> dict[str, Any]:
    names = ("torch", "transformers", "megatron-core", "transformer-engine", "veomni", "rlctl-core")
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    on_cuda = device == "cuda"
    return {"device_name": torch.cuda.get_device_name(0) if on_cuda else "cpu", "versions": versions}


# ---- parity ---------------------------------------------------------------------------------------------------------
def stage_verify(run: Run) -> dict[str, Any]:
    """Of each dtype in processes of its own, at the same time: tiny models leave a GPU almost empty, and most of the time goes
    into starting and building."""
    command = [sys.executable, __file__, "--verify-cases", "--out", str(run.out), "--device", run.device]
    command += ["--ranks", str(run.ranks), "--layers", *run.layers]
    dtypes, limit_s = _dtypes(run.device), run.left("verify")
    with ThreadPoolExecutor(len(dtypes)) as pool:
        found = list(pool.map(lambda dtype: run.call(f"verify-{dtype}", [*command, "--dtype", dtype], limit_s), dtypes))
    cases = [json.loads(line) for _, output in found for line in output.splitlines() if line.startswith("{")]
    wanted = sum(len(_plan(run.device, run.ranks, run.layers, dtype)) for dtype in dtypes)
    done = [c for c in cases if c["done"]]
    failed = [c for c in cases if not c["passed"]]
    print(f"  {len(done)} of {wanted} topologies, {len(cases)} cases, {len(failed)} failed", flush=True)
    status = {dtype: status for dtype, (status, _) in zip(dtypes, found, strict=True)}
    return {
        "ok": not any(status.values()) and len(done) == wanted and not failed,
        "status": status,
        "wanted": wanted,
        "cases": cases,
    }


def _dtypes(device: str) -> tuple[str, ...]:
    return ("float32",) if device == "cpu" else ("float32", "bfloat16")


def _plan(device: str, ranks: int, layers: Sequence[str], dtype: str) -> list[tuple[Case, tuple[str, ...]]]:
    """(case, settings of the engine) of a dtype. Where Transformer Engine is present megatron's cases in bfloat16, the dtype that
    it takes, come with it; ``layers`` without it leaves it out."""
    if ranks == 1:
        cases = SINGLE
    else:
        cases = SMALL if device == "cpu" else CASES
    there = device != "cpu" and importlib.util.find_spec("transformer_engine") is not None
    plan: list[tuple[Case, tuple[str, ...]]] = []
    for case in cases:
        if dtype not in case.dtypes or not _installed(LIBRARIES[case.backend]):
            continue
        if case.backend == "megatron" and there and dtype == "bfloat16" and "transformer_engine" in layers:
            plan.append((case, ("layers=transformer_engine",)))
        elif "local" in layers:
            plan.append((case, ("layers=local",) if case.backend == "megatron" and there else ()))
    return plan


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not there
        return False


def verify_cases(device_type: str, ranks: int, layers: Sequence[str], dtype: str) -> int:
    """In a process of its own: one JSON object a case on standard output, the last of each topology with ``done``."""
    from rlctl.plugins import load_plugins
    from rlctl.verify.request import make_request
    from rlctl.verify.run import Verifier

    plugins, device, good = load_plugins(), detect_device(device_type), True
    with Verifier(plugins) as verifier:
        for case, engine in _plan(device_type, ranks, layers, dtype):
            request = make_request(
                plugins,
                case.backend,
                device,
                topology=case.topology or None,
                nproc=None if case.topology else 1,
                models=[f"tiny:{m}" for m in case.models],
                dtype=dtype,
                engine=engine,
                timeout_s=90,
            )
            found = verifier.run(request).cases
            for i, one in enumerate(found):
                good = good and one.passed
                line = {**one.to_json(), "dtype": dtype, "engine": list(engine), "done": i == len(found) - 1}
                print(json.dumps(line), flush=True)
    return 0 if good else 1


# ---- the training step ----------------------------------------------------------------------------------------------
def stage_step(run: Run) -> dict[str, Any]:
    """One rank, then two: with rows of their own (weak scaling), and with shared rows (strong scaling)."""
    short, long = ("2x64", "1x256") if run.small else ("16x1024", "2x8192")
    layouts = [("one", 1, "", [short, long])]
    if run.ranks == 2:
        layouts += [
            ("dp2", 2, "dp_shard=2", [short, long]),
            ("usp2", 2, "usp=2", [short, long] if run.small else [long]),
        ]
    found: dict[str, Any] = {}
    ok = True
    for name, ranks, topology, shapes in layouts:
        command = [*_launch(ranks), "bench/gpu_step.py", "--device", run.device, "--steps", "3", "--shapes", *shapes]
        command += ["--model", "tiny" if run.small else "0.6b", *(["--topology", topology] if topology else [])]
        status, output = run.call(f"step-{name}", command, min(60.0, run.left("step")))
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        found[name] = {f"{line['rows']}x{line['length']}": line for line in lines if "rows" in line}
        ok = ok and status == 0 and len(found[name]) == len(shapes)
    efficiency: dict[str, float] = {}
    for name in ("dp2", "usp2"):
        for shape, line in found.get(name, {}).items():
            if shape in found["one"]:
                alone = found["one"][shape]["tokens_per_s"]
                efficiency[f"{name} {shape}"] = line["tokens_per_s"] / (2 * alone)
    for name, value in efficiency.items():
        print(f"  {name}: {value:.3f} of twice one device", flush=True)
    return {"ok": ok, "layouts": found, "efficiency": efficiency}


def _launch(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


# ---- weights from one process to another ----------------------------------------------------------------------------
def stage_weights(run: Run) -> dict[str, Any]:
    if run.ranks == 1:
        return {"ok": True, "skipped": "needs two devices"}
    size = ["--mib", "32", "--shape", "tiny"] if run.small else ["--mib", "1024", "--shape", "0.6b"]
    command = [sys.executable, "bench/weight_transport.py", "--device", run.device, *size]
    status, output = run.call("weights", command, run.left("weights"))
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    for line in lines:
        print(f"  {json.dumps(line)[:400]}", flush=True)
    return {"ok": status == 0 and bool(lines), "measured": lines}


# ---- a run of GRPO --------------------------------------------------------------------------------------------------
def stage_grpo(run: Run) -> dict[str, Any]:
    import rlctl_cli

    tokenizer = Path(rlctl_cli.__file__).parent / "recipes" / "quickstart" / "model"
    config = {**GRPO, "model": {**GRPO["model"], "tokenizer": str(tokenizer)}}
    steps = 20
    if run.small:
        steps = 3
        tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        tiny |= {"num_key_value_heads": 2, "head_dim": 16}
        config["model"] = {**config["model"], "config": {**GRPO["model"]["config"], **tiny}}
        config["data"] = {**GRPO["data"], "train_batch_size": 8}
    file, directory = run.out / "grpo.yaml", run.out / "grpo"
    file.write_text(yaml.safe_dump(config))
    shutil.rmtree(directory, ignore_errors=True)
    command = [sys.executable, "-m", "rlctl_cli.main", "train", str(file), "--run-dir", str(directory), "--steps"]
    command += [str(steps), "--nproc", str(run.ranks), f"trainer.device={run.device}", "--quiet"]
    status, _ = run.call("grpo-log", command, run.left("grpo"))
    metrics = directory / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    keys = ("timing_s/step", "timing_s/gen", "timing_s/update_actor", "perf/throughput", "actor/grad_norm")
    keys += ("training/rollout_probs_diff_mean", "critic/score/mean", "perf/max_memory_allocated_gb")
    kept = [{k: line[k] for k in ("training/global_step", *keys) if k in line} for line in lines]
    done = sum("actor/grad_norm" in line for line in lines)
    print(f"  {done} of {steps} steps", flush=True)
    return {"ok": status == 0 and done == steps, "status": status, "steps": kept}


STAGES: dict[str, Callable[[Run], dict[str, Any]]] = {
    "verify": stage_verify,
    "step": stage_step,
    "weights": stage_weights,
    "grpo": stage_grpo,
}


if __name__ == "__main__":
    sys.exit(main())
