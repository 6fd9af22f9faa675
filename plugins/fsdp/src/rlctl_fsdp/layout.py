"""A micro-batch as model inputs: rows end to end, or rows of one length as a batch.

Rows are laid out by ascending length, so that rows of equal length are neighbours and share one attention call; readers
get back to the batch's own order through one index.

Shapes: N tokens, R rows, P scored tokens, L the common length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlctl.batch import PackedBatch, padding_like
from rlctl.errors import BatchError


@dataclass(frozen=True)
class Layout:
    """Model inputs of one micro-batch.

    Args:
        inputs: keyword arguments of the decoder, on its device.
        positions: ``[P]`` index of each scored token in the batch's own order.
        sources: ``[P]`` index, in model order, of the token whose hidden state predicts it.
    """

    inputs: dict[str, Any]
    positions: torch.Tensor
    sources: torch.Tensor


def check(batch: PackedBatch, vocab_size: int) -> None:
    """Refuse what would fail later without a word (on a GPU: with a device assertion).

    Raises:
        BatchError: no ``input_ids`` or ``loss_mask``, a token id outside the vocabulary, or a scored first token.
    """
    for name in ("input_ids", "loss_mask"):
        if name not in batch.items:
            raise BatchError(f"the batch has no item field {name!r}", found=", ".join(sorted(batch.items)), wanted=name)
    ids = batch.items["input_ids"]
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        raise BatchError(
            "a token id lies outside the model's vocabulary",
            found=low if low < 0 else high,
            wanted=f"0 to {vocab_size - 1}",
            next="use the tokenizer that belongs to model.path",
        )
    first = batch.items["loss_mask"][batch.cu_seqlens[:-1].to(ids.device)].bool()
    if bool(first.any()):
        raise BatchError(
            f"row {int(first.nonzero()[0])} scores its first token, which nothing predicts",
            found="loss_mask True at its start",
            wanted="loss_mask False at the first token of each row",
        )


def lay_out(batch: PackedBatch, packed: bool, device: torch.device) -> Layout:
    """Inputs of ``batch``, which must have rows of one length unless ``packed``."""
    cu = batch.cu_seqlens
    lengths = cu[1:] - cu[:-1]
    num_tokens = batch.num_items
    ids = batch.items["input_ids"].long().cpu()
    positions = batch.items["loss_mask"].bool().cpu().nonzero()[:, 0]
    sources = positions - 1
    shortest, longest = (int(v) for v in torch.aminmax(lengths))
    if shortest == longest:
        position_ids = torch.arange(longest).repeat(batch.num_rows)
    else:
        order = torch.argsort(lengths, stable=True)
        starts, lengths = cu[:-1][order], lengths[order]
        cu = torch.cat([cu.new_zeros(1), lengths.cumsum(0)])
        offset = torch.repeat_interleave(cu[:-1], lengths)
        position_ids = torch.arange(num_tokens) - offset
        take = torch.repeat_interleave(starts, lengths) + position_ids
        ids = ids[take]
        where = torch.empty_like(take)
        where[take] = torch.arange(num_tokens)
        sources = where[sources]
    if packed:
        shape = (1, num_tokens)
        boundaries = cu.to(device, torch.int32, non_blocking=True)
        extra = {
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    else:
        assert shortest == longest, "rows of one length make a batch without padding"
        shape, extra = (batch.num_rows, longest), {}
    inputs = {
        "input_ids": ids.view(shape).to(device, non_blocking=True),
        "position_ids": position_ids.view(shape).to(device, non_blocking=True),
        "use_cache": False,
        **extra,
    }
    return Layout(inputs, positions.to(device), sources.to(device))


def on_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with its fields on ``device``; ``cu_seqlens`` stays on the CPU."""
    if device.type == "cpu":
        return batch
    from dataclasses import replace

    return replace(
        batch,
        items={k: v.to(device, non_blocking=True) for k, v in batch.items.items()},
        rows={k: v.to(device, non_blocking=True) for k, v in batch.rows.items()},
    )


def by_length(batch: PackedBatch) -> list[tuple[PackedBatch, list[int]]]:
    """The batch cut into batches of rows of one length, each with its row indices."""
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(batch.lengths):
        groups.setdefault(length, []).append(row)
    if len(groups) == 1:
        return [(batch, list(range(batch.num_rows)))]
    return [(batch.select(rows), rows) for _, rows in sorted(groups.items())]


def zero_weight_like(batch: PackedBatch) -> PackedBatch:
    """A micro-batch that takes part in every collective and changes nothing."""
    return padding_like(batch)
