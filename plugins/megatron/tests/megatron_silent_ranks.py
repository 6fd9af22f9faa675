"""One rank of a two-rank group: every axis as it is built, and every known silent error without its cure. Writes how far each
is from plain transformers. Started by test_megatron_silent.py."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_tiny import (
    LENGTHS,
    Seen,
    by_transformers,
    compare,
    engine_on,
    exported,
    nll,
    one_step,
    provider,
    replaced,
    rows,
    squares,
)

from rlctl.batch import PackedBatch
from rlctl.engine import Engine
from rlctl_megatron import build, families, specs, state
from rlctl_megatron.families import Entry, Layout

FINALIZE = "megatron.core.distributed.finalize_model_grads"
"""The module; the package has a function of the same name in its place."""


@dataclass(frozen=True)
class Case:
    """One engine and one step on rows of ``lengths``. ``model`` is a directory below the scratch directory."""

    model: str
    axes: Mapping[str, int]
    settings: Mapping[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = LENGTHS


CASES: dict[str, Case] = {
    "tp2": Case("qwen3", {"tp": 2}),
    "tp2 sp": Case("qwen3", {"tp": 2, "sp": 1}),
    "tp2 biases": Case("qwen2", {"tp": 2}),
    "tp2 tied sp": Case("llama-tied", {"tp": 2, "sp": 1}),
    "tp2 window": Case("mistral", {"tp": 2}),
    "tp2 sp experts": Case("mixtral", {"tp": 2, "sp": 1}),
    "tp2 values sp": Case("qwen2-value", {"tp": 2, "sp": 1}),
    "pp2": Case("llama", {"pp": 2}),
    "pp2 tied": Case("llama-tied", {"pp": 2}),
    "pp2 values": Case("qwen2-value", {"pp": 2}),
    "pp2 vpp2": Case("llama", {"pp": 2, "vpp": 2}),
    # Messages that change places are of one size only where all rows are; else the processes end in the transport.
    "pp2 vpp2 equal rows": Case("llama", {"pp": 2, "vpp": 2}, lengths=(8,) * 6),
    "cp2": Case("qwen3", {"cp": 2}),
    "cp2 window": Case("mistral", {"cp": 2}),
    "dp2": Case("qwen2", {}),
    "ep2 alltoall": Case("qwen3-moe", {"ep": 2}),
    "ep2 allgather": Case("qwen3-moe", {"ep": 2}, {"moe_token_dispatcher": "allgather"}),
    "ep2 shares of all": Case("qwen3-moe-all", {"ep": 2}),
    "etp2": Case("qwen3-moe", {"etp": 2}),
    "tp2 recompute": Case("qwen3", {"tp": 2, "sp": 1}, {"recompute": "full"}),
    "pp2 recompute": Case("llama-tied", {"pp": 2}, {"recompute": "full"}),
}


# ---- the cures taken away -----------------------------------------------------------------------------------------
def _flags(**flags: Any) -> AbstractContextManager[None]:
    """Other fields of megatron-core's configuration."""
    return replaced(build, "TransformerConfig", lambda **fields: TransformerConfig(**{**fields, **flags}))


def _swapped_table() -> AbstractContextManager[None]:
    """Gate and up change places in the table of llama, for loading and export alike."""

    def swap(entry: Entry) -> Entry:
        fused = entry.layout is Layout.COLUMN and len(entry.stored) == 2
        return replace(entry, stored=entry.stored[::-1]) if fused else entry

    layer, expert = families.TABLES["llama"]
    return replaced(families, "TABLES", {**families.TABLES, "llama": (tuple(map(swap, layer)), expert)})


class _UnmarkedNorm(specs.RMSNorm):
    """Its gradient is that of one rank's tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]


@contextlib.contextmanager
def _head_norms_not_summed() -> Iterator[None]:
    """Gradients of query and key norms stay those of one rank's heads: megatron-core is not told of them in time."""
    finalize = sys.modules[FINALIZE]
    whole = finalize._allreduce_non_tensor_model_parallel_grads  # type: ignore[attr-defined]

    def without(model: Any, config: Any, *rest: Any) -> None:
        with replaced(config, "qk_layernorm", False):
            whole(model, config, *rest)

    with replaced(finalize, "_allreduce_non_tensor_model_parallel_grads", without):
        yield


@contextlib.contextmanager
def _no_gemm_name() -> Iterator[None]:
    held = moe_utils.te_general_gemm  # type: ignore[attr-defined]
    del moe_utils.te_general_gemm  # type: ignore[attr-defined]
    try:
        yield
    finally:
        moe_utils.te_general_gemm = held  # type: ignore[attr-defined]


def _experts_as_copies() -> AbstractContextManager[None]:
    """Experts are taken for weights that all data parallel ranks have alike, as megatron-core does unless ep > 1."""
    whole = build._mark_split

    def marked(chunk: Any, *rest: Any) -> None:
        whole(chunk, *rest)
        for weight in chunk.module.parameters():
            weight.allreduce = True

    return replaced(build, "_mark_split", marked)


def _nothing(*_: Any, **__: Any) -> None: ...


@dataclass(frozen=True)
class Mistake:
    """A case without one cure.

    Args:
        figure: which comparison must be far off.
        quiet: comparisons that see nothing, which is why it was silent.
    """

    case: str
    without: Callable[[], AbstractContextManager[None]]
    figure: str
    quiet: tuple[str, ...] = ()


MISTAKES: dict[str, Mistake] = {
    "interleaved with the default p2p flags": Mistake(
        "pp2 vpp2 equal rows", lambda: _flags(overlap_p2p_comm=False, batch_p2p_comm=True), "numbers"
    ),
    "split weights without marks": Mistake(
        "tp2", lambda: replaced(build, "_mark_split", _nothing), "grad_norm", ("loss", "numbers", "gradients")
    ),
    "gate and up change places": Mistake("pp2", _swapped_table, "numbers"),
    "norms without marks under sp": Mistake(
        "tp2 sp", lambda: replaced(specs, "RMSNorm", _UnmarkedNorm), "gradients", ("loss", "numbers")
    ),
    "norms of heads not summed": Mistake("tp2", _head_norms_not_summed, "gradients", ("loss", "numbers")),
    "two copies of the embedding not summed": Mistake(
        "pp2 tied",
        lambda: replaced(sys.modules[FINALIZE], "_allreduce_word_embedding_grads", _nothing),
        "gradients",
        ("loss", "numbers"),
    ),
    "the loss divided by the micro-batches": Mistake(
        "pp2", lambda: _flags(calculate_per_token_loss=False), "grad_norm", ("numbers",)
    ),
    "gradients averaged over data parallel ranks": Mistake(
        "dp2", lambda: _flags(calculate_per_token_loss=False), "grad_norm", ("numbers",)
    ),
    "gradients averaged over context parallel ranks": Mistake(
        "cp2", lambda: _flags(calculate_per_token_loss=False), "grad_norm", ("numbers",)
    ),
    "shards of experts summed over data parallel ranks": Mistake(
        "etp2", _experts_as_copies, "gradients", ("loss", "numbers")
    ),
    "experts not summed over the ranks that hold them": Mistake(
        "tp2 sp experts", _experts_as_copies, "gradients", ("loss", "numbers")
    ),
    "probabilities of the chosen experts alone": Mistake(
        "ep2 shares of all", lambda: _flags(moe_router_pre_softmax=False), "numbers"
    ),
}
LOUD: dict[str, tuple[str, Callable[[], AbstractContextManager[None]]]] = {
    "router-gemm-name": ("ep2 alltoall", _no_gemm_name),
    "split-sizes": (
        "ep2 alltoall",
        lambda: replaced(token_dispatcher, "maybe_move_tensor_to_cpu", moe_utils.maybe_move_tensor_to_cpu),
    ),
}
"""Stand-ins without which nothing runs: case, and the way to do without."""


# ---- running ------------------------------------------------------------------------------------------------------
def _step(engine: Engine, batch: PackedBatch, mine: list[int], loss: Any) -> Seen:
    """One row a micro-batch. The loss is that of all ranks."""
    seen = one_step(engine, batch.select(mine), micro_rows=1, loss=loss)
    return replace(seen, loss=engine.reduce([seen.loss])[0])


def run_case(case: Case, scratch: Path) -> dict[str, Any]:
    """How far one step is from transformers'."""
    value = case.model.endswith("-value")
    batch, directory = rows(case.lengths), scratch / case.model
    wanted = by_transformers(directory, batch, value=value)
    with engine_on(directory, case.axes, world=2, value=value, **case.settings) as engine:
        assert engine.mesh is not None
        mine = list(range(batch.num_rows))[engine.mesh.dp_rank :: engine.mesh.dp_size]
        found = _step(engine, batch, mine, squares if value else nll)
    own = batch.split_items(wanted.numbers)
    return asdict(compare(found, replace(wanted, numbers=torch.cat([own[i] for i in mine]))))


def run_loud(case: Case, without: Callable[[], AbstractContextManager[None]], scratch: Path) -> str:
    """The error of one forward pass without what the engine has when it is built."""
    with engine_on(scratch / case.model, case.axes, world=2, forward_only=True, **case.settings) as engine:
        try:
            with without():
                engine.forward_backward([rows()], nll, forward_only=True)
        except (NameError, TypeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def run_shared_counter(scratch: Path) -> dict[str, float]:
    """Largest difference of a weight after a resumed step, with each weight's own step count and with one for all."""
    optim = {"name": "adamw", "lr": 1e-2}
    batch = rows()
    mine = list(range(batch.num_rows))[dist.get_rank() :: 2]

    def engine() -> AbstractContextManager[Engine]:
        return engine_on(scratch / "llama", world=2, optim=optim, distributed_optimizer="always")

    with engine() as first:
        for _ in range(2):
            _step(first, batch, mine, nll)
        first.save_state(scratch / "counter")
        _step(first, batch, mine, nll)
        wanted = exported(first)
    off: dict[str, float] = {}
    for name, context in {
        "ours": contextlib.nullcontext(),
        "one counter": replaced(state, "_count_steps", _nothing),
    }.items():
        with context, engine() as resumed:
            resumed.load_state(scratch / "counter")
            assert provider(resumed)._stepper.num_steps == 2
            _step(resumed, batch, mine, nll)
            off[name] = max(float((t - wanted[n]).abs().max()) for n, t in exported(resumed).items())
    return off


def main(scratch: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out: dict[str, Any] = {
        "cases": {name: run_case(case, scratch) for name, case in CASES.items()},
        "mistakes": {},
        "loud": {},
        "counter": run_shared_counter(scratch),
    }
    for name, mistake in MISTAKES.items():
        with mistake.without():
            out["mistakes"][name] = run_case(CASES[mistake.case], scratch)
    for name, (case, without) in LOUD.items():
        out["loud"][name] = run_loud(CASES[case], without, scratch)
    (scratch / f"rank{dist.get_rank()}.json").write_text(json.dumps(out))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main(Path(sys.argv[1]))
