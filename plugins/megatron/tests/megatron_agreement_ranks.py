"""One rank of a two-rank group in which one rank alone has a fault. Writes what each rank raises, and after how long. Started by
test_megatron_agreement.py."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_tiny import CONFIGS, engine_on, exported, nll, one_step, replaced, rows

from rlctl.batch import PackedBatch
from rlctl.engine import Engine
from rlctl.errors import RlctlError
from rlctl_megatron import masters, source

ADAMW = {"name": "adamw", "lr": 1e-2}
LIMIT_S = 60.0
"""Of a collective: a rank that is left waiting fails then, and not in words."""


# ---- rows ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rows:
    """Micro-batches that one rank alone is given."""

    axes: Mapping[str, int]
    faulty: int
    wrong: Callable[[list[PackedBatch]], list[PackedBatch]]
    model: str = "llama"
    settings: Mapping[str, Any] = field(default_factory=dict)


def _token(batches: list[PackedBatch]) -> list[PackedBatch]:
    ids = batches[0].items["input_ids"].clone()
    ids[3] = 10_000
    return [batches[0].with_items(input_ids=ids), *batches[1:]]


def _weights(batches: list[PackedBatch]) -> list[PackedBatch]:
    return [*batches[:-1], batches[-1].with_items(item_weight=2.0 * batches[-1].items["item_weight"])]


ROWS: dict[str, Rows] = {
    "a bad token at tp2": Rows({"tp": 2}, 1, _token),
    "a bad token at pp2": Rows({"pp": 2}, 0, _token),
    "a bad token at dp2": Rows({}, 1, _token),
    "other weights at tp2": Rows({"tp": 2}, 1, _weights),
    "other weights at pp2": Rows({"pp": 2}, 0, _weights),
    "other rows at cp2": Rows({"cp": 2}, 1, lambda _: list(rows(seed=5).chunks(2))),
    "a micro-batch less at dp2": Rows({}, 1, lambda batches: batches[:-1]),
    "a micro-batch less at tp2": Rows({"tp": 2}, 0, lambda batches: batches[:-1]),
    "a micro-batch more at ep2": Rows({"ep": 2}, 1, lambda batches: [*batches, batches[0]], "qwen3-moe"),
}


def run_rows(case: Rows, scratch: Path) -> dict[str, Any]:
    good = list(rows().chunks(2))
    with engine_on(scratch / case.model, case.axes, world=2) as engine:
        mine = case.wrong(good) if dist.get_rank() == case.faulty else good
        out = _caught(lambda: engine.forward_backward(mine, nll, forward_only=False))
        # Nothing of the refused call is left, and the ranks are still in step.
        out["after"] = one_step(engine, rows()).grad_norm
    with engine_on(scratch / case.model, case.axes, world=2) as engine:
        out["untouched"] = one_step(engine, rows()).grad_norm
    return out


# ---- checkpoints --------------------------------------------------------------------------------------------------
def _gone(name: str) -> Callable[[Path], None]:
    return lambda state: (state / name).unlink()


def _halved(name: str) -> Callable[[Path], None]:
    def halve(state: Path) -> None:
        (state / name).write_bytes((state / name).read_bytes()[: (state / name).stat().st_size // 2])

    return halve


def _said(**numbers: Any) -> Callable[[Path], None]:
    def say(state: Path) -> None:
        file = state / "engine.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | numbers))

    return say


STATES: dict[str, tuple[int, Callable[[Path], object]]] = {
    "no random state": (1, lambda state: [f.unlink() for f in state.glob("rng_*")]),
    "no numbers": (0, _gone("engine.json")),
    "half the numbers": (1, _halved("engine.json")),
    "numbers of another optimizer": (1, _said(optimizer="sgd")),
    "no description": (0, _gone(".metadata")),
    "half a description": (1, _halved(".metadata")),
    "no kind of file": (1, _gone("metadata.json")),
    "half a common part": (1, _halved("common.pt")),
    "no weights of the other rank": (0, _gone("__1_0.distcp")),
    "half its weights": (1, _halved("__1_0.distcp")),
    "nothing": (1, lambda state: shutil.rmtree(state)),
}
"""name -> (the rank whose copy is damaged, how)."""


def run_states(scratch: Path) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    rank = dist.get_rank()
    with engine_on(scratch / "llama", {"tp": 2}, world=2, optim=ADAMW) as engine:
        one_step(engine, rows())
        engine.save_state(scratch / "whole")
        one_step(engine, rows(seed=1))
        before = exported(engine)
        for name, (faulty, damage) in STATES.items():
            copy = scratch / f"copy{rank}"
            shutil.copytree(scratch / "whole", copy)
            if rank == faulty:
                damage(copy)
            out[name] = _caught(lambda copy=copy: engine.load_state(copy))
            out[name]["same"] = all(torch.equal(t, before[n]) for n, t in exported(engine).items())
            shutil.rmtree(copy, ignore_errors=True)
        engine.load_state(scratch / "whole")
    return out


# ---- weights ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Start:
    """An engine that one rank alone cannot build.

    Args:
        drawn: weights are random numbers that rank 0 sends.
        damage: of the faulty rank's copy of the model.
        within: what goes wrong there.
    """

    faulty: int
    drawn: bool = False
    damage: Callable[[Path], object] | None = None
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def _third_store() -> AbstractContextManager[None]:
    """The third weight does not fit into the memory."""
    whole, calls = masters.MainWeights.store, iter(range(1000))

    def store(self: Any, *rest: Any) -> None:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("out of memory at the third weight")
        whole(self, *rest)

    return replaced(masters.MainWeights, "store", store)


def _third_read() -> AbstractContextManager[None]:
    """The disk fails at the third slice."""
    whole, calls = source.FileSource._read, iter(range(1000))

    def read(self: Any, *rest: Any) -> Any:
        if next(calls) == 2:
            raise OSError(5, "Input/output error")
        return whole(self, *rest)

    return replaced(source.FileSource, "_read", read)


def _third_draw() -> AbstractContextManager[None]:
    """Rank 0 fails while it sends."""
    whole = source._saved

    def saved(model: Any, tensors: Any) -> Iterator[Any]:
        for number, item in enumerate(whole(model, tensors)):
            if number == 2 and item[1].device.type != "meta":
                raise MemoryError("out of memory at the third tensor")
            yield item

    return replaced(source, "_saved", saved)


def _no_draw() -> AbstractContextManager[None]:
    def draw(self: Any) -> Any:
        raise MemoryError("out of memory before the first tensor")

    return replaced(source.DrawnSource, "_draw", draw)


STARTS: dict[str, Start] = {
    "no config": Start(1, damage=_gone("config.json")),
    "no weights": Start(0, damage=_gone("model.safetensors")),
    "half the weights": Start(1, damage=_halved("model.safetensors")),
    "a disk that fails": Start(1, within=_third_read),
    "a full memory": Start(0, within=_third_store),
    "a full memory, drawn": Start(1, drawn=True, within=_third_store),
    "a full memory where it is drawn": Start(0, drawn=True, within=_no_draw),
    "a full memory where it is sent": Start(0, drawn=True, within=_third_draw),
}


def run_start(case: Start, scratch: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    faulty = rank == case.faulty
    copy = scratch / f"model{rank}"
    shutil.copytree(scratch / "llama", copy)
    if faulty and case.damage is not None:
        case.damage(copy)

    def start(model: Any) -> Any:
        with engine_on(model, {"tp": 2}, world=2) as engine:
            assert isinstance(engine, Engine)
            return None

    model = CONFIGS["llama"] if case.drawn else copy
    with case.within() if faulty else nullcontext():
        out = _caught(lambda: start(model))
    shutil.rmtree(copy)
    return out


# ---- running ------------------------------------------------------------------------------------------------------
def _caught(doing: Callable[[], object]) -> dict[str, Any]:
    """What was raised, in words, and after how many seconds."""
    begun = time.monotonic()
    try:
        doing()
    except RlctlError as error:
        return {"words": str(error), "kind": "RlctlError", "seconds": time.monotonic() - begun}
    except Exception as error:
        # What a user would see as a traceback; the test says that it must not be.
        return {"words": str(error), "kind": type(error).__name__, "seconds": time.monotonic() - begun}
    return {"words": "", "kind": "", "seconds": time.monotonic() - begun}


def main(scratch: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LIMIT_S))
    out = {
        "rows": {name: run_rows(case, scratch) for name, case in ROWS.items()},
        "states": run_states(scratch),
        "starts": {name: run_start(case, scratch) for name, case in STARTS.items()},
    }
    (scratch / f"rank{dist.get_rank()}.json").write_text(json.dumps(out))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main(Path(sys.argv[1]))
