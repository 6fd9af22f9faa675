"""Packed core attention against every token with every other and a mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_sequence_ranks import (
    LENGTHS,
    attention_module,
    compare_attention,
    draw,
    draw_batch,
    off_by,
    plain_attention,
    sources,
)

from rlctl.errors import EngineError
from rlctl.topology import Topology
from rlctl_megatron import attention
from rlctl_megatron.attention import PackedAttention
from rlctl_megatron.layout import lay_out
from rlctl_megatron.mesh import Place

CPU = torch.device("cpu")
ALONE = Place(Topology(world_size=1), CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [-1, 0, 3, 12, 50])
@pytest.mark.parametrize("lengths", [LENGTHS, (7,), (4, 4, 4), (1,)])
def test_one_process_equals_the_masked_product(lengths, window, kv_heads, dtype) -> None:
    found = compare_attention(ALONE, window, kv_heads, lengths, dtype=dtype)
    assert max(found.values()) < (1e-6 if dtype == torch.float32 else 1e-13)


def test_filling_of_sequence_parallelism_reaches_no_token() -> None:
    place = Place(Topology(world_size=4, tp=4), CPU)
    assert lay_out(draw_batch(LENGTHS, 11), CPU, place, sp=True).filling == 0, "a case with filling is wanted below"
    assert lay_out(draw_batch((5, 6, 2), 11), CPU, place, sp=True).filling == 3
    assert max(compare_attention(place, sp=True, lengths=(5, 6, 2)).values()) < 1e-6


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    cp=st.sampled_from([2, 3, 4]),
    window=st.sampled_from([-1, 0, 2, 7]),
)
def test_any_rows_over_any_ranks(lengths, cp, window) -> None:
    """Each rank in turn, with the keys that all of them would bring; the collective itself has its own tests."""
    batch = draw_batch(lengths, 11)
    q, k, v = (draw(batch.num_items, heads, 4, seed=heads + i) for i, heads in enumerate((4, 2, 2)))
    want = plain_attention(q, k, v, lengths, window)
    places = [Place(Topology(world_size=cp, cp=cp), CPU, cp_rank=rank) for rank in range(cp)]
    at = [sources(batch, place, False) for place in places]
    everyone = torch.cat([torch.cat([k, v], -1)[one] for one in at])
    original = attention.gather_tokens
    attention.gather_tokens = lambda mine, group: everyone
    try:
        for place, one in zip(places, at, strict=True):
            module = attention_module(4, 2, 4, cp, _Rank(cp, place.cp_rank), window)
            laid = lay_out(batch, CPU, place, False)
            out = module(q[one], k[one], v[one], None, packed_seq_params=laid.packed)
            real = torch.ones_like(one, dtype=torch.bool) if laid.padding is None else ~laid.padding[0]
            assert off_by([out[real]], [want[one[real]]]) < 1e-6
    finally:
        attention.gather_tokens = original


class _Rank:
    """A process group's size and rank, without one."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = (lambda: size), (lambda: rank)


def test_a_row_does_not_see_the_row_before_it() -> None:
    batch = draw_batch((4, 5), 11)
    laid = lay_out(batch, CPU, ALONE, False)
    q, k, v = (draw(9, 2, 4, seed=i) for i in range(3))
    module = attention_module(2, 2, 4)
    before = module(q, k, v, None, packed_seq_params=laid.packed)
    k[:4], v[:4] = 1e3, -1e3
    after = module(q, k, v, None, packed_seq_params=laid.packed)
    assert torch.equal(before[4:], after[4:])
    assert not torch.allclose(before[:4], after[:4])


def test_the_scale_that_the_model_asks_for() -> None:
    laid = lay_out(draw_batch((6,), 11), CPU, ALONE, False)
    q, k, v = (draw(6, 2, 4, seed=i) for i in range(3))
    module = attention_module(2, 2, 4)
    module._scale = 0.25
    out = module(q, k, v, None, packed_seq_params=laid.packed)
    assert off_by([out], [plain_attention(q * 0.5, k, v, (6,), -1)]) < 1e-6


def test_bfloat16_stays_bfloat16() -> None:
    laid = lay_out(draw_batch(LENGTHS, 11), CPU, ALONE, False)
    full = [draw(sum(LENGTHS), heads, 8, seed=i) for i, heads in enumerate((4, 2, 2))]
    out = attention_module(4, 2, 8)(*(t.bfloat16() for t in full), None, packed_seq_params=laid.packed)
    assert out.dtype == torch.bfloat16
    q, k, v = (t.bfloat16().float() for t in full)
    assert off_by([out], [plain_attention(q, k, v, LENGTHS, -1)]) < 2e-2


def test_windows_of_the_layers_that_have_one() -> None:
    from megatron.core.transformer.enums import AttnMaskType

    config = attention_module(2, 2, 4, window=3, window_attn_skip_freq=[1, 0]).config
    windows = [PackedAttention(config, layer, AttnMaskType.causal, "self")._window for layer in (1, 2)]
    assert windows == [3, -1]


def test_what_is_not_computed_is_refused() -> None:
    with pytest.raises(EngineError, match="does not compute attention dropout"):
        attention_module(2, 2, 4, attention_dropout=0.1)
    with pytest.raises(EngineError, match="does not compute a softmax of another kind"):
        attention_module(2, 2, 4, softmax_type="off-by-one")
    with pytest.raises(EngineError, match="does not compute a window that looks ahead"):
        attention_module(2, 2, 4, window_size=(4, -1))


def test_a_plan_made_for_scoring_serves_training() -> None:
    laid = lay_out(draw_batch((5, 3), 11), CPU, ALONE, False)
    attention._plan.cache_clear()
    module = attention_module(2, 2, 4)
    with torch.inference_mode():
        module(*(draw(8, 2, 4, seed=i) for i in range(3)), None, packed_seq_params=laid.packed)
    assert not any(t.is_inference() for t in vars(attention._plan((0, 5, 8), 1, 0, CPU)).values() if torch.is_tensor(t))
    assert attention._plan.cache_info().hits == 1
