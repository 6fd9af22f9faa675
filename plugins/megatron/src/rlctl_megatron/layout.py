"""A micro-batch as what megatron runs: rows end to end (``thd``), cut over context parallel ranks.

With cp ranks every row is filled at its end to a multiple of 2 * cp and cut into 2 * cp chunks; rank r holds chunks r and
2 * cp - 1 - r of each row, in that order, so that causal attention costs every rank the same. megatron's rotary embedding
expects exactly that. Filling follows the row's own tokens, which causal attention therefore never sees it from.

With sequence parallelism the tokens of a rank must divide by tp, and experts that gather tokens need as many from every rank:
one more row, of nothing, makes up the rest.

Shapes: N tokens of the micro-batch, R rows, F tokens of the filled rows, f = F / cp of them on this rank, P scored tokens,
p of them predicted on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray

from rlctl.batch import PackedBatch
from rlctl.errors import BatchError
from rlctl_megatron.mesh import Place


@dataclass(frozen=True)
class Laid:
    """One rank's part of a micro-batch, on its device.

    Args:
        input_ids: ``[1, f]`` int64; filling repeats the last token of its row, so that it is as good a token as any.
        position_ids: ``[1, f]`` int64, within the row.
        packed: boundaries of the filled rows, of all cp ranks together. The padded variants lie on the CPU: megatron's
            rotary embedding and our attention read them in every layer, and must not wait for the device there.
        positions: ``[P]`` index of each scored token in the batch's own order.
        predictors: ``[p]`` index among the f tokens of the one whose hidden state predicts it.
        mine: ``[p]`` which of the P scored tokens are predicted here; None where the rank holds all tokens.
        num_items: N.
        filling: F - N, the same on every rank.
        padding: ``[1, f]`` True where a token is filling (what megatron's ``padding_mask`` means); None without filling.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    packed: PackedSeqParams
    positions: torch.Tensor
    predictors: torch.Tensor
    mine: torch.Tensor | None
    num_items: int
    filling: int
    padding: torch.Tensor | None


def check(batch: PackedBatch, vocab_size: int) -> None:
    """Refuse what a vocabulary in shards would turn into numbers: an id that no shard has is embedded as zeros.

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


def num_filled(batch: PackedBatch, place: Place, sp: bool) -> int:
    """F of a micro-batch as :func:`lay_out` fills it by itself."""
    lengths = np.diff(batch.cu_seqlens.cpu().numpy())
    return int(filled_lengths(lengths, place.topology.cp, place.topology.tp if sp else 1).sum())


def lay_out(batch: PackedBatch, device: torch.device, place: Place, sp: bool, least: int = 0) -> Laid:
    """This rank's part of ``batch``, the same rows on every rank of the replica.

    Args:
        sp: activations outside attention are split over tp, so that f must be a multiple of it.
        least: F is at least so many; :func:`num_filled` of some micro-batch.
    """
    cp, cp_rank = place.topology.cp, place.cp_rank
    starts = batch.cu_seqlens.cpu().numpy()
    filled = filled_lengths(np.diff(starts), cp, place.topology.tp if sp else 1, least)
    bounds = np.concatenate([[0], filled.cumsum()])
    take = zigzag(bounds, cp, cp_rank)
    # The row that is made up holds no token of the batch; it repeats the last one.
    row = np.minimum(np.searchsorted(bounds, take, side="right") - 1, batch.num_rows - 1)
    offset = take - bounds[row]
    sources = np.minimum(starts[row] + offset, starts[row + 1] - 1)
    real = offset < np.diff(starts)[row]

    ids, mask = batch.items["input_ids"].long().cpu(), batch.items["loss_mask"].bool().cpu()
    positions = mask.nonzero()[:, 0]
    local = np.full(batch.num_items, -1, dtype=np.int64)
    local[sources[real]] = real.nonzero()[0]
    predictors = torch.from_numpy(local)[positions - 1]
    mine = None
    if cp > 1:
        mine = (predictors >= 0).nonzero()[:, 0]
        predictors = predictors[mine]
        mine = mine.to(device, non_blocking=True)
    filling = int(bounds[-1]) - batch.num_items
    places = take - bounds[np.searchsorted(bounds, take, side="right") - 1]
    return Laid(
        input_ids=ids[torch.from_numpy(sources)][None].to(device, non_blocking=True),
        position_ids=torch.from_numpy(places)[None].to(device, non_blocking=True),
        packed=_packed(bounds, device),
        positions=positions.to(device, non_blocking=True),
        predictors=predictors.to(device, non_blocking=True),
        mine=mine,
        num_items=batch.num_items,
        filling=filling,
        padding=torch.from_numpy(~real)[None].to(device, non_blocking=True) if filling else None,
    )


def filled_lengths(lengths: NDArray[np.int64], cp: int, divisor: int, least: int = 0) -> NDArray[np.int64]:
    """``[R]`` lengths of rows -> ``[R]`` or ``[R + 1]`` lengths that cp and sp can split.

    Args:
        divisor: of the tokens of one cp rank (tp under sequence parallelism, else 1).
        least: tokens in all, if those that are needed are fewer; itself a number that cp and sp can split.
    """
    unit = 2 * cp if cp > 1 else 1
    filled = -(-lengths // unit) * unit
    # Of a row of ``unit`` tokens, a cp rank holds two (one without cp).
    per_rank, step = int(filled.sum()) // cp, unit // cp
    missing = next(n for n in range(divisor) if (per_rank + n * step) % divisor == 0)
    more = max(missing * unit, least - int(filled.sum()))
    return np.append(filled, more) if more else filled


def zigzag(bounds: NDArray[np.int64], cp: int, rank: int) -> NDArray[np.int64]:
    """``[f]`` which of the F tokens cp rank ``rank`` holds, in its order.

    Args:
        bounds: ``[rows + 1]`` starts of the filled rows, F at the end; lengths divide by 2 * cp.
    """
    if cp == 1:
        return np.arange(bounds[-1])
    width = np.diff(bounds) // (2 * cp)
    first = np.stack([bounds[:-1] + rank * width, bounds[:-1] + (2 * cp - 1 - rank) * width], 1).ravel()
    widths = np.repeat(width, 2)
    begins = np.concatenate([[0], widths.cumsum()[:-1]])
    return np.repeat(first - begins, widths) + np.arange(widths.sum())


def _packed(bounds: NDArray[np.int64], device: torch.device) -> PackedSeqParams:
    """Boundaries in megatron's form.

    ``max_seqlen`` is the longest row: megatron makes that many rotary angles and starts each row at the first. If their
    number were F it would take them for angles of all F tokens, each row continuing where the one before it ended.
    """
    on_host = torch.from_numpy(bounds.astype(np.int32))
    on_device = on_host.to(device, non_blocking=True)
    longest = int(np.diff(bounds).max())
    assert longest < bounds[-1] or len(bounds) == 2, "only a single row is as long as all of them"
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        cu_seqlens_q_padded=on_host,
        cu_seqlens_kv_padded=on_host,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
