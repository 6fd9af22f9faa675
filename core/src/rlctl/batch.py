"""Packed variable-length batches: one tensor per field plus ``cu_seqlens``; nothing is padded.

Shapes: R rows, N items (for language models, an item is a token). ``items[name]`` is ``[N, ...]`` with the rows laid
end to end; ``rows[name]`` is ``[R, ...]``. Row ``r`` owns items ``cu_seqlens[r] : cu_seqlens[r + 1]``.

Token-aligned fields speak of the token at their own index: ``old_log_probs[t]`` is log p(token t | tokens before it in
its row), so the first item of each row has no prediction and its ``loss_mask`` must be False.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rlctl.errors import BatchError

GROUP = "group"
"""Row field, ``[R]`` integers: what a row belongs to. Rows of one prompt share it, and are kept together where that costs
little, for engines that compute what they share once."""


@dataclass(frozen=True)
class PackedBatch:
    """A packed batch. Build one with :func:`pack`.

    Args:
        cu_seqlens: ``[R + 1]`` int64 on the CPU, from 0 to N.
        items: per-item fields, each ``[N, ...]``.
        rows: per-row fields, each ``[R, ...]``.
        meta: settings that hold for the whole batch (``temperature``).
        is_padding: a zero-weight micro-batch, made so that every rank runs the same number of collectives.
    """

    cu_seqlens: torch.Tensor
    items: Mapping[str, torch.Tensor]
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    is_padding: bool = False

    def __post_init__(self) -> None:
        n, r = self.num_items, self.num_rows
        for kind, fields, size in (("item", self.items, n), ("row", self.rows, r)):
            for name, value in fields.items():
                if value.shape[:1] != (size,):
                    raise BatchError(
                        f"{kind} field {name!r} does not fit the batch",
                        found=f"shape {tuple(value.shape)}",
                        wanted=f"first size {size}",
                    )

    @property
    def num_rows(self) -> int:
        return self.cu_seqlens.numel() - 1

    @cached_property
    def num_items(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> list[int]:
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """``[R]`` values of rows -> ``[N]``, each row's at all of its items."""
        return _repeat(values, self.cu_seqlens[1:] - self.cu_seqlens[:-1])

    def row_ids(self) -> torch.Tensor:
        """``[N]`` index of the row that owns each item."""
        return self.spread(torch.arange(self.num_rows))

    def position_ids(self) -> torch.Tensor:
        """``[N]`` position of each item within its row, restarting at 0."""
        return torch.arange(self.num_items) - self.spread(self.cu_seqlens[:-1])

    def select(self, indices: Sequence[int]) -> PackedBatch:
        """The rows ``indices`` in that order, as a batch of their own; consecutive rows as views of this one's memory."""
        rows = list(indices)
        if rows and rows == list(range(rows[0], rows[-1] + 1)):
            return self.slice_rows(rows[0], rows[-1] + 1)
        lengths, flat = self._locate(rows)
        return replace(
            self,
            cu_seqlens=_offsets(lengths),
            items={k: v.index_select(0, flat.to(v.device)) for k, v in self.items.items()},
            rows={k: v.index_select(0, _index(rows).to(v.device)) for k, v in self.rows.items()},
        )

    def _locate(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(lengths of ``rows``, index here of every item of theirs, in their order)."""
        index = _index(rows)
        lengths = self.cu_seqlens.diff()[index]
        # Item t of the result lies (t - start of its row there) behind the start of its row here.
        flat = _repeat(self.cu_seqlens[:-1][index] - _offsets(lengths)[:-1], lengths)
        flat += torch.arange(len(flat))
        return lengths, flat

    def parts(self, rows_by_part: Sequence[Sequence[int]]) -> list[PackedBatch]:
        """One batch for each list of rows, each of at least one. An item field is gathered when a part is asked for it.

        So who splits a batch over many ranks pays by the row, and who packs the parts for their journey pays for the
        bytes, of the fields that travel.
        """
        rows = [row for part in rows_by_part for row in part]
        counts = [len(part) for part in rows_by_part]
        assert all(counts), "a part without rows is padding: see padding_like"
        if not counts:
            return []
        index = _index(rows)
        lengths = self.cu_seqlens.diff()[index]
        # Each part has cu_seqlens of its own: all of them end to end, one more number than rows a part.
        per_part = _index(counts)
        part_of_row = _repeat(torch.arange(len(counts)), per_part)
        ends = lengths.cumsum(0)
        part_starts = (ends - lengths)[_offsets(per_part)[:-1]]
        bounds = torch.zeros(len(rows) + len(counts), dtype=torch.long)
        bounds[torch.arange(len(rows)) + part_of_row + 1] = ends - part_starts[part_of_row]
        cu_seqlens = bounds.split([count + 1 for count in counts])
        fields = {k: v.index_select(0, index.to(v.device)).split(counts) for k, v in self.rows.items()}
        sizes = [b - a for a, b in pairwise([*part_starts.tolist(), int(ends[-1])])]
        gathered = _Gathered(self, rows, sizes)
        parts: list[PackedBatch] = []
        for i, (cu, num_items) in enumerate(zip(cu_seqlens, sizes, strict=True)):
            # Past __init__, which would look at every field: they are known to fit.
            part = object.__new__(PackedBatch)
            part.__dict__.update(
                cu_seqlens=cu,
                items=_Part(gathered, i),
                rows={k: v[i] for k, v in fields.items()},
                meta=self.meta,
                is_padding=self.is_padding,
                num_items=num_items,
            )
            parts.append(part)
        return parts

    def slice_rows(self, start: int, stop: int) -> PackedBatch:
        """The consecutive rows ``start`` to ``stop``, as views of this batch's memory."""
        first, last = int(self.cu_seqlens[start]), int(self.cu_seqlens[stop])
        return replace(
            self,
            cu_seqlens=self.cu_seqlens[start : stop + 1] - first,
            items={k: v[first:last] for k, v in self.items.items()},
            rows={k: v[start:stop] for k, v in self.rows.items()},
        )

    def with_items(self, **fields: torch.Tensor) -> PackedBatch:
        return replace(self, items={**self.items, **fields})

    def with_rows(self, **fields: torch.Tensor) -> PackedBatch:
        return replace(self, rows={**self.rows, **fields})

    def with_meta(self, **values: Any) -> PackedBatch:
        return replace(self, meta={**self.meta, **values})

    def split_items(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Cut an ``[N, ...]`` tensor into one tensor a row."""
        return list(value.split(self.lengths))

    def merge(self, rows_by_part: Sequence[Sequence[int]], values: Sequence[torch.Tensor]) -> torch.Tensor:
        """What was made of the items of some parts, back in the order of this batch: the inverse of :meth:`parts`.

        Args:
            values: ``[items of the part, ...]`` for each part, on the CPU; of a part without rows they are not looked at.
        """
        filled = [value for rows, value in zip(rows_by_part, values, strict=True) if rows]
        if not filled:
            return torch.zeros(0)
        found = torch.cat(filled)
        merged = torch.empty_like(found)
        # numpy's slices cost a fifth of torch's, and there are two a row.
        source, out, starts = found.numpy(), merged.numpy(), self.cu_seqlens.tolist()
        at = 0
        for rows in rows_by_part:
            for row in rows:
                start, stop = starts[row], starts[row + 1]
                end = at + stop - start
                out[start:stop] = source[at:end]
                at = end
        assert at == len(found) == self.num_items, "every row is in one part"
        return merged

    def chunks(self, num_rows: int) -> Iterator[PackedBatch]:
        """Consecutive batches of ``num_rows`` rows; the last may be smaller."""
        for start in range(0, self.num_rows, num_rows):
            yield self.select(range(start, min(start + num_rows, self.num_rows)))


class _Gathered:
    """Item fields of a batch with its rows in another order and cut into parts, each field when it is first asked for."""

    def __init__(self, batch: PackedBatch, rows: list[int], sizes: list[int]) -> None:
        self.items = batch.items
        self._sizes = sizes
        self._in_order = rows == list(range(batch.num_rows))
        self._locate = lambda: batch._locate(rows)[1]
        self._flat: torch.Tensor | None = None
        self._fields: dict[str, tuple[torch.Tensor, ...]] = {}

    def field(self, name: str) -> tuple[torch.Tensor, ...]:
        """One tensor a part, views of one memory."""
        if name not in self._fields:
            value = self.items[name]
            if not self._in_order:
                if self._flat is None:
                    self._flat = self._locate()
                value = value.index_select(0, self._flat.to(value.device))
            self._fields[name] = value.split(self._sizes)
        return self._fields[name]


class _Part(Mapping[str, torch.Tensor]):
    """Item fields of one part of a gathered batch."""

    __slots__ = ("_gathered", "_index")

    def __init__(self, gathered: _Gathered, index: int) -> None:
        self._gathered = gathered
        self._index = index

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._gathered.field(name)[self._index]

    def __contains__(self, name: object) -> bool:
        return name in self._gathered.items

    def __iter__(self) -> Iterator[str]:
        return iter(self._gathered.items)

    def __len__(self) -> int:
        return len(self._gathered.items)

    def __reduce__(self) -> tuple[type, tuple[dict[str, torch.Tensor]]]:
        # This part's rows alone travel, not the memory that all parts share.
        return dict, ({name: value.clone() for name, value in self.items()},)


def _index(numbers: list[int]) -> torch.Tensor:
    """A list as an index; numpy reads lists several times as fast."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """``[n]`` lengths -> ``[n + 1]`` starts, the total at the end."""
    return torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])


def _repeat(values: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """As :func:`torch.repeat_interleave`, on the CPU; numpy's is five times as fast there."""
    return torch.from_numpy(values.numpy().repeat(times.numpy()))


def pack(
    items: Mapping[str, Sequence[Any]],
    rows: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> PackedBatch:
    """Pack per-row sequences into one batch.

    Args:
        items: field name -> one sequence (list or tensor) a row; all fields agree on the lengths.
        rows: field name -> one value a row.
        dtypes: dtype of a field; otherwise as :func:`torch.as_tensor` decides.

    Raises:
        BatchError: fields disagree on a row's length, a row is empty, or a row's items have another shape than those of
            row 0; the row index is named.
    """
    dtypes = dtypes or {}
    lengths: list[int] | None = None
    packed: dict[str, torch.Tensor] = {}
    for name, values in items.items():
        tensors = [torch.as_tensor(v, dtype=dtypes.get(name)) for v in values]
        for i, t in enumerate(tensors):
            if t.ndim == 0 or (t.numel() and t.shape[1:] != tensors[0].shape[1:]):
                raise BatchError(
                    f"row {i} of field {name!r} has another shape than row 0",
                    found=f"shape {tuple(t.shape)}",
                    wanted=f"[items of the row, {', '.join(map(str, tensors[0].shape[1:])) or 'nothing more'}]",
                )
        own = [len(t) for t in tensors]
        if lengths is None:
            lengths = own
        if own != lengths:
            row = next(
                (i for i, (a, b) in enumerate(zip(own, lengths, strict=False)) if a != b), min(len(own), len(lengths))
            )
            raise BatchError(
                f"field {name!r} disagrees on the length of row {row}",
                found=own[row : row + 1],
                wanted=lengths[row : row + 1],
            )
        packed[name] = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtypes.get(name))
    assert lengths is not None, "a batch needs at least one item field"
    if 0 in lengths:
        raise BatchError(f"row {lengths.index(0)} is empty", found="0 items", wanted="at least 1")
    cu = torch.tensor([0, *lengths], dtype=torch.long).cumsum(0)
    row_fields = {k: torch.as_tensor(v, dtype=dtypes.get(k)) for k, v in (rows or {}).items()}
    return PackedBatch(cu, packed, row_fields, dict(meta or {}))


def concat(batches: Sequence[PackedBatch]) -> PackedBatch:
    """Lay batches end to end. All must have the same fields; ``meta`` is the first one's.

    The result is padding only when every part is.
    """
    assert batches, "nothing to concatenate"
    first = batches[0]
    for b in batches[1:]:
        assert set(b.items) == set(first.items), (sorted(b.items), sorted(first.items))
        assert set(b.rows) == set(first.rows), (sorted(b.rows), sorted(first.rows))
    lengths = torch.cat([b.cu_seqlens[1:] - b.cu_seqlens[:-1] for b in batches])
    return replace(
        first,
        cu_seqlens=_offsets(lengths),
        items={k: torch.cat([b.items[k] for b in batches]) for k in first.items},
        rows={k: torch.cat([b.rows[k] for b in batches]) for k in first.rows},
        is_padding=all(b.is_padding for b in batches),
    )


def padding_like(batch: PackedBatch, num_items: int = 2) -> PackedBatch:
    """A zero-weight micro-batch with the fields of ``batch``: one row of ``num_items`` zero items.

    ``loss_mask`` and ``item_weight`` are zero, so every gradient is present and zero.
    """
    return replace(
        batch,
        cu_seqlens=torch.tensor([0, num_items]),
        # new_zeros keeps dtype and device.
        items={k: v.new_zeros((num_items, *v.shape[1:])) for k, v in batch.items.items()},
        rows={k: v.new_zeros((1, *v.shape[1:])) for k, v in batch.rows.items()},
        is_padding=True,
    )


def save_batch(batch: PackedBatch, path: str) -> None:
    """Write a batch as safetensors (for the dump of a non-finite step, or to carry it to another process).

    Raises:
        BatchError: ``meta`` holds a value that JSON cannot (the key is named).
    """
    from safetensors.torch import save_file

    header = {"is_padding": batch.is_padding, "meta": dict(batch.meta)}
    for key, value in batch.meta.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise BatchError(
                f"meta field {key!r} cannot be saved",
                found=type(value).__name__,
                wanted="numbers, strings, lists or dicts",
            ) from error
    # clone: two fields may be one tensor (old and rollout log-probs in bypass mode), which safetensors refuses to write.
    tensors = {"cu_seqlens": batch.cu_seqlens.clone()}
    tensors |= {f"items.{k}": v.clone(memory_format=torch.contiguous_format) for k, v in batch.items.items()}
    tensors |= {f"rows.{k}": v.clone(memory_format=torch.contiguous_format) for k, v in batch.rows.items()}
    save_file(tensors, path, metadata={"rlctl": json.dumps(header)})


def load_batch(path: str) -> PackedBatch:
    """Read what :func:`save_batch` wrote. Sequences in ``meta`` come back as lists."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(path, framework="pt") as file:
        header = json.loads((file.metadata() or {}).get("rlctl", "{}"))
    tensors = load_file(path)
    return PackedBatch(
        tensors.pop("cu_seqlens"),
        {k.removeprefix("items."): v for k, v in tensors.items() if k.startswith("items.")},
        {k.removeprefix("rows."): v for k, v in tensors.items() if k.startswith("rows.")},
        header.get("meta", {}),
        header.get("is_padding", False),
    )
