"""A weight's fingerprint: equal for equal bits wherever they lie, another one for any change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sync_toys import DTYPES, drawn, odd_tensors

from rlctl.sync import fingerprint_tensor


@given(st.sampled_from(DTYPES), st.integers(1, 30_000), st.data())
def test_any_changed_bit_shows(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    tensor = drawn((size,), dtype, torch.Generator().manual_seed(size))
    content = tensor.view(torch.uint8)
    before = fingerprint_tensor(tensor)
    at = data.draw(st.integers(0, content.numel() - 1))
    bit = 0 if dtype is torch.bool else data.draw(st.integers(0, 7))
    content[at] ^= 1 << bit
    assert fingerprint_tensor(tensor) != before
    content[at] ^= 1 << bit
    assert fingerprint_tensor(tensor) == before


def test_a_last_bit_far_from_the_sample_shows() -> None:
    # A sum of the values, rounded, would miss it.
    tensor = torch.rand(1_000_001)
    before = fingerprint_tensor(tensor)
    tensor[777_777] = torch.nextafter(tensor[777_777], torch.tensor(2.0))
    assert fingerprint_tensor(tensor) != before


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_have_the_fingerprint_of_what_they_show(dtype: torch.dtype) -> None:
    whole = drawn((5, 37), dtype, torch.Generator().manual_seed(0))
    for view in (whole[1:], whole[1:, 3:], whole.t(), whole[2, 5:], whole[::2], whole[0, 0]):
        assert fingerprint_tensor(view) == fingerprint_tensor(view.clone(memory_format=torch.contiguous_format))
    assert fingerprint_tensor(whole) != fingerprint_tensor(whole.t())
    assert fingerprint_tensor(whole) != fingerprint_tensor(whole.flip(0))


def test_each_tensor_has_its_own() -> None:
    # Empty tensors, scalars and special values too; only tensors of one shape and dtype with the same bits share one.
    prints = [fingerprint_tensor(t) for t in odd_tensors(1).values()]
    assert len(set(prints)) == len(prints)
    assert prints == [fingerprint_tensor(t) for t in odd_tensors(1).values()]
    zero = torch.zeros(3)
    assert fingerprint_tensor(zero) != fingerprint_tensor(-zero)
