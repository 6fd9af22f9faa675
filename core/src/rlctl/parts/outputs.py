"""Between core's batches and numbers and the device's tensors; results in the order of the caller's micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from rlctl.batch import PackedBatch
from rlctl.engine import MicroOutput
from rlctl.logits import LossOutput

Collected: TypeAlias = "tuple[list[int] | None, PackedBatch, LossOutput]"
"""(rows of the micro-batch or None for all, the batch that ran, what the loss returned, without its graph)."""

ALIGNMENT = "perf/alignment_tokens"
"""Metric: tokens that fill rows up to what usp, cp or sp can split. They are computed, and count for nothing."""


def on_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with its fields on ``device``; ``cu_seqlens`` stays on the CPU."""
    if device.type == "cpu":
        return batch
    items = {k: v.to(device, non_blocking=True) for k, v in batch.items.items()}
    rows = {k: v.to(device, non_blocking=True) for k, v in batch.rows.items()}
    return replace(batch, items=items, rows=rows)


def merge(batch: PackedBatch, parts: Sequence[Collected]) -> LossOutput:
    """One result for ``batch`` from the parts that it ran as: losses and sums add up, items go back to their places."""
    if len(parts) == 1 and parts[0][0] is None:
        return parts[0][2]
    starts = batch.cu_seqlens.tolist()
    loss = torch.stack([out.loss for _, _, out in parts]).sum()
    sums: dict[str, torch.Tensor | float] = {}
    maxes: dict[str, torch.Tensor | float] = {}
    items: dict[str, torch.Tensor] = {}
    for rows, _, out in parts:
        assert rows is not None, "a micro-batch that ran as several parts knows their rows"
        for name, value in out.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in out.maxes.items():
            maxes[name] = max(float(maxes.get(name, float("-inf"))), float(value))
        index = torch.cat([torch.arange(starts[r], starts[r + 1]) for r in rows])
        for name, value in out.items.items():
            whole = items.setdefault(name, value.new_zeros((batch.num_items, *value.shape[1:])))
            whole[index.to(whole.device)] = value
    return LossOutput(loss, sums, maxes, items)


def to_micro_output(out: LossOutput, filling: int | None = None) -> MicroOutput:
    """Python floats and CPU tensors. Called after every micro-batch was launched, so that a GPU is not waited for.

    Args:
        filling: the metric of :data:`ALIGNMENT`; None where nothing has to be filled.
    """
    sums = {k: float(v) for k, v in out.sums.items()}
    if filling is not None:
        sums[ALIGNMENT] = float(filling)
    return MicroOutput(
        loss=float(out.loss),
        sums=sums,
        maxes={k: float(v) for k, v in out.maxes.items()},
        items={k: v.cpu() for k, v in out.items.items()},
    )


def detached(out: LossOutput) -> LossOutput:
    """``out`` without its graph, so that no micro-batch's activations outlive its backward pass."""

    def bare(values: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in values.items()}

    return LossOutput(out.loss.detach(), bare(out.sums), bare(out.maxes), bare(out.items))
