"""The backend on the megatron-core that MindSpeed patches, in one process or two ranks. Started by test_megatron_legacy.py.

Prints one JSON object: version, and for each case how far one step is from plain transformers, or what a resumed run finds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_tiny import (
    CONFIGS,
    by_transformers,
    compare,
    engine_on,
    exported,
    nll,
    one_step,
    rows,
    save_model,
    squares,
)

from rlctl_megatron import versions

ALONE: dict[str, tuple[str, bool, dict[str, int]]] = {
    "llama-tied": ("llama-tied", False, {}),
    "mistral": ("mistral", False, {}),
    "qwen3-moe values": ("qwen3-moe", True, {}),
}
TWO: dict[str, tuple[str, bool, dict[str, int]]] = {
    "tp2": ("llama", False, {"tp": 2}),
    "tp2 sp values": ("qwen3", True, {"tp": 2, "sp": 1}),
    "pp2 vpp2": ("llama-tied", False, {"pp": 2, "vpp": 2}),
    "cp2": ("qwen2", False, {"cp": 2}),
    "dp2": ("llama", False, {}),
    "ep2": ("qwen3-moe", False, {"ep": 2}),
    "tp2 sp, whole experts": ("qwen3-moe", False, {"tp": 2, "sp": 1}),
    "etp2 tp2 sp": ("mixtral", False, {"tp": 2, "sp": 1, "etp": 2}),
}
RESUMED: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "whole moments, tp2": ("llama", {"tp": 2}, {}),
    "whole moments, pp2 vpp2": ("llama", {"pp": 2, "vpp": 2}, {}),
    "sharded moments": ("llama", {}, {"distributed_optimizer": "always"}),
}
ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5}


def step_of(directory: Path, value: bool, axes: dict[str, int], world: int) -> float:
    """The largest of all differences between a step on these ranks and plain transformers."""
    batch = rows()
    with engine_on(directory, axes, world=world, value=value) as engine:
        assert engine.mesh is not None
        mine = batch.select(list(range(batch.num_rows))[engine.mesh.dp_rank :: engine.mesh.dp_size])
        seen = one_step(engine, mine, micro_rows=1, loss=squares if value else nll)
        seen.loss = engine.reduce([seen.loss])[0]
        wanted = by_transformers(directory, batch, value=value)
        if engine.mesh.dp_size > 1:
            wanted.numbers = by_transformers(directory, mine, value=value).numbers
    return compare(seen, wanted).largest()


def resumed(directory: Path, scratch: Path, axes: dict[str, int], settings: dict[str, Any]) -> float:
    """How far the step after a resume is from the step that was not interrupted."""
    after = []
    for state in ("written", "read"):
        with engine_on(directory, axes, world=2, optim=ADAMW, **settings) as engine:
            assert engine.mesh is not None
            mine = rows().select(list(range(6))[engine.mesh.dp_rank :: engine.mesh.dp_size])
            if state == "written":
                for _ in range(2):
                    one_step(engine, mine, micro_rows=1)
                engine.save_state(scratch)
            else:
                engine.load_state(scratch)
            one_step(engine, mine, micro_rows=1)
            after.append(exported(engine))
    return max(float((after[0][n] - after[1][n]).abs().max()) for n in after[0])


def main(scratch: Path) -> None:
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    cases = TWO if world > 1 else ALONE
    out: dict[str, Any] = {"version": str(versions.installed()), "steps": {}, "resumed": {}}
    for name, (model, value, axes) in cases.items():
        directory = scratch / name.replace(" ", "-")
        if rank == 0:
            save_model(directory, CONFIGS[model], value)
        if world > 1:
            dist.barrier()
        out["steps"][name] = step_of(directory, value, axes, world)
    if world > 1:
        for name, (_, axes, settings) in RESUMED.items():
            out["resumed"][name] = resumed(scratch / "dp2", scratch / f"state {name}", axes, settings)
        dist.destroy_process_group()
    if rank == 0:
        (scratch / f"found{world}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()))
