"""Between core's batches and numbers and the device's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rlctl.batch import PackedBatch
from rlctl.engine import MicroOutput
from rlctl.logits import LossOutput

ALIGNMENT = "perf/alignment_tokens"
"""Metric: tokens that fill rows up to what cp and sp can split. They are computed, and count for nothing."""


def on_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch's fields on ``device``; boundaries stay on the CPU."""
    if device.type == "cpu":
        return batch
    items = {k: v.to(device, non_blocking=True) for k, v in batch.items.items()}
    rows = {k: v.to(device, non_blocking=True) for k, v in batch.rows.items()}
    return replace(batch, items=items, rows=rows)


def detached(out: LossOutput) -> LossOutput:
    """``out`` without its graph, so that no micro-batch's activations outlive its backward pass."""

    def bare(values: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in values.items()}

    return LossOutput(out.loss.detach(), bare(out.sums), bare(out.maxes), bare(out.items))


def to_micro_output(out: LossOutput, filling: int | None) -> MicroOutput:
    """Python floats and CPU tensors.

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
