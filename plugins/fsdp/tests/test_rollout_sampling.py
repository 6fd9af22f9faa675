"""Random streams, filters and batching plans: plain functions, checked against what they stand for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlctl.generation import SamplingParams
from rlctl_fsdp.decoding import plan_chunks
from rlctl_fsdp.sampling import draw, uniforms


def test_streams_depend_on_seed_row_and_step_alone() -> None:
    rows = np.arange(40, dtype=np.uint64)
    whole = uniforms(5, rows, 0, 128)
    assert np.array_equal(whole[[7, 31], 64:], uniforms(5, rows[[7, 31]], 64, 64))
    assert not np.intersect1d(whole, uniforms(6, rows, 0, 128)).size
    assert np.unique(whole).size == whole.size


def test_streams_look_uniform_and_unrelated() -> None:
    u = uniforms(0, np.arange(1000, dtype=np.uint64), 0, 1000)
    assert u.min() > 0.0
    assert u.max() < 1.0
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    # 99 degrees of freedom: mean 99, standard deviation 14.
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 99 + 5 * 14.1
    noise = 5 / math.sqrt(u.size)
    for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1]), (u, uniforms(1, np.arange(1000, dtype=np.uint64), 0, 1000))):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < noise


def test_seeds_of_any_size_are_taken() -> None:
    rows = np.arange(3, dtype=np.uint64)
    seen = {uniforms(seed, rows, 0, 1).tobytes() for seed in (0, 1, 2**31, 2**63 - 1, 2**64 - 1, -1 & (2**64 - 1))}
    assert len(seen) == 5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.7),
        SamplingParams(temperature=1.4, top_k=6, top_p=0.9),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "all"],
)
def test_draws_follow_the_filtered_distribution(params: SamplingParams) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 10) * 2
    scores = logits
    if params.temperature != 1.0:
        scores = TemperatureLogitsWarper(params.temperature)(torch.empty(0), scores)  # pyright: ignore[reportArgumentType]
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(torch.empty(0), scores)  # pyright: ignore[reportArgumentType]
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(torch.empty(0), scores)  # pyright: ignore[reportArgumentType]
    wanted = scores.log_softmax(-1)[0]
    n = 20_000
    u = torch.from_numpy(uniforms(1, np.arange(n, dtype=np.uint64), 0, 1)[:, 0])
    ids, log_probs = draw(logits.expand(n, -1), params, u)
    assert torch.allclose(log_probs, wanted[ids], atol=1e-5)
    counts = torch.bincount(ids, minlength=10)
    p = wanted.exp()
    assert bool((counts[p == 0] == 0).all())
    assert bool(((counts - n * p).abs() <= 5 * (n * p * (1 - p)).sqrt() + 1).all())


def test_greedy_reports_temperature_one() -> None:
    logits = torch.randn(4, 10)
    ids, log_probs = draw(logits, SamplingParams(temperature=0.0, top_k=2), None)
    assert torch.equal(ids, logits.argmax(-1))
    assert torch.allclose(log_probs, logits.log_softmax(-1).max(-1).values, atol=1e-6)


@pytest.mark.parametrize("top_p", [0.3, 0.999])
def test_wide_nucleus_of_a_large_vocabulary(top_p: float) -> None:
    """Rows whose nucleus is larger than what is looked at first, beside rows where it is not."""
    torch.manual_seed(0)
    logits = torch.cat([torch.randn(3, 5000) * 0.1, torch.randn(3, 5000) * 8])
    u = torch.full((6,), 0.5, dtype=torch.float64)
    _, log_probs = draw(logits, SamplingParams(top_p=top_p), u)
    warped = TopPLogitsWarper(top_p)(torch.empty(0), logits.double()).log_softmax(-1)  # pyright: ignore[reportArgumentType]
    kept = (warped > -math.inf).sum(-1)
    assert int(kept[:3].min()) > 1024
    assert int(kept[3:].max()) < 1024
    ids, _ = draw(logits, SamplingParams(top_p=top_p), u)
    assert torch.allclose(log_probs, warped.gather(-1, ids[:, None])[:, 0].float(), atol=1e-3)
    assert torch.equal(draw(logits[2:4], SamplingParams(top_p=top_p), u[2:4])[0], ids[2:4])


def test_a_draw_never_takes_an_impossible_token() -> None:
    logits = torch.tensor([[0.0, -math.inf, -200.0, -math.inf]])
    for u in (1e-15, 0.5, 1 - 2**-49):
        ids, log_probs = draw(logits, SamplingParams(), torch.tensor([u], dtype=torch.float64))
        assert ids.tolist() == [0]
        assert log_probs.tolist() == [0.0]


def test_logits_are_not_changed() -> None:
    logits = torch.randn(2, 6)
    copy = logits.clone()
    draw(logits, SamplingParams(temperature=0.5, top_k=2, top_p=0.5), torch.tensor([0.1, 0.9], dtype=torch.float64))
    assert torch.equal(logits, copy)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    n=st.integers(1, 9),
    max_new=st.integers(1, 10),
    max_rows=st.integers(1, 12),
    max_tokens=st.integers(1, 200),
    any_length=st.booleans(),
)
def test_plans_hold_every_row_once_within_the_bounds(
    lengths: list[int], n: int, max_new: int, max_rows: int, max_tokens: int, any_length: bool
) -> None:
    chunks = plan_chunks(lengths, n, max_new, max_rows, max_tokens, any_length)
    rows = [(p, c.first_sample + k) for c in chunks for p in c.prompts for k in range(c.copies)]
    assert sorted(rows) == [(p, s) for p in range(len(lengths)) for s in range(n)]
    for c in chunks:
        count, longest = len(c.prompts) * c.copies, max(lengths[p] for p in c.prompts)
        assert count <= max_rows
        assert count == 1 or count * (longest + max_new) <= max_tokens
        assert any_length or len({lengths[p] for p in c.prompts}) == 1
