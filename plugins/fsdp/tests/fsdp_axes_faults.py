"""Faults injected into the real engine, which the comparison must notice; and what the engine refuses by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_axes_models import BORDER_MIXING, CONVOLUTION, LONG_ROPE, RECURRENCE, SIX_HEADS
from fsdp_cases import FAMILIES, Bench, Case, differences, draw_on
from fsdp_helpers import batch_of, build_engine, model_section, nll, rows

from rlctl.engine import Engine
from rlctl.errors import RlctlError
from rlctl.microbatch import MicroBatchPlan
from rlctl.parts import fsdp, layout, ulysses
from rlctl.topology import Topology
from rlctl_fsdp import inspection

Fault = Callable[[pytest.MonkeyPatch, Engine], None]


def _positions_restart(patch: pytest.MonkeyPatch, _engine: Engine) -> None:
    """Each rank counts its own slice's positions from zero."""
    whole = layout.lay_out

    def wrong(*args: Any, **kwargs: Any) -> layout.Layout:
        laid = whole(*args, **kwargs)
        if laid.part is None:
            return laid
        positions = torch.arange(laid.part.width, device=laid.inputs["input_ids"].device)[None]
        return replace(laid, inputs={**laid.inputs, "position_ids": positions})

    for module in (layout, inspection):
        patch.setattr(module, "lay_out", wrong)


def _positions_not_sliced(patch: pytest.MonkeyPatch, _engine: Engine) -> None:
    """Every rank takes the first slice's positions."""
    whole = layout.lay_out

    def wrong(*args: Any, **kwargs: Any) -> layout.Layout:
        laid = whole(*args, **kwargs)
        if laid.part is None:
            return laid
        kwargs["ulysses"] = replace(laid.part.ulysses, rank=0)
        return replace(laid, inputs={**laid.inputs, "position_ids": whole(*args, **kwargs).inputs["position_ids"]})

    for module in (layout, inspection):
        patch.setattr(module, "lay_out", wrong)


def _gradients_of_every_rank(patch: pytest.MonkeyPatch, _engine: Engine) -> None:
    """What an all-reduce's own backward does: the copy of the loss on every rank of the group counts."""

    sound = ulysses._Assemble.forward

    def forward(ctx: Any, values: torch.Tensor, index: torch.Tensor, total: int, group: Any) -> torch.Tensor:
        ctx.group = group
        return sound(ctx, values, index, total, group)

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None

    patch.setattr(ulysses._Assemble, "forward", staticmethod(forward))
    patch.setattr(ulysses._Assemble, "backward", staticmethod(backward))


def _border_tokens_lost(patch: pytest.MonkeyPatch, _engine: Engine) -> None:
    """A token whose predecessor ends a slice belongs to nobody: the mask was cut, and not what predicts."""
    own = ulysses.Slice.own

    def wrong(self: ulysses.Slice, sources: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mine, local = own(self, sources)
        inside = local < self.width - 1
        return mine[inside], local[inside]

    patch.setattr(ulysses.Slice, "own", wrong)


def _mean_over_ranks(_patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """A mean, as FSDP computes it without :func:`rlctl_fsdp.shard.shard`'s setters."""
    assert engine.mesh is not None
    for module in fsdp.fsdp_modules(engine._pm.get_plugin("provider")._root):
        module.set_gradient_divide_factor(float(engine.mesh.world_size))


def _replicas_left_alone(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Gradients are summed over shards, and never over replicas."""
    replicas = engine._pm.get_plugin("provider")._place.mesh.get_group("dp_replicate")
    reduce = dist.all_reduce

    def wrong(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return None if kwargs.get("group") is replicas else reduce(tensor, *args, **kwargs)

    patch.setattr(dist, "all_reduce", wrong)


def _heads_to_other_ranks(patch: pytest.MonkeyPatch, _engine: Engine) -> None:
    """Key/value heads go to the ranks in turn, not to those whose query heads they serve."""
    blocks = ulysses._blocks

    def wrong(t: torch.Tensor, size: int, copies: int) -> torch.Tensor:
        return blocks(t.repeat(1, copies, 1, 1), size, 1)

    patch.setattr(ulysses, "_blocks", wrong)


def _one_gradient_of_copied_heads(patch: pytest.MonkeyPatch, _engine: Engine) -> None:
    """Of the copies of a key/value head only one sends its gradient home."""
    blocks = ulysses._blocks

    def wrong(t: torch.Tensor, size: int, copies: int) -> torch.Tensor:
        return blocks(torch.stack([t, *[t.detach()] * (copies - 1)], 2).flatten(1, 2), size, 1)

    patch.setattr(ulysses, "_blocks", wrong)


def _slices_in_another_order(patch: pytest.MonkeyPatch, _engine: Engine) -> None:
    """What a rank receives is put together from the wrong end."""
    exchange = ulysses._exchange
    patch.setattr(ulysses, "_exchange", lambda blocks, group: exchange(blocks, group).flip(0))


def _boundaries_of_other_segments(patch: pytest.MonkeyPatch, _engine: Engine) -> None:
    """Rows begin and end where they would in another order of the segments."""
    boundaries = layout._boundaries

    def wrong(segments: Any, device: torch.device) -> dict[str, Any]:
        found = boundaries(segments, device)
        if "key_index" in found:
            return found
        starts = found["cu_seq_lens_q"]
        return {**found, **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), (starts[-1] - starts).flip(0))}

    patch.setattr(layout, "_boundaries", wrong)


FAULTS: dict[str, tuple[tuple[int, int, int], Fault]] = {
    "positions-restart": ((1, 2, 2), _positions_restart),
    "positions-not-sliced": ((1, 1, 4), _positions_not_sliced),
    "gradients-of-every-rank": ((1, 2, 2), _gradients_of_every_rank),
    "border-tokens-lost": ((2, 1, 2), _border_tokens_lost),
    "mean-over-shards": ((1, 4, 1), _mean_over_ranks),
    "mean-over-replicas": ((2, 2, 1), _mean_over_ranks),
    "mean-over-usp": ((1, 1, 4), _mean_over_ranks),
    "replicas-left-alone": ((2, 2, 1), _replicas_left_alone),
    "heads-to-other-ranks": ((1, 1, 4), _heads_to_other_ranks),
    "one-gradient-of-copied-heads": ((1, 1, 4), _one_gradient_of_copied_heads),
    "slices-in-another-order": ((2, 1, 2), _slices_in_another_order),
    "boundaries-of-other-segments": ((1, 2, 2), _boundaries_of_other_segments),
}
"""Name -> (mesh, what is broken)."""


def _fault_case(sizes: tuple[int, int, int]) -> Case:
    return replace(
        draw_on(sizes, 7, "llama"), loss="nll", mode="token-mean", calls=1, clip=0.0, settings=(),
        lengths=(9, 5, 14, 9, 6, 11), prompts=(-1,) * 6, max_rows=3, max_tokens=None,
        owner=tuple(i % (sizes[0] * sizes[1]) for i in range(6)),
    )  # fmt: skip


def with_faults(device: str) -> dict[str, dict[str, Any]]:
    """For each fault what the comparison finds with it and without it, and whether an engine still starts with it."""
    found: dict[str, dict[str, Any]] = {}
    any_case = _fault_case((1, 1, 4))
    wanted = Bench(any_case, device, alone=True).run(any_case)
    for sizes in sorted({sizes for sizes, _ in FAULTS.values()}):
        case = _fault_case(sizes)
        bench = Bench(case, device)
        sound = differences(bench.run(case), wanted)
        for name in (n for n, (s, _) in FAULTS.items() if s == sizes):
            with pytest.MonkeyPatch.context() as patch:
                FAULTS[name][1](patch, bench.engine)
                broken = differences(bench.run(case), wanted)
                starts = not said(lambda c=case: Bench(c, device))
            found[name] = {"sound": sound, "broken": broken, "starts": starts}
            for module in fsdp.fsdp_modules(bench.engine._pm.get_plugin("provider")._root):
                module.set_gradient_divide_factor(1.0)
    return found


def said(call: Callable[[], Any]) -> str:
    """The words of the refusal, or nothing."""
    try:
        call()
    except RlctlError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(rank: int, device: str) -> dict[str, str]:
    """What this rank is told; ranks must never wait for one that stopped."""
    split = Topology(world_size=4, dp_shard=2, usp=2)
    found: dict[str, str] = {}

    def build(config: dict[str, Any], topology: Topology = split, **settings: Any) -> Engine:
        model = {"config": dict(config), "tokenizer": "unused", "dtype": "float32"}
        return build_engine(model, topology=topology, device=device, **settings)

    for name, config in (("border-mixing", BORDER_MIXING), ("convolution", CONVOLUTION), ("recurrence", RECURRENCE)):
        for dtype in ("float32", "bfloat16"):
            found[f"{name}-{dtype}"] = said(lambda c=config, d=dtype: build(c, param_dtype=d))
    whole_rows = Topology(world_size=4, dp_shard=2, dp_replicate=2)
    found["border-mixing-whole-rows"] = said(lambda: build(BORDER_MIXING, whole_rows, param_dtype="float32"))
    found["six-heads"] = said(lambda: build(SIX_HEADS, Topology(world_size=4, usp=4)))
    found["per-row"] = said(lambda: build(model_section("llama")["config"], attention="per_row"))
    found["long-rope"] = said(lambda: build(LONG_ROPE).infer_batch(batch_of(rows((4, 30))), MicroBatchPlan(max_rows=2)))
    engine = build(model_section("llama")["config"])
    plan = MicroBatchPlan(max_rows=2)
    batch = batch_of(rows((5, 4)))
    # Of the four ranks (0, 1) and (2, 3) share rows.
    other = batch_of(rows((5, 4), seed=1)) if rank == 1 else batch
    found["other-rows"] = said(lambda: engine.infer_batch(other, plan))
    masked = batch.items["loss_mask"].clone()
    masked[2] = not masked[2]
    other = batch.with_items(loss_mask=masked) if rank == 3 else batch
    found["other-mask"] = said(lambda: engine.infer_batch(other, plan))
    count = 2 if rank >= 2 else 1
    found["other-count"] = said(lambda: engine.forward_backward([batch] * count, nll, forward_only=True))
    bad = batch.with_items(input_ids=batch.items["input_ids"] + 61) if rank == 3 else batch
    found["bad-ids"] = said(lambda: engine.infer_batch(bad, plan))
    found["sound-after-all"] = said(lambda: engine.infer_batch(batch, plan))
    return found


def scores_without_an_optimizer(device: str) -> dict[str, float]:
    """Largest differences of a scoring engine (a reference model) that is split over replicas and slices from one alone."""
    model = {"config": dict(FAMILIES["qwen3"]), "tokenizer": "unused", "dtype": "float32"}
    batch = batch_of(rows((9, 4, 13, 7, 2, 8)))
    found: list[tuple[list[torch.Tensor], list[torch.Tensor], float]] = []
    for topology in (Topology(), Topology(world_size=4, dp_replicate=2, usp=2)):
        engine = build_engine(model, topology=topology, forward_only=True, device=device, param_dtype="float32")
        assert engine.mesh is not None
        mine = list(range(engine.mesh.dp_rank, batch.num_rows, engine.mesh.dp_size))
        part = batch.select(mine)
        scores = engine.infer_batch(part, MicroBatchPlan(max_rows=2), ("log_probs", "entropy"))
        per_row = [part.split_items(scores[k]) for k in ("log_probs", "entropy")]
        loss, _ = engine.eval_loss(part, nll, MicroBatchPlan(max_rows=1))
        found.append((per_row[0], per_row[1], loss))
    alone, split = found
    pairs = [(a[row], s[i]) for a, s in zip(alone[:2], split[:2], strict=True) for i, row in enumerate(mine)]
    return {
        "scores": max(float((a - s).abs().max()) for a, s in pairs),
        "eval_loss": abs(alone[2] - split[2]),
    }


class _FailsHereError(Exception):
    pass


def after_a_failed_call(device: str) -> dict[str, float]:
    """A call whose loss raises in its last micro-batch, whose predecessors' gradients no collective has reduced yet; then a step.

    Differences from an engine that has not failed, and, as a control, from one that kept what FSDP had gathered.
    """
    model = {"config": dict(FAMILIES["llama-tied"]), "tokenizer": "unused", "dtype": "float32"}
    batch = batch_of(rows((9, 4, 13, 7, 2, 8)))
    plan = MicroBatchPlan(max_rows=3)

    def fails(reader: Any, micro_batch: Any) -> Any:
        raise _FailsHereError

    def grad_norm(fault: bool, keep: bool = False) -> float:
        engine = build_engine(
            model, topology=Topology(world_size=4, dp_shard=2, usp=2), device=device, param_dtype="float32"
        )
        assert engine.mesh is not None
        part = batch.select(list(range(engine.mesh.dp_rank, batch.num_rows, engine.mesh.dp_size)))
        if fault:
            losses = iter((nll, nll, fails))
            sound = fsdp.drop_unreduced
            if keep:
                fsdp.drop_unreduced = lambda root: None
            try:
                with contextlib.suppress(_FailsHereError):
                    engine.train_batch(part, lambda r, b: next(losses)(r, b), MicroBatchPlan(max_rows=1))
                    raise AssertionError("the loss raises")
            finally:
                fsdp.drop_unreduced = sound
        return engine.train_batch(part, nll, plan).step.grad_norm

    wanted = grad_norm(fault=False)
    return {
        "cured": abs(grad_norm(fault=True) - wanted) / wanted,
        "kept": abs(grad_norm(fault=True, keep=True) - wanted) / wanted,
    }


def checkpoint_on_another_mesh(device: str, path: Path, lora: dict[str, Any] | None = None) -> dict[str, float]:
    """Save with replicas and slices, load with shards and slices: the next step must be the same one."""
    model = {"config": dict(FAMILIES["llama-tied"]), "tokenizer": "unused", "dtype": "float32", "lora": lora}
    batch = batch_of(rows((9, 4, 13, 7, 2, 8)))
    plan = MicroBatchPlan(max_rows=2)

    def step(engine: Engine) -> tuple[float, float]:
        assert engine.mesh is not None
        mine = list(range(engine.mesh.dp_rank, batch.num_rows, engine.mesh.dp_size))
        out = engine.train_batch(batch.select(mine), nll, plan)
        return out.loss, out.step.grad_norm

    settings = {"device": device, "param_dtype": "float32"}
    # A large epsilon, so that rounding of gradients near zero stays small.
    optim = {"lr": 1e-2, "eps": 1e-3}
    first = build_engine(model, optim, topology=Topology(world_size=4, dp_replicate=2, usp=2), **settings)
    before = step(first)
    first.save_state(path)
    second = build_engine(model, optim, topology=Topology(world_size=4, dp_shard=2, usp=2), **settings)
    fresh = step(build_engine(model, optim, topology=Topology(world_size=4, dp_shard=2, usp=2), **settings))
    second.load_state(path)
    after = [step(engine) for engine in (first, second)]
    weights = [dict(engine.export_weights()) for engine in (first, second)]
    return {
        "fresh_loss": abs(fresh[0] - before[0]),
        "moved_on": abs(after[0][0] - before[0]),
        "loss": abs(after[0][0] - after[1][0]),
        "grad_norm": abs(after[0][1] - after[1][1]),
        "weights": max(float((weights[0][n] - w).abs().max()) for n, w in weights[1].items()),
    }
