"""A micro-batch as model inputs: rows end to end, or rows of one length as a batch.

Packed rows are laid out by :mod:`rlctl.parts.segments`; readers get back to the batch's own order through one index. Under
sequence parallelism ids and positions are those of this rank's slice, while boundaries speak of the whole sequence.

Shapes: N tokens, R rows, P scored tokens, P_u of them predicted in this rank's slice, L the common length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlctl.batch import PackedBatch, padding_like
from rlctl.errors import BatchError
from rlctl.parts.segments import Segments, plan_segments
from rlctl.parts.ulysses import Slice, Ulysses


@dataclass(frozen=True)
class Layout:
    """Model inputs of one micro-batch.

    Args:
        inputs: keyword arguments of the decoder, on its device.
        positions: ``[P]`` index of each scored token in the batch's own order.
        sources: ``[P]`` index, in model order, of the token whose hidden state predicts it; ``[P_u]`` in a slice.
        mine: ``[P_u]`` which of the scored tokens this rank's slice predicts; None where the rank holds the whole.
        part: the slice, or None.
    """

    inputs: dict[str, Any]
    positions: torch.Tensor
    sources: torch.Tensor
    mine: torch.Tensor | None = None
    part: Slice | None = None


def check(batch: PackedBatch, vocab_size: int, longest_row: int | None = None) -> None:
    """Refuse what would fail later without a word (on a GPU: with a device assertion).

    Args:
        longest_row: rows may have this many tokens (some models change their position encoding beyond it).

    Raises:
        BatchError: no ``input_ids`` or ``loss_mask``, a token id outside the vocabulary, a scored first token, or a row
            that is too long.
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
    longest = max(batch.lengths, default=0)
    if longest_row is not None and longest > longest_row:
        raise BatchError(
            "a row is so long that the model would change its position encoding for all rows packed with it",
            found=f"{longest} tokens",
            wanted=f"at most {longest_row} tokens in packed rows",
            next="shorten the rows, or set engine.attention=per_row and parallel.usp=1",
        )


def lay_out(
    batch: PackedBatch,
    device: torch.device,
    *,
    packed: bool,
    lean: bool = True,
    share: bool = True,
    ulysses: Ulysses | None = None,
) -> Layout:
    """Inputs of ``batch``, which must have rows of one length unless ``packed``.

    Args:
        lean, share: see :func:`rlctl.parts.segments.plan_segments`; for packed rows only.
        ulysses: this rank takes a slice of the packed sequence.
    """
    ids = batch.items["input_ids"].long().cpu()
    mask = batch.items["loss_mask"].bool().cpu()
    positions = mask.nonzero()[:, 0]
    if not packed:
        length = batch.lengths[0]
        assert set(batch.lengths) == {length}, "rows of one length make a batch without padding"
        inputs = {
            "input_ids": ids.view(-1, length).to(device, non_blocking=True),
            "use_cache": False,
        }
        return Layout(inputs, positions.to(device), (positions - 1).to(device))
    segments = plan_segments(ids.numpy(), mask.numpy(), batch.cu_seqlens.numpy(), lean=lean, share=share)
    sources = torch.from_numpy(segments.where)[positions - 1]
    take, places = segments.take, segments.positions
    inputs: dict[str, Any] = {"use_cache": False, **_boundaries(segments, device)}
    part, mine = None, None
    if ulysses is not None:
        part = ulysses.slice_of(len(take))
        take, places = part.take(take), part.take(places)
        mine, sources = part.own(sources)
        mine = mine.to(device)
        inputs["sequence_slice"] = part
    inputs["input_ids"] = ids[torch.from_numpy(take)][None].to(device, non_blocking=True)
    inputs["position_ids"] = torch.from_numpy(places)[None].to(device, non_blocking=True)
    return Layout(inputs, positions.to(device), sources.to(device), mine, part)


def _boundaries(segments: Segments, device: torch.device) -> dict[str, Any]:
    """What :func:`rlctl.parts.attention.packed_attention` needs to know of the segments."""
    queries = torch.from_numpy(segments.bounds).to(device, torch.int32, non_blocking=True)
    longest = int(segments.lengths.max())
    found: dict[str, Any] = {"cu_seq_lens_q": queries, "max_length_q": longest}
    if not segments.shares:
        return {**found, "cu_seq_lens_k": queries, "max_length_k": longest}
    index, starts = segments.keys()
    return {
        **found,
        "cu_seq_lens_k": torch.from_numpy(starts).to(device, torch.int32, non_blocking=True),
        "max_length_k": int((starts[1:] - starts[:-1]).max()),
        "key_index": torch.from_numpy(index).to(device, non_blocking=True),
        "segment_parents": torch.from_numpy(segments.parents),
    }


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
