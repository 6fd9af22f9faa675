"""The effect probe: adapters that change nothing are found before the first step.

An adapter can be in the model and do nothing: its layer never runs, the model multiplies by the weight itself without calling the
layer, or its gradient is cut. Then a run trains nothing, or part of what was asked for, and no number says so. So the engine
computes a tiny batch along its own path, B is perturbed, and it computes again, with gradients: what the model says must change, and
every adapter must have a gradient. After that B is what it was, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlctl.batch import PackedBatch, pack
from rlctl.errors import EngineError
from rlctl_fsdp.lora.inject import NAME, adapted_layers, parts

_ROWS, _TOKENS = 2, 16
_LEAST_CHANGE = 1e-5
"""Of the largest number: far above float32's rounding of a sum in another order, far below what the perturbation does."""


def probe_batch(vocab_size: int) -> PackedBatch:
    """A few random tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, vocab_size, (_TOKENS,), generator=generator) for _ in range(_ROWS)]
    mask = torch.arange(_TOKENS) > 0
    return pack({"input_ids": ids, "loss_mask": [mask] * _ROWS})


@torch.no_grad()
def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def perturbed(model: nn.Module) -> Iterator[None]:
    """Random numbers in the place of every B, so large that a layer's output changes by about its own size."""
    layers = [layer for _, layer in adapted_layers(model)]
    saved = [_local(parts(layer)[1]).clone() for layer in layers]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in layers:
            up = _local(parts(layer)[1])
            size = 1 / (layer.scaling[NAME] * layer.r[NAME] ** 0.5)
            up.copy_(torch.randn(up.shape, generator=generator) * size)
    try:
        yield
    finally:
        with torch.no_grad():
            for layer, before in zip(layers, saved, strict=True):
                # Where weights rest on the host between calls, their memory is another one by now.
                _local(parts(layer)[1]).copy_(before)


def check_effect(
    model: nn.Module,
    score: Callable[[], torch.Tensor],
    backward: Callable[[], None],
    largest: Callable[[list[float]], list[float]],
    every: bool,
) -> None:
    """Refuse adapters without effect. On every rank alike; collective where weights are shards.

    Args:
        score: what the model says of the tiny batch, without gradients.
        backward: the same with gradients, which are left in the parameters.
        largest: of each number the largest over the ranks.
        every: each adapter must have a gradient; False where only some of a mixture's experts run.

    Raises:
        EngineError: naming them.
    """
    before = score()
    with perturbed(model):
        after = score()
        try:
            backward()
        except RuntimeError as error:
            # torch's words where no adapter is part of what was computed; then there are no gradients to look at.
            if "does not require grad" not in str(error):
                raise
        gradients = _largest_gradients(model, largest)
    change = float((after - before).abs().max()) / (float(before.abs().max()) or 1.0)
    without = [name for name, value in gradients.items() if not value > 0]
    if not change > _LEAST_CHANGE or len(without) == len(gradients):
        raise EngineError(
            "the adapters of model.lora change nothing",
            found=f"other adapter weights change what the model says by {change:.1e} of the largest number, and "
            f"{len(gradients) - len(without)} of {len(gradients)} adapters have a gradient",
            wanted="another answer, and a gradient in every adapter",
            next="take layers that the model calls: set model.lora.target_modules=all-linear, or take model.lora out",
        )
    if without and every:
        shown = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
        raise EngineError(
            "some adapters of model.lora would never learn: no gradient reaches them",
            found=f"{len(without)} of {len(gradients)} adapters: {shown}",
            wanted="a gradient in every adapter",
            next="leave these layers out: model.lora.exclude_modules",
        )


def _largest_gradients(model: nn.Module, largest: Callable[[list[float]], list[float]]) -> Mapping[str, float]:
    """Layer -> the largest element of its adapter's gradient: the smaller of those of A and B; 0 where there is none."""
    names, values = [], []
    for name, layer in adapted_layers(model):
        names.append(name)
        for part in parts(layer):
            grad = part.grad
            local = None if grad is None else _local(grad)
            values.append(0.0 if local is None or not local.numel() else float(local.abs().max()))
    top = largest(values)
    return {name: min(top[2 * i], top[2 * i + 1]) for i, name in enumerate(names)}
