"""Tensors through buckets: bit for bit, in order, in bounded memory, and nothing that is broken comes out whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sync_toys import DTYPES, drawn, odd_tensors

from rlctl.errors import GuardError
from rlctl.runtime.packed import ALIGN, Buckets, Header, Packer, Piece, Unpacker


def through(tensors: dict[str, torch.Tensor], size: int) -> tuple[list[tuple[str, torch.Tensor]], list[Header]]:
    """What comes out, and the headers; buckets are overwritten as soon as they may be."""
    packer, unpacker = Packer(iter(tensors.items()), Buckets(size, "cpu")), Unpacker("cpu")
    out: list[tuple[str, torch.Tensor]] = []
    headers: list[Header] = []
    for header, data in packer:
        headers.append(Header.from_json(header.to_json()))
        assert headers[-1] == header
        arrived = data.clone()
        out += unpacker.unpack(headers[-1], arrived)
        arrived.fill_(255)
    unpacker.finish()
    assert packer.num_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
    return out, headers


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


@pytest.mark.parametrize("size", [1, 100, 4096, 1 << 20])
def test_every_dtype_and_shape_arrives_bit_for_bit_and_in_order(size: int) -> None:
    tensors = odd_tensors(3)
    out, headers = through(tensors, size)
    assert [name for name, _ in out] == list(tensors)
    assert all(same_bits(tensor, tensors[name]) for name, tensor in out)
    limit = max(ALIGN, -(-size // ALIGN) * ALIGN)
    assert all(0 < h.size <= limit or not h.size for h in headers)
    assert all(p.offset % ALIGN == 0 for h in headers for p in h.pieces)
    # Only the last bucket may have room left, but for the alignment of the next tensor.
    assert all(h.size > limit - ALIGN for h in headers[:-1])


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3)), max_size=12),
    st.integers(1, 300),
)
def test_any_list_of_tensors(kinds: list[tuple[torch.dtype, list[int]]], size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": drawn(shape, dtype, generator) for i, (dtype, shape) in enumerate(kinds)}
    out, headers = through(tensors, size)
    assert [name for name, _ in out] == list(tensors)
    assert all(same_bits(tensor, tensors[name]) for name, tensor in out)
    assert bool(headers) == bool(tensors)


def test_two_buckets_and_one_tensor_are_all_that_is_held() -> None:
    made: list[int] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(50):
            made.append(i)
            yield f"w{i}", torch.full((300,), float(i))
        yield "large", torch.ones(5000)

    buckets = Buckets(2048, "cpu")
    packer = Packer(weights(), buckets)
    storages: set[int] = set()
    for header, data in packer:
        storages.add(data.untyped_storage().data_ptr())
        ended = [p.name for p in header.pieces]
        assert len(made) <= 1 + max([int(n[1:]) for n in ended if n != "large"], default=49) + 1, "it packs lazily"
    assert len(storages) == 2
    assert packer.peak_bytes == 2 * 2048 + 20_000
    buckets.free()
    assert buckets.num_bytes == 0


def test_what_comes_out_may_be_kept() -> None:
    tensors = {"a": torch.arange(4.0), "b": torch.arange(4.0) + 10}
    ((header, data),) = list(Packer(iter(tensors.items()), Buckets(1024, "cpu")))
    out = dict(Unpacker("cpu").unpack(header, data))
    data.zero_()
    assert all(torch.equal(out[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: replace(p, start=p.start + 16), "'large' did not arrive whole"),
        (lambda p: replace(p, name="other"), "'large' did not arrive whole"),
        (lambda p: replace(p, shape=(*p.shape, 1)), "'large' did not arrive whole"),
        (lambda p: replace(p, size=p.size + 4), "'large' did not arrive whole"),
    ],
)
def test_a_broken_row_of_pieces_names_the_tensor(spoil, says: str) -> None:
    packed = [(h, d.clone()) for h, d in Packer(iter({"large": torch.ones(100)}.items()), Buckets(256, "cpu"))]
    assert len(packed) == 2
    (first, one), (second, two) = packed
    unpacker = Unpacker("cpu")
    assert list(unpacker.unpack(first, one)) == []
    with pytest.raises(GuardError, match=says):
        list(unpacker.unpack(Header(second.size, (spoil(second.pieces[0]),)), two))


def test_an_end_in_the_middle_names_the_tensor() -> None:
    header, data = next(iter(Packer(iter({"large": torch.ones(100)}.items()), Buckets(256, "cpu"))))
    unpacker = Unpacker("cpu")
    assert list(unpacker.unpack(header, data)) == []
    with pytest.raises(GuardError, match="'large' did not arrive whole"):
        unpacker.finish()


def test_a_dtype_that_is_not_here_is_refused() -> None:
    header = Header(4, (Piece("w", "no_such", (1,), 0, 0, 4),))
    with pytest.raises(GuardError, match="'w' did not arrive whole"):
        list(Unpacker("cpu").unpack(header, torch.zeros(16, dtype=torch.uint8)))


def test_what_has_no_values_of_its_own_is_refused() -> None:
    for tensor in (torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(GuardError, match="weight 'w' cannot be sent"):
            list(Packer(iter([("w", tensor)]), Buckets(64, "cpu")))
