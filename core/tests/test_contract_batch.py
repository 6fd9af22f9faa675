"""Packed batches: building, selecting, joining, padding, saving; every refusal names its row or field."""

from __future__ import annotations

import pickle
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlctl.batch import PackedBatch, concat, load_batch, pack, padding_like, save_batch
from rlctl.errors import BatchError
from rlctl.runtime.wire import decode, encode

lengths_strategy = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def make(lengths: list[int], start: int = 0) -> PackedBatch:
    """Every item's id is unique, so that any mix-up of rows shows."""
    rows, at = [], start
    for n in lengths:
        rows.append(list(range(at, at + n)))
        at += n
    return pack(
        {"input_ids": rows, "value": [torch.tensor(r).double()[:, None] * torch.tensor([1.0, -1.0]) for r in rows]},
        rows={"row_weight": [float(r[0]) for r in rows]},
        meta={"temperature": 0.7},
        dtypes={"input_ids": torch.long},
    )


def rows_of(batch: PackedBatch) -> list[list[int]]:
    return [t.tolist() for t in batch.split_items(batch.items["input_ids"])]


def test_pack_lays_rows_end_to_end() -> None:
    batch = make([2, 1, 3])
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 6]
    assert batch.cu_seqlens.dtype == torch.int64
    assert (batch.num_rows, batch.num_items, batch.lengths) == (3, 6, [2, 1, 3])
    assert batch.row_ids().tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.position_ids().tolist() == [0, 1, 0, 0, 1, 2]
    assert batch.items["value"].shape == (6, 2)


@given(lengths_strategy, st.data())
def test_select_takes_whole_rows_in_the_order_asked(lengths: list[int], data: st.DataObject) -> None:
    batch = make(lengths)
    indices = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=10))
    chosen = batch.select(indices)
    assert rows_of(chosen) == [rows_of(batch)[i] for i in indices]
    assert chosen.rows["row_weight"].tolist() == [batch.rows["row_weight"][i].item() for i in indices]
    assert chosen.items["value"].dtype == torch.float64
    assert chosen.items["input_ids"].dtype == torch.int64
    assert chosen.meta == batch.meta


def same(a: PackedBatch, b: PackedBatch) -> bool:
    """Equal bounds, fields, values, dtypes and settings."""
    fields = [(a.items, b.items), (a.rows, b.rows)]
    return (
        torch.equal(a.cu_seqlens, b.cu_seqlens)
        and all(
            list(x) == list(y) and all(torch.equal(x[k], y[k]) and x[k].dtype == y[k].dtype for k in x)
            for x, y in fields
        )
        and (a.meta, a.is_padding) == (b.meta, b.is_padding)
    )


@given(lengths_strategy, st.integers(1, 4), st.randoms(use_true_random=False), st.booleans())
def test_parts_are_what_select_takes(lengths: list[int], size: int, random: Random, mixed: bool) -> None:
    batch = make(lengths)
    order = list(range(len(lengths)))
    if mixed:
        random.shuffle(order)
    rows = [order[start : start + size] for start in range(0, len(order), size)]
    parts = batch.parts(rows)
    assert [part.num_rows for part in parts] == list(map(len, rows))
    for part, own in zip(parts, rows, strict=True):
        assert same(part, batch.select(own))
        # What is made of a part is an ordinary batch.
        assert same(
            part.with_items(more=part.items["input_ids"]).select([0]).with_meta(a=1),
            batch.select(own[:1]).with_items(more=batch.select(own[:1]).items["input_ids"]).with_meta(a=1),
        )


def test_parts_gather_a_field_when_it_is_asked_for() -> None:
    """Each field is moved once, for all parts together, and one that nobody reads is not moved at all."""
    batch = make([2, 1, 3, 2])
    moved: list[int] = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.index_select:
                moved.append(len(args[2]))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    watched = {k: v.as_subclass(Watched) for k, v in batch.items.items()}
    parts = PackedBatch(batch.cu_seqlens, watched, batch.rows).parts([[3, 0], [2], [1]])
    assert moved == []
    assert list(parts[0].items) == ["input_ids", "value"]
    assert "value" in parts[0].items
    assert moved == []
    assert [part.items["input_ids"].tolist() for part in parts] == [[6, 7, 0, 1], [3, 4, 5], [2]]
    assert moved == [8]
    # Rows that stay in order are views.
    in_order = batch.parts([[0, 1], [2, 3]])
    assert in_order[1].items["input_ids"].data_ptr() == batch.items["input_ids"][3:].data_ptr()


def test_a_part_travels_without_the_rows_of_the_others() -> None:
    batch = make([500, 2])
    part = batch.parts([[1], [0]])[0]
    sent = pickle.dumps(part)
    assert len(sent) < 3000
    assert same(pickle.loads(sent), part)
    header, tensors = encode(part)
    assert sum(t.numel() for t in tensors) < 20
    assert same(decode(header, tensors), part)


def test_parts_have_rows() -> None:
    with pytest.raises(AssertionError):
        make([1, 2]).parts([[0, 1], []])
    assert make([1, 2]).parts([]) == []


@given(lengths_strategy, st.data())
def test_consecutive_rows_are_views(lengths: list[int], data: st.DataObject) -> None:
    batch = make(lengths)
    start = data.draw(st.integers(0, len(lengths) - 1))
    stop = data.draw(st.integers(start + 1, len(lengths)))
    taken = batch.select(range(start, stop))
    assert taken.items["input_ids"].data_ptr() == batch.items["input_ids"][batch.cu_seqlens[start] :].data_ptr()
    assert same(taken, batch.slice_rows(start, stop))
    assert rows_of(taken) == rows_of(batch)[start:stop]


@given(lengths_strategy, st.integers(1, 4))
def test_chunks_and_concat_are_inverse(lengths: list[int], size: int) -> None:
    batch = make(lengths)
    chunks = list(batch.chunks(size))
    assert [c.num_rows for c in chunks[:-1]] == [size] * (len(chunks) - 1)
    joined = concat(chunks)
    assert rows_of(joined) == rows_of(batch)
    assert torch.equal(joined.cu_seqlens, batch.cu_seqlens)
    assert torch.equal(joined.items["value"], batch.items["value"])
    assert torch.equal(joined.rows["row_weight"], batch.rows["row_weight"])


def test_concat_is_padding_only_when_every_part_is() -> None:
    batch = make([2, 3])
    pad = padding_like(batch)
    assert not concat([pad, batch]).is_padding
    assert not concat([batch, pad]).is_padding
    assert concat([pad, pad]).is_padding


def test_concat_refuses_other_fields() -> None:
    with pytest.raises(AssertionError):
        concat([make([2]), make([2]).with_items(extra=torch.zeros(2))])


def test_padding_has_the_same_fields_and_no_weight() -> None:
    batch = make([3, 1]).with_items(
        loss_mask=torch.ones(4, dtype=torch.bool), item_weight=torch.ones(4), half=torch.ones(4, dtype=torch.bfloat16)
    )
    pad = padding_like(batch, num_items=3)
    assert pad.is_padding
    assert (pad.num_rows, pad.num_items) == (1, 3)
    assert set(pad.items) == set(batch.items)
    assert set(pad.rows) == set(batch.rows)
    for name, value in batch.items.items():
        assert pad.items[name].dtype == value.dtype, name
        assert pad.items[name].shape[1:] == value.shape[1:], name
        assert not pad.items[name].any(), name
    assert not pad.rows["row_weight"].any()
    # A rank that got no row at all still knows the fields.
    assert set(padding_like(batch.select([])).items) == set(batch.items)


@pytest.mark.parametrize(
    ("items", "rows", "text"),
    [
        ({"a": [[1, 2], [3]], "b": [[1, 2], [3, 4]]}, {}, "row 1"),
        ({"a": [[1], [2], [3]], "b": [[1], [2]]}, {}, "row 2"),
        ({"a": [[1], []]}, {}, "row 1 is empty"),
        ({"a": [[[1, 2]], [[1, 2, 3]]]}, {}, "row 1"),
        ({"a": [[1], 5]}, {}, "row 1"),
        ({"a": [[1], [2]]}, {"w": [1.0]}, "'w'"),
    ],
)
def test_pack_names_what_does_not_fit(items: dict, rows: dict, text: str) -> None:
    with pytest.raises(BatchError, match=text) as caught:
        pack(items, rows)
    assert caught.value.found
    assert caught.value.wanted


def test_a_field_of_another_size_is_refused() -> None:
    batch = make([2, 2])
    with pytest.raises(BatchError, match="item field 'bad'"):
        batch.with_items(bad=torch.zeros(3))
    with pytest.raises(BatchError, match="row field 'bad'"):
        batch.with_rows(bad=torch.zeros(4))


def test_save_and_load_keep_everything(tmp_path) -> None:
    shared = torch.arange(6.0)
    batch = make([2, 1, 3]).with_items(
        old_log_probs=shared,
        rollout_log_probs=shared,  # one tensor under two names, as in bypass mode
        strided=torch.arange(12.0).reshape(6, 2)[:, 0],
        loss_mask=torch.tensor([False, True, False, False, True, True]),
    )
    batch = batch.with_meta(tags=("a", "b"), step=3)
    path = str(tmp_path / "batch.safetensors")
    save_batch(batch, path)
    back = load_batch(path)
    assert torch.equal(back.cu_seqlens, batch.cu_seqlens)
    assert set(back.items) == set(batch.items)
    for name, value in batch.items.items():
        assert torch.equal(back.items[name], value), name
        assert back.items[name].dtype == value.dtype, name
    assert torch.equal(back.rows["row_weight"], batch.rows["row_weight"])
    assert back.meta == {"temperature": 0.7, "tags": ["a", "b"], "step": 3}
    assert not back.is_padding
    save_batch(padding_like(batch), path)
    assert load_batch(path).is_padding


def test_save_names_the_setting_it_cannot_write(tmp_path) -> None:
    with pytest.raises(BatchError, match="'scorer'"):
        save_batch(make([1]).with_meta(scorer=object()), str(tmp_path / "x"))
