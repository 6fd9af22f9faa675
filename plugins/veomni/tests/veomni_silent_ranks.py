"""One rank of two or four: every axis as it is built, and every known silent error without its cure. Writes how far each is from
plain transformers. Started by test_veomni_silent.py."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from veomni_tiny import (
    by_transformers,
    compare,
    engine_on,
    exported,
    nll,
    one_step,
    provider,
    replaced,
    rows,
    rows_of,
    squares,
)

from rlctl.engine import Engine
from rlctl.errors import RlctlError
from rlctl.parts import fsdp
from rlctl.parts.values import draw_value_head
from rlctl_veomni import attention, build, kernels, state, weights
from rlctl_veomni.families import is_fused

CLIP = 0.05


@dataclass(frozen=True)
class Case:
    """One engine and one step. ``model`` is a directory below the scratch directory."""

    model: str
    axes: Mapping[str, int]
    settings: Mapping[str, Any] = field(default_factory=dict)
    clip: float = 0.0
    micro_rows: int = 2


CASES: dict[int, dict[str, Case]] = {
    2: {
        "dp2": Case("qwen2", {}),
        "replicate2": Case("llama", {"dp_replicate": 2}),
        "usp2": Case("qwen3", {"usp": 2}),
        "usp2 values": Case("qwen3-value", {"usp": 2}),
        "usp2, fewer key heads than ranks": Case("moe-tied", {"usp": 2, "ep": 1}),
        "experts whole": Case("moe", {}),
        "ep2": Case("moe", {"ep": 2}),
        "ep2, one row a micro-batch": Case("moe", {"ep": 2}, micro_rows=1),
        "ep2 usp2": Case("moe-tied", {"usp": 2, "ep": 2}),
        "ep2 checkpointing": Case("moe", {"ep": 2}, {"activation_checkpointing": True, "share_prompts": False}),
        "ep2 clipped": Case("moe", {"ep": 2}, clip=CLIP),
        "dp2 clipped": Case("qwen2", {}, clip=CLIP),
    },
    4: {
        "ep2, experts sharded": Case("moe", {"dp_shard": 4, "ep": 2}),
        "ep2, experts sharded, clipped": Case("moe", {"dp_shard": 4, "ep": 2}, clip=CLIP),
        "ep2 replicate2": Case("moe", {"dp_replicate": 2, "ep": 2}),
        "ep4": Case("moe-tied", {"ep": 4}),
        "ep4 usp2": Case("moe", {"usp": 2, "ep": 4}),
        "ep2 usp2 dp2": Case("moe", {"usp": 2, "ep": 2}),
        "replicate2 dp2": Case("llama", {"dp_replicate": 2}),
    },
}


# ---- the cures taken away -----------------------------------------------------------------------------------------
def within_the_slice(engine: Engine) -> None:
    """An attention that knows nothing of slices, and nobody looks which one it is."""
    provider(engine)._built.model.config._attn_implementation_internal = "sdpa"


def mean_of_gradients(engine: Engine) -> None:
    """VeOmni's mean over ranks is left as it is."""
    provider(engine)._undo_mean = 1


def forced_sum(engine: Engine) -> None:
    """Experts of one rank a shard are summed by force, as those of more must be on gloo."""
    for module in fsdp.fsdp_modules(provider(engine)._built.model):
        if build._holds_experts(module):
            module.set_force_sum_reduction_for_comms(True)


def never_reduced(engine: Engine) -> None:
    """No micro-batch is the last one: gradients wait unsharded, and no parameter has any."""
    provider(engine)._set_last = lambda built, last: built.model.set_requires_gradient_sync(False)


@dataclass(frozen=True)
class Mistake:
    """A case without a cure.

    Args:
        figure: what is far off.
        quiet: what is as it should be all the same.
        built: where the cure is at work while the engine is built: (object, attribute, replacement).
    """

    case: Case
    figure: str
    quiet: tuple[str, ...] = ()
    spoil: Callable[[Engine], None] | None = None
    built: tuple[Any, str, Any] | None = None


MISTAKES: dict[str, Mistake] = {
    "attention within the slice": Mistake(
        Case("qwen3", {"usp": 2}),
        "loss",
        spoil=within_the_slice,
        built=(attention, "check_name", lambda *_: None),
    ),
    "mean of gradients": Mistake(Case("qwen2", {}), "grad_norm", ("loss", "numbers"), mean_of_gradients),
    "forced sum of whole experts": Mistake(Case("moe", {"ep": 2}), "grad_norm", ("loss", "numbers"), forced_sum),
    "VeOmni's own precision": Mistake(
        Case("qwen2", {}),
        "numbers",
        built=(build, "MixedPrecisionConfig", lambda **_: build_config()),
    ),
}


def build_config() -> Any:
    from veomni.arguments.arguments_types import MixedPrecisionConfig

    return MixedPrecisionConfig()


# ---- what runs ----------------------------------------------------------------------------------------------------
def step_of(scratch: Path, case: Case, spoil: Callable[[Engine], None] | None = None) -> dict[str, Any]:
    value = case.model.endswith("value")
    batch = rows()
    wanted = by_transformers(scratch / case.model, batch, value=value, clip=case.clip)
    settings = {"optim": {"clip_grad": case.clip}, **case.settings}
    with engine_on(scratch / case.model, case.axes, world=dist_world(), value=value, **settings) as engine:
        if spoil is not None:
            spoil(engine)
        found = one_step(engine, batch, micro_rows=case.micro_rows, loss=squares if value else nll)
        return compare(found, rows_of(wanted, engine, batch))


def dist_world() -> int:
    return int(os.environ["WORLD_SIZE"])


def refusals(scratch: Path) -> dict[str, str]:
    """What is refused in words, by what was tried; every rank must hear of it."""
    world = dist_world()
    bare = scratch / f"bare-{world}"
    tried: dict[str, Callable[[], Any]] = {
        "eager experts": lambda: engine_on(scratch / "moe", {"ep": 2}, world=world, experts="eager"),
        "grouped whole experts": lambda: engine_on(scratch / "moe", {}, world=world, experts="grouped"),
        "bfloat16 on a CPU": lambda: engine_on(scratch / "moe", {}, world=world, param_dtype="bfloat16"),
        "tp": lambda: engine_on(scratch / "moe", {"tp": 2}, world=world),
        "cp": lambda: engine_on(scratch / "moe", {"cp": 2}, world=world),
        "experts beyond the replica": lambda: engine_on(scratch / "moe", {"dp_replicate": world, "ep": 2}, world=world),
        "experts of a dense model": lambda: engine_on(scratch / "qwen2", {"ep": 2}, world=world),
        "missing weights": lambda: engine_on(bare, {}, world=world),
        "another activation": lambda: engine_on(
            {**json.loads((scratch / "moe" / "config.json").read_text()), "hidden_act": "gelu"}, {"ep": 2}, world=world
        ),
    }
    said: dict[str, str] = {}
    for name, attempt in tried.items():
        try:
            with attempt():
                said[name] = "nothing"
        except RlctlError as error:
            said[name] = str(error)
    for name, axes, spoil in (
        ("attention within the slice", {"usp": 2}, within_the_slice),
        ("gradients that were never reduced", {}, never_reduced),
    ):
        with engine_on(scratch / "qwen3", axes, world=world) as engine:
            spoil(engine)
            try:
                one_step(engine, rows())
                said[name] = "nothing"
            except RlctlError as error:
                said[name] = str(error)
    return said


def drawn_in_silence(scratch: Path) -> float:
    """How far VeOmni's loader is from the files, where a weight is missing and nobody looked: it says so in a log alone."""
    with replaced(weights, "_compare", lambda *_: None):
        with engine_on(scratch / f"bare-{dist_world()}", {}, world=dist_world()) as engine:
            found = exported(engine)["model.norm.weight"]
    return float((found - load_file(scratch / "moe" / "model.safetensors")["model.norm.weight"]).abs().max())


def exports(scratch: Path) -> dict[str, Any]:
    """Experts made whole as other weights are, and as they are exported."""
    files = load_file(scratch / "moe" / "model.safetensors")
    with engine_on(scratch / "moe", {"ep": 2}, world=dist_world()) as engine:
        found = exported(engine)
        parameters = dict(provider(engine)._built.model.named_parameters())
    fused = {n: p for n, p in parameters.items() if is_fused(n)}
    with engine_on(scratch / "qwen3", {}, world=dist_world(), value=True, seed=5) as engine:
        head = exported(engine)["score.weight"]
        config = provider(engine)._built.model.config
        drawn = draw_value_head(config.hidden_size, config.initializer_range, 5)
        note = engine.info.notes.get("value_head", "") if engine.info is not None else ""
    return {
        "drawn value head": bool(torch.equal(head, drawn)) and "drawn from seed 5" in note,
        "experts of full_tensor": sorted({p.full_tensor().shape[0] for p in fused.values()}),
        "names": sorted(found) == sorted(files),
        "equal": all(torch.equal(found[n], t) for n, t in files.items()),
        "dtype": sorted({str(t.dtype) for t in found.values()}),
    }


def side_by_side(scratch: Path, *, cure: bool) -> dict[str, Any] | str:
    """A model with spread experts, while a second one of its class has whole ones: VeOmni's kernels are the module's."""
    batch = rows()
    wanted = by_transformers(scratch / "moe", batch)

    @contextlib.contextmanager
    def unbound(self: Any) -> Iterator[None]:
        yield

    hide = contextlib.nullcontext() if cure else replaced(kernels.Kernels, "bound", unbound)
    world = dist_world()
    with engine_on(scratch / "moe", {"ep": 2}, world=world) as spread:
        with engine_on(scratch / "moe", {}, world=world, forward_only=True) as whole, hide:
            try:
                found = one_step(spread, batch)
            except (IndexError, AssertionError) as error:
                return type(error).__name__
            outputs = whole.forward_backward([batch], nll, forward_only=True)
            off = compare(found, rows_of(wanted, spread, batch))
            other = float((outputs[0].items["numbers"] - wanted.numbers).abs().max())
            return {**off, "whole": other}


def after_a_failure(scratch: Path) -> dict[str, Any]:
    """A call that fails in its second micro-batch, and a step after it."""
    batch = rows()
    calls = 0

    def fails(reader: Any, micro: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("the loss fails")
        return nll(reader, micro)

    with engine_on(scratch / "moe", {"ep": 2}, world=dist_world()) as engine:
        with contextlib.suppress(ValueError):
            one_step(engine, batch, micro_rows=1, loss=fails)
        assert calls == 2
        return compare(
            one_step(engine, batch, micro_rows=1), rows_of(by_transformers(scratch / "moe", batch), engine, batch)
        )


def checkpoints(scratch: Path, *, cure: bool) -> dict[str, float]:
    """Three steps of AdamW, saved after the second: how far a fresh engine that loads is from the one that went on."""
    world = dist_world()
    adamw = {"name": "adamw", "lr": 0.05, "weight_decay": 0.1}
    path = scratch / f"state-{world}-{cure}"
    hide = contextlib.nullcontext() if cure else replaced(state, "_described", lambda name, value, place: value)
    batches = [rows(seed=s) for s in range(3)]
    spread = {"ep": 2} if world == 2 else {"dp_shard": 4, "ep": 2}
    with hide:
        with engine_on(scratch / "moe", spread, world=world, optim=adamw) as engine:
            for batch in batches[:2]:
                one_step(engine, batch)
            torch.manual_seed(100 + dist.get_rank())
            engine.save_state(path)
            saved, drawn = exported(engine), torch.rand(3)
            went_on = one_step(engine, batches[2])
        with engine_on(scratch / "moe", spread, world=world, optim=adamw) as engine:
            engine.load_state(path)
            again, drawn_again = exported(engine), torch.rand(3)
            resumed = one_step(engine, batches[2])
    found = {
        "weights": max(float((again[n] - t).abs().max()) for n, t in saved.items()),
        "random state": float((drawn - drawn_again).abs().max()),
        "next step": max(float((resumed.gradients[n] - g).abs().max()) for n, g in went_on.gradients.items()),
        "loss": abs(resumed.loss - went_on.loss),
    }
    if world == 4 and cure:
        # The same ranks along other axes.
        with engine_on(scratch / "moe", {"usp": 2, "ep": 4}, world=world, optim=adamw) as engine:
            engine.load_state(path)
            again = exported(engine)
            moved = one_step(engine, batches[2])
        found["weights elsewhere"] = max(float((again[n] - t).abs().max()) for n, t in saved.items())
        found["next step elsewhere"] = max(
            float((moved.gradients[n] - g).abs().max()) * 32.0 for n, g in went_on.gradients.items()
        )
    return found


def refused_checkpoints(scratch: Path) -> dict[str, str]:
    """What loading says of checkpoints that do not fit, which :func:`checkpoints` wrote."""
    world = dist_world()
    good = scratch / f"state-{world}-True"

    def spoilt(name: str, change: Callable[[Path], None]) -> Path:
        path = scratch / f"spoilt-{world}-{name.replace(' ', '-')}"
        if dist.get_rank() == 0:
            shutil.copytree(good, path)
            change(path)
        dist.barrier()
        return path

    def numbers(**changed: Any) -> Callable[[Path], None]:
        def change(path: Path) -> None:
            file = path / "engine.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))

        return change

    said: dict[str, str] = {}
    adamw = {"name": "adamw", "lr": 0.05}
    with engine_on(scratch / "moe", {"ep": 2}, world=world, optim=adamw) as engine:
        before = exported(engine)
        for name, change in {
            "another world": numbers(world_size=7),
            "another optimizer": numbers(optimizer="sgd"),
            "another step": numbers(num_steps=9),
            "no numbers": lambda path: (path / "engine.json").unlink(),
            "no random state": lambda path: (path / "rng_00001.safetensors").unlink(),
            "a damaged index": lambda path: (path / ".metadata").write_bytes(b"x"),
            "a damaged file": lambda path: next(path.glob("__0_*.distcp")).write_bytes(b""),
        }.items():
            path = spoilt(name, change)
            try:
                engine.load_state(path)
                said[name] = "nothing"
            except RlctlError as error:
                said[name] = str(error)
            dist.barrier()
        after = exported(engine)
        said["what changed"] = ", ".join(n for n, t in before.items() if not torch.equal(after[n], t)) or "nothing"
    with engine_on(scratch / "qwen2", {}, world=world, optim=adamw) as engine:
        try:
            engine.load_state(good)
            said["another model"] = "nothing"
        except RlctlError as error:
            said["another model"] = str(error)
    return said


def main(scratch: Path) -> None:
    """Every case of this world size in one process group."""
    world, rank = dist_world(), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    bare = scratch / f"bare-{world}"
    if rank == 0:
        shutil.copytree(scratch / "moe", bare)
        held = load_file(bare / "model.safetensors")
        del held["model.norm.weight"]
        save_file(held, bare / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    found: dict[str, Any] = {"cases": {name: step_of(scratch, case) for name, case in CASES[world].items()}}
    if world == 2:
        found["mistakes"] = {}
        for name, mistake in MISTAKES.items():
            with contextlib.ExitStack() as stack:
                if mistake.built is not None:
                    stack.enter_context(replaced(*mistake.built))
                found["mistakes"][name] = step_of(scratch, mistake.case, mistake.spoil)
        found["refusals"] = refusals(scratch)
        found["drawn in silence"] = drawn_in_silence(scratch)
        found["exports"] = exports(scratch)
        found["side by side"] = side_by_side(scratch, cure=True)
        found["side by side, one binding"] = side_by_side(scratch, cure=False)
        found["after a failure"] = after_a_failure(scratch)
    found["checkpoints"] = checkpoints(scratch, cure=True)
    found["checkpoints, local experts"] = checkpoints(scratch, cure=False)
    if world == 2:
        found["refused checkpoints"] = refused_checkpoints(scratch)
    (scratch / f"world{world}-rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
