"""Losses and per-item results back in the order of the caller's micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from rlctl.batch import PackedBatch
from rlctl.engine import MicroOutput
from rlctl.logits import LossOutput

Collected: TypeAlias = "tuple[list[int] | None, PackedBatch, LossOutput]"
"""(rows of the micro-batch or None for all, the batch that ran, what the loss returned)."""


def merge(batch: PackedBatch, parts: Sequence[Collected]) -> LossOutput:
    """One result for ``batch`` from the parts that it ran as: losses and sums add up, items go back to their places."""
    if len(parts) == 1 and parts[0][0] is None:
        return parts[0][2]
    starts = batch.cu_seqlens.tolist()
    loss = torch.stack([out.loss.detach() for _, _, out in parts]).sum()
    sums: dict[str, torch.Tensor | float] = {}
    maxes: dict[str, torch.Tensor | float] = {}
    items: dict[str, torch.Tensor] = {}
    for rows, _, out in parts:
        assert rows is not None, "a micro-batch that ran as several parts knows their rows"
        for name, value in out.sums.items():
            sums[name] = sums.get(name, 0.0) + _detached(value)
        for name, value in out.maxes.items():
            maxes[name] = max(float(maxes.get(name, float("-inf"))), float(_detached(value)))
        index = torch.cat([torch.arange(starts[r], starts[r + 1]) for r in rows])
        for name, value in out.items.items():
            whole = items.setdefault(name, value.detach().new_zeros((batch.num_items, *value.shape[1:])))
            whole[index.to(whole.device)] = value.detach()
    return LossOutput(loss, sums, maxes, items)


def to_micro_output(out: LossOutput) -> MicroOutput:
    """Python floats and CPU tensors. Called after every micro-batch was launched, so that a GPU is not waited for."""
    return MicroOutput(
        loss=float(out.loss.detach()),
        sums={k: float(_detached(v)) for k, v in out.sums.items()},
        maxes={k: float(_detached(v)) for k, v in out.maxes.items()},
        items={k: v.detach().cpu() for k, v in out.items.items()},
    )


def _detached(value: torch.Tensor | float) -> torch.Tensor | float:
    return value.detach() if isinstance(value, torch.Tensor) else value
