"""Passes over a batch: its mini-batches, and what their optimizer steps reported as one set of numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch


def mini_batches(num_rows: int, rows_per_step: int, epochs: int, generator: torch.Generator) -> Iterator[list[int]]:
    """The rows of each optimizer step.

    The first pass keeps the order, so that whole groups stay together; later passes mix the rows.
    """
    for epoch in range(epochs):
        order = list(range(num_rows)) if epoch == 0 else torch.randperm(num_rows, generator=generator).tolist()
        for start in range(0, num_rows, rows_per_step):
            yield order[start : start + rows_per_step]


def average(steps: Sequence[dict[str, float]], role: str) -> dict[str, float]:
    """The mean of each number over the steps that have it: the largest of ``*_max``, the last learning rate, the sum of skipped
    steps; and how many there were, ``ROLE/num_steps``."""
    values: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, value in step.items():
            values[name].append(value)
    merged: dict[str, float] = {}
    for name, seen in values.items():
        if name.endswith("_max"):
            merged[name] = max(seen)
        elif name == f"{role}/lr":
            merged[name] = seen[-1]
        elif name == f"{role}/skipped_steps":
            merged[name] = sum(seen)
        else:
            merged[name] = math.fsum(seen) / len(seen)
    merged[f"{role}/num_steps"] = float(len(steps))
    return merged
