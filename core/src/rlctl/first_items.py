"""The first token of a row is predicted by nothing, so it cannot be scored: rows whose loss mask covers it."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.batch import PackedBatch
from rlctl.errors import BatchError


def check_first_items(batch: PackedBatch) -> None:
    """Refuse rows that score their first token.

    Raises:
        BatchError: names their indices.
    """
    if rows := rows_scored_from_the_start(batch):
        raise scored_first_error(rows)


def scored_first_error(rows: Sequence[int]) -> BatchError:
    """What to raise for ``rows``; empty: another rank has them."""
    return BatchError(
        "the loss mask covers the first token of a row, which nothing predicts",
        found=f"rows {', '.join(map(str, rows[:8]))}" if rows else "a row of another rank",
        wanted="loss_mask False on the first token of each row",
    )


def rows_scored_from_the_start(batch: PackedBatch) -> list[int]:
    """Rows whose first token is in the loss mask; none for batches that are not made of tokens."""
    if "input_ids" not in batch.items or "loss_mask" not in batch.items or batch.num_rows == 0:
        return []
    return batch.items["loss_mask"][batch.cu_seqlens[:-1]].bool().nonzero().flatten().tolist()
