"""Faults in the real fsdp2 engine, put in by an engine wrapper in the ranks' own processes. See test_verify_fsdp2.py.

The file that FAULT_FILE names holds the name of the fault of the next engine, or nothing; each engine takes its fault out
again when it is shut down.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import rlctl_fsdp.engine
from rlctl.errors import ConfigError
from rlctl.hookspecs import hookimpl
from rlctl.parts import fsdp, layout
from rlctl.parts.job import ScoreJob
from rlctl_fsdp import optim, place, shard, state

FAULT_FILE = "RLCTL_TEST_VERIFY_FAULT_FILE"
MATRIX = "model.layers.0.mlp.up_proj.weight"
Patch = pytest.MonkeyPatch


def wrong_normaliser(patch: Patch) -> None:
    """Gradients are averaged over ranks, as FSDP does by itself, and not summed."""
    sound = shard.shard

    def wrong(root: Any, *args: Any) -> None:
        sound(root, *args)
        for module in fsdp.fsdp_modules(root):
            module.set_gradient_divide_factor(float(dist.get_world_size()))

    patch.setattr(shard, "shard", wrong)


def twice_on_one_rank(patch: Patch) -> None:
    """One rank's loss counts twice in the gradient."""
    sound = ScoreJob.__call__
    patch.setattr(ScoreJob, "__call__", lambda self, model: sound(self, model) * (1 + dist.get_rank() % 2))


def shards_loaded_swapped(patch: Patch) -> None:
    """Two ranks hold each other's part of a matrix."""
    sound = shard.materialize

    def wrong(root: Any, *args: Any) -> None:
        sound(root, *args)
        mine = dict(root.model.named_parameters())[MATRIX].to_local()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.detach())
        with torch.no_grad():
            mine.copy_(parts[dist.get_rank() ^ 1])

    patch.setattr(shard, "materialize", wrong)


def shards_exported_swapped(patch: Patch) -> None:
    """The export puts two ranks' parts of a matrix together in the wrong order."""
    sound = rlctl_fsdp.engine.export_weights

    def wrong(*args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in sound(*args):
            yield name, torch.cat(tensor.chunk(2)[::-1]) if name == MATRIX else tensor

    patch.setattr(rlctl_fsdp.engine, "export_weights", wrong)


def one_rank_not_reduced(patch: Patch) -> None:
    """What one rank computed does not reach the sum."""
    sound = _fsdp_param_group.foreach_reduce

    def wrong(params: Any, grads: list[torch.Tensor], *args: Any, **more: Any) -> Any:
        if dist.get_rank() == 1:
            for grad in grads:
                grad.zero_()
        return sound(params, grads, *args, **more)

    patch.setattr(_fsdp_param_group, "foreach_reduce", wrong)


def replicas_not_reduced(patch: Patch) -> None:
    """Gradients are summed over shards, and never over replicas."""
    settle, reduce = place.settle, dist.all_reduce
    replicas: list[Any] = []

    def settled(*args: Any) -> Any:
        info, found = settle(*args)
        assert found.mesh is not None
        replicas.append(found.mesh.get_group("dp_replicate"))
        return info, found

    def wrong(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
        return None if more.get("group") in replicas else reduce(tensor, *args, **more)

    patch.setattr(place, "settle", settled)
    patch.setattr(dist, "all_reduce", wrong)


def _masks(patch: Patch, other: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Scored positions by ``other(this mask, the one before)``; item weights stay as they are."""
    sound = layout.lay_out
    before: list[torch.Tensor] = []

    def wrong(batch: Any, *args: Any, **more: Any) -> layout.Layout:
        mask = batch.items["loss_mask"].bool()
        stale = other(mask, before[-1] if before else mask)
        stale[batch.cu_seqlens[:-1]] = False
        before.append(mask)
        return sound(batch.with_items(loss_mask=stale), *args, **more)

    patch.setattr(layout, "lay_out", wrong)


def stale_mask(patch: Patch) -> None:
    """The loss mask of the micro-batch before."""
    _masks(patch, lambda mask, old: old.repeat(-(-len(mask) // len(old)))[: len(mask)].clone())


def shifted_mask(patch: Patch) -> None:
    """The loss mask one token late."""
    _masks(patch, lambda mask, old: mask.roll(1))


def _positions(patch: Patch) -> None:
    """Positions count from the start of the packed sequence, or of a rank's slice of it, and not from that of the row."""
    sound = layout.lay_out

    def wrong(*args: Any, **more: Any) -> layout.Layout:
        laid = sound(*args, **more)
        ids = laid.inputs["input_ids"]
        return replace(laid, inputs={**laid.inputs, "position_ids": torch.arange(ids.shape[1])[None]})

    patch.setattr(layout, "lay_out", wrong)


def moments_forgotten(patch: Patch) -> None:
    """Loading a checkpoint loses the optimizer's moments."""
    sound = state.load_state

    def wrong(path: Path, root: Any, stepper: Any, *args: Any) -> None:
        sound(path, root, stepper, *args)
        stepper.optimizer.state.clear()

    patch.setattr(state, "load_state", wrong)


def moments_need_room(patch: Patch) -> None:
    """Loading a checkpoint fills the moments that are there, and makes none in an engine that has not stepped."""
    sound = state.load_state

    def wrong(path: Path, root: Any, stepper: Any, *args: Any) -> None:
        stepped = bool(stepper.optimizer.state)
        sound(path, root, stepper, *args)
        if not stepped:
            stepper.optimizer.state.clear()

    patch.setattr(state, "load_state", wrong)


def misrouted(patch: Patch) -> None:
    """One rank sends some tokens to other experts."""
    sound = Qwen3MoeTopKRouter.forward

    def wrong(self: Any, hidden: torch.Tensor) -> Any:
        logits, scores, chosen = sound(self, hidden)
        if dist.get_rank() == 1:
            chosen = chosen.clone()
            chosen[::4] = (chosen[::4] + 1) % self.num_experts
        return logits, scores, chosen

    patch.setattr(Qwen3MoeTopKRouter, "forward", wrong)


def sgd_refused(patch: Patch) -> None:
    """No fault: an engine that has AdamW only."""
    sound = optim._optimizer

    def refuse(groups: Any, settings: Any) -> Any:
        if settings["name"] == "sgd":
            raise ConfigError("this engine has no such optimizer", found="sgd", wanted="adamw")
        return sound(groups, settings)

    patch.setattr(optim, "_optimizer", refuse)


FAULTS: dict[str, Callable[[Patch], None]] = {
    f.__name__: f
    for f in (
        wrong_normaliser,
        twice_on_one_rank,
        shards_loaded_swapped,
        shards_exported_swapped,
        one_rank_not_reduced,
        replicas_not_reduced,
        stale_mask,
        shifted_mask,
        moments_forgotten,
        moments_need_room,
        misrouted,
    )
} | {"positions_not_reset": _positions, "positions_of_slices": _positions}
ENGINES = {**FAULTS, "sgd_refused": sgd_refused}


class Faulty:
    """The wrapper: its construction puts the fault in, before the engine is built."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        name = Path(os.environ[FAULT_FILE]).read_text().strip()
        if name:
            ENGINES[name](self._patch)

    @hookimpl(wrapper=True)
    def rlctl_shutdown(self) -> Generator[None, Any, Any]:
        """Take the fault out."""
        try:
            return (yield)
        finally:
            self._patch.undo()
