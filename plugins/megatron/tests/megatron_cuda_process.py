"""One process on one GPU, without stand-ins: writes what test_megatron_cuda.py looks at."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron_tiny import (
    CONFIGS,
    by_transformers,
    compare,
    engine_on,
    exported,
    nll,
    one_step,
    provider,
    rows,
    save_model,
    squares,
)

ADAMW = {"name": "adamw", "lr": 1e-3}
LARGE: dict[str, Any] = {**CONFIGS["llama"], "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None


def parity(scratch: Path) -> dict[str, Any]:
    """float32 on the device against transformers on the CPU."""
    out: dict[str, Any] = {}
    for name, config in CONFIGS.items():
        directory, batch = save_model(scratch / name, config), rows()
        with engine_on(directory, device="cuda", param_dtype="float32", layers="local") as engine:
            out[name] = asdict(compare(one_step(engine, batch), by_transformers(directory, batch)))
    directory = save_model(scratch / "values", CONFIGS["qwen2"], value=True)
    with engine_on(directory, value=True, device="cuda", param_dtype="float32", layers="local") as engine:
        found = one_step(engine, rows(), loss=squares)
        out["values"] = asdict(compare(found, by_transformers(directory, rows(), value=True)))
    return out


def half_precision(scratch: Path) -> dict[str, Any]:
    """bfloat16 with float32 main weights: six steps, the export, and the numbers beside those of float32."""
    out: dict[str, Any] = {}
    for name in ("llama-tied", "qwen3-moe"):
        for layers in ("local", "transformer_engine") if HAS_ENGINE else ("local",):
            directory, batch = save_model(scratch / f"half-{name}", CONFIGS[name]), rows()
            wanted = by_transformers(directory, batch)
            with engine_on(directory, device="cuda", optim=ADAMW, layers=layers) as engine:
                assert engine.info is not None
                start = exported(engine)
                first, *_, last = [one_step(engine, batch) for _ in range(6)]
                end = exported(engine)
            out[f"{name} {layers}"] = {
                "notes": engine.info.notes,
                "dtypes": sorted({str(t.dtype) for t in start.values()}),
                "losses": [first.loss, last.loss],
                "grad_norm": abs(first.grad_norm - wanted.grad_norm) / wanted.grad_norm,
                "numbers": float((first.numbers - wanted.numbers).abs().mean()),
                "moved": sum(bool((end[n] != t).any()) for n, t in start.items()) / len(start),
            }
    return out


def offload(scratch: Path) -> dict[str, Any]:
    """The same steps with everything at home and with everything away between calls; bytes on the device."""
    directory = save_model(scratch / "large", LARGE)
    out: dict[str, Any] = {}
    for away in (False, True):
        settings = {"param_offload": away, "optimizer_offload": away, "layers": "local"}
        with engine_on(directory, device="cuda", optim=ADAMW, **settings) as engine:
            norms = [one_step(engine, rows(seed=s)).grad_norm for s in range(3)]
            torch.cuda.synchronize()
            resting = torch.cuda.memory_allocated()
            engine.move("cpu", "model", "optimizer", "grad")
            moved = torch.cuda.memory_allocated()
            total = sum(float(t.double().sum()) for t in exported(engine).values())
            assert engine.info is not None
            out[str(away)] = {
                "norms": norms, "resting": resting, "moved": moved, "sum": total, "weights": engine.info.num_parameters,
            }  # fmt: skip
    return out


def resume(scratch: Path) -> dict[str, Any]:
    """The step after loading beside the step after saving, with whole and with sharded moments."""
    directory = save_model(scratch / "resume", CONFIGS["llama"])
    out: dict[str, Any] = {}
    for choice in ("never", "always"):
        settings = {"device": "cuda", "optim": ADAMW, "distributed_optimizer": choice, "layers": "local"}
        with engine_on(directory, **settings) as engine:
            for seed in range(2):
                one_step(engine, rows(seed=seed))
            engine.save_state(scratch / f"state-{choice}")
            wanted, weights = one_step(engine, rows(seed=2)), exported(engine)
        with engine_on(directory, **settings) as engine:
            engine.load_state(scratch / f"state-{choice}")
            found, again = one_step(engine, rows(seed=2)), exported(engine)
        out[choice] = {
            "grad_norm": abs(found.grad_norm - wanted.grad_norm) / wanted.grad_norm,
            "weights": max(float((again[n] - t).abs().max()) for n, t in weights.items()),
        }
    return out


def recompute(scratch: Path) -> dict[str, Any]:
    """Layers computed again, in bfloat16."""
    directory = save_model(scratch / "recompute", CONFIGS["qwen3"])
    seen = []
    for choice in ("none", "full"):
        with engine_on(directory, device="cuda", recompute=choice, layers="local") as engine:
            seen.append(one_step(engine, rows()))
    return asdict(compare(seen[1], seen[0]))


def untouched(scratch: Path) -> dict[str, Any]:
    """No stand-in is at work in this process."""
    from megatron.core.tensor_parallel import layers as theirs

    del scratch
    with engine_on(CONFIGS["llama"], forward_only=True, device="cuda") as engine:
        engine.forward_backward([rows()], nll, forward_only=True)
        device = provider(engine)._place.device.type
    return {"torch": theirs.torch is torch, "device": device}


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    f.__name__: f for f in (parity, half_precision, offload, resume, recompute, untouched)
}


def main(scratch: Path) -> None:
    out: dict[str, Any] = {}
    for name, part in PARTS.items():
        try:
            out[name] = part(scratch)
        except Exception as error:  # one part's fault shall not hide what the others say
            import traceback

            out[name] = {"error": "".join(traceback.format_exception(error))[-3000:]}
    (scratch / "seen.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
