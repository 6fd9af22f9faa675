"""One rank of a two-rank group that writes checkpoints, or of a fresh one that reads them. Started by test_megatron_state.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_tiny import engine_on, exported, nll, one_step, rows, squares

from rlctl.engine import Engine
from rlctl.errors import CheckpointError

ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5}
SHARDED = {"distributed_optimizer": "always"}
WHOLE = {"distributed_optimizer": "never"}


@dataclass(frozen=True)
class Kind:
    """How an engine is built."""

    model: str
    axes: Mapping[str, int]
    optim: Mapping[str, Any] = field(default_factory=lambda: ADAMW)
    settings: Mapping[str, Any] = field(default_factory=dict)


WRITTEN: dict[str, Kind] = {
    "tp2": Kind("llama", {"tp": 2}),
    "pp2": Kind("llama-tied", {"pp": 2}),
    "tp2-values": Kind("qwen2-value", {"tp": 2}),
    "dp2-sharded": Kind("llama", {}, settings=SHARDED),
    "ep2": Kind("qwen3-moe", {"ep": 2}, settings=WHOLE),
    "tp2-sgd": Kind("llama", {"tp": 2}, {"name": "sgd", "lr": 0.1}),
}
READ: dict[str, tuple[str, Kind]] = {
    "tp2 at tp2": ("tp2", WRITTEN["tp2"]),
    "tp2 at pp2": ("tp2", Kind("llama", {"pp": 2})),
    "tp2 at dp2": ("tp2", Kind("llama", {}, settings=WHOLE)),
    "tp2 at cp2": ("tp2", Kind("llama", {"cp": 2})),
    "pp2 at pp2": ("pp2", WRITTEN["pp2"]),
    "pp2 at tp2": ("pp2", Kind("llama-tied", {"tp": 2, "sp": 1})),
    "tp2-values at tp2": ("tp2-values", WRITTEN["tp2-values"]),
    "tp2-values at pp2": ("tp2-values", Kind("qwen2-value", {"pp": 2})),
    "dp2-sharded at dp2": ("dp2-sharded", WRITTEN["dp2-sharded"]),
    "ep2 at ep2": ("ep2", WRITTEN["ep2"]),
    "ep2 at tp2": ("ep2", Kind("qwen3-moe", {"tp": 2, "sp": 1})),
    "tp2-sgd at pp2": ("tp2-sgd", Kind("llama", {"pp": 2}, WRITTEN["tp2-sgd"].optim)),
}
"""name -> (what is read, who reads it). All two ranks."""
REFUSED: dict[str, tuple[str, Kind]] = {
    "sharded moments at tp2": ("dp2-sharded", Kind("llama", {"tp": 2}, settings=SHARDED)),
    "sharded moments, whole here": ("dp2-sharded", Kind("llama", {}, settings=WHOLE)),
    "whole moments, sharded here": ("tp2", Kind("llama", {"tp": 2}, settings=SHARDED)),
    "another optimizer": ("tp2", Kind("llama", {"tp": 2}, {"name": "sgd", "lr": 0.1})),
    "another model": ("tp2", Kind("qwen2", {"tp": 2})),
}


def _step(engine: Engine, name: str) -> tuple[float, float]:
    """(loss, grad norm) of one step with one row a micro-batch."""
    assert engine.mesh is not None
    batch = rows()
    mine = list(range(batch.num_rows))[engine.mesh.dp_rank :: engine.mesh.dp_size]
    seen = one_step(engine, batch.select(mine), micro_rows=1, loss=squares if name.endswith("-value") else nll)
    return engine.reduce([seen.loss])[0], seen.grad_norm


def _engine(scratch: Path, kind: Kind, seed_model: str | None = None) -> Any:
    return engine_on(
        scratch / (seed_model or kind.model),
        kind.axes,
        world=2,
        optim=kind.optim,
        value=kind.model.endswith("-value"),
        **kind.settings,
    )


def write(scratch: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, and the step that a resumed run must take again."""
    out: dict[str, Any] = {}
    for name, kind in WRITTEN.items():
        with _engine(scratch, kind) as engine:
            for _ in range(2):
                _step(engine, kind.model)
            saved = exported(engine)
            engine.save_state(scratch / f"state-{name}")
            out[name] = {"saved": saved, "step": _step(engine, kind.model), "after": exported(engine)}
    return out


def read(scratch: Path) -> dict[str, Any]:
    """What other engines find in those checkpoints, and how they refuse them. They start from other weights."""
    out: dict[str, Any] = {}
    for name, (written, kind) in READ.items():
        with _engine(scratch, kind, f"{kind.model}-other") as engine:
            engine.load_state(scratch / f"state-{written}")
            loaded = exported(engine)
            out[name] = {"saved": loaded, "step": _step(engine, kind.model), "after": exported(engine)}
    for name, (written, kind) in REFUSED.items():
        with _engine(scratch, kind) as engine:
            try:
                engine.load_state(scratch / f"state-{written}")
            except CheckpointError as error:
                out[name] = str(error)
    return out


def main(what: str, scratch: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]) + (100 if what == "read" else 0))
    dist.init_process_group("gloo")
    torch.save({"write": write, "read": read}[what](scratch), scratch / f"{what}{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main(sys.argv[1], Path(sys.argv[2]))
