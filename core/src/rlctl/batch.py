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
from typing import Any

import torch

from rlctl.errors import BatchError


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

    @property
    def num_items(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> list[int]:
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()

    def row_ids(self) -> torch.Tensor:
        """``[N]`` index of the row that owns each item."""
        lengths = self.cu_seqlens[1:] - self.cu_seqlens[:-1]
        return torch.repeat_interleave(torch.arange(self.num_rows), lengths)

    def position_ids(self) -> torch.Tensor:
        """``[N]`` position of each item within its row, restarting at 0."""
        return torch.arange(self.num_items) - self.cu_seqlens[:-1][self.row_ids()]

    def select(self, indices: Sequence[int]) -> PackedBatch:
        """The rows ``indices`` in that order, as a batch of their own."""
        index = torch.as_tensor(list(indices), dtype=torch.long)
        lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1])[index]
        cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        # Item t of the result lies (t - start of its row there) behind the start of its row here.
        flat = torch.arange(int(cu[-1])) + torch.repeat_interleave(self.cu_seqlens[:-1][index] - cu[:-1], lengths)
        return replace(
            self,
            cu_seqlens=cu,
            items={k: v[flat] for k, v in self.items.items()},
            rows={k: v[index] for k, v in self.rows.items()},
        )

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

    def chunks(self, num_rows: int) -> Iterator[PackedBatch]:
        """Consecutive batches of ``num_rows`` rows; the last may be smaller."""
        for start in range(0, self.num_rows, num_rows):
            yield self.select(range(start, min(start + num_rows, self.num_rows)))


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
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
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
