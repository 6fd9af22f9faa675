"""The chunked reader against a full float64 computation, and its memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlctl.parts import reader as reader_module
from rlctl.parts.head import HeadSpec
from rlctl.parts.reader import ChunkedReader, FullReader, Head

N, D, V = 23, 16, 37
SPECS = [HeadSpec(), HeadSpec(scale=0.0625), HeadSpec(softcap=3.0), HeadSpec(scale=0.5, softcap=2.0)]


def _inputs(dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([1, 2, 3, 7, 8, 11, 12, 13, 19, 22])
    hidden = torch.randn(len(positions), D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    bias = torch.randn(V, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, V, (N,), generator=generator)
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight, bias)]
    return positions, ids, leaves


def _exact(leaves, spec: HeadSpec, temperature: float, positions, ids) -> FullReader:
    hidden, weight, bias = leaves
    return FullReader(spec.apply(hidden @ weight.T + bias), positions, ids, temperature)


def _everything(r, ids) -> torch.Tensor:
    """One number through every differentiable method, with uneven weights."""
    k = torch.stack([ids, (ids + 5) % V, ids], -1)
    w = torch.linspace(0.5, 2.0, N)
    both = r.log_prob_and_entropy()
    return (
        (w * r.log_prob()).sum()
        + (w.flip(0) * r.entropy()).sum()
        + (w * both[0].exp()).sum()
        + (both[1] ** 2).sum()
        + (torch.stack([w, -w, w**2], -1) * r.log_prob_at(k)).sum()
    )


@pytest.mark.parametrize("keep", [0, 1 << 30], ids=["recomputed", "kept"])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.describe())
def test_values_and_gradients_equal_the_full_computation(monkeypatch, spec, temperature, chunk, keep) -> None:
    monkeypatch.setattr(reader_module, "chunk_rows", lambda *_: chunk)
    positions, ids, leaves = _inputs()
    _, _, exact_leaves = _inputs(torch.float64)
    hidden, weight, bias = leaves
    got = ChunkedReader(hidden, positions, ids, Head(weight, bias, spec, torch.float32, temperature), keep)
    # FullReader works in float32 by contract; its inputs are exact.
    want = _exact(exact_leaves, spec, temperature, positions, ids)
    for a, b in zip(got.log_prob_and_entropy(), want.log_prob_and_entropy(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)
        assert a.dtype == torch.float32
    torch.testing.assert_close(got.log_prob(), want.log_prob(), atol=2e-5, rtol=1e-5)
    other = (ids + 3) % V
    torch.testing.assert_close(got.log_prob(other), want.log_prob(other), atol=2e-5, rtol=1e-5)
    top, want_top = got.topk(4), want.topk(4)
    torch.testing.assert_close(top[0], want_top[0], atol=2e-5, rtol=1e-5)
    assert torch.equal(top[1], want_top[1])
    assert not top[0].requires_grad
    torch.testing.assert_close(
        got.sum_p2(),
        want.log_prob_at(torch.arange(V).expand(len(ids), V)).exp().square().sum(-1) * (want.log_prob() != 0),
        atol=1e-6,
        rtol=1e-5,
    )
    torch.testing.assert_close(want.sum_p2(), got.sum_p2(), atol=1e-6, rtol=1e-5)
    _everything(got, ids).backward()
    _everything(want, ids).backward()
    for mine, exact in zip(leaves, exact_leaves, strict=True):
        scale = float(exact.grad.abs().max())
        assert float((mine.grad - exact.grad).abs().max()) < 5e-6 * scale


def test_unscored_positions_are_zero_and_have_no_gradient() -> None:
    positions, ids, (hidden, weight, bias) = _inputs()
    r = ChunkedReader(hidden, positions, ids, Head(weight, bias, HeadSpec(), torch.float32), 1 << 30)
    log_probs, entropy = r.log_prob_and_entropy()
    unscored = torch.ones(N, dtype=torch.bool)
    unscored[positions] = False
    assert torch.equal(log_probs[unscored], torch.zeros(int(unscored.sum())))
    assert torch.equal(entropy[unscored], torch.zeros(int(unscored.sum())))
    assert bool((log_probs[positions] < 0).all())
    (log_probs * unscored).sum().backward()
    assert float(hidden.grad.abs().max()) == 0.0


def test_nothing_scored_gives_zero_gradients_that_exist() -> None:
    _, ids, (hidden, weight, bias) = _inputs()
    none = torch.empty(0, dtype=torch.long)
    for keep in (0, 1 << 30):
        r = ChunkedReader(hidden[:0], none, ids, Head(weight, bias, HeadSpec(), torch.float32), keep)
        log_probs, entropy = r.log_prob_and_entropy()
        assert torch.equal(log_probs, torch.zeros(N))
        (log_probs.sum() + entropy.sum()).backward()
    for leaf in (hidden, weight, bias):
        assert leaf.grad is not None
        assert float(leaf.grad.abs().max()) == 0.0


def test_one_distribution_sums_to_one() -> None:
    positions, ids, (hidden, weight, bias) = _inputs()
    r = ChunkedReader(hidden, positions, ids, Head(weight, bias, HeadSpec(softcap=3.0), torch.float32, 0.5), 0)
    every = r.log_prob_at(torch.arange(V).expand(N, V))
    torch.testing.assert_close(every[positions].exp().sum(-1), torch.ones(len(positions)))
    torch.testing.assert_close(-(every.exp() * every).sum(-1)[positions], r.entropy()[positions])


class _Largest(TorchDispatchMode):
    """The largest tensor, in bytes, that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return out


def _peaks(num_tokens: int, keep: int) -> tuple[int, int]:
    """(bytes saved for the backward pass, bytes of the largest tensor made on the way) for a 4096-word vocabulary."""
    vocab, width = 4096, 8
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    ids = torch.randint(0, vocab, (num_tokens,))
    saved: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with _Largest() as seen, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        r = ChunkedReader(hidden, torch.arange(num_tokens), ids, Head(weight, None, HeadSpec(), torch.float32), keep)
        sum(t.sum() for t in r.log_prob_and_entropy()).backward()
    return sum(saved.values()), seen.largest


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    full = 4096 * 4096 * 4  # float32 logits of 4096 tokens
    few, _ = _peaks(512, keep=0)
    many, largest = _peaks(4096, keep=0)
    assert many < full / 50, "only hidden states, ids and a few numbers a token are saved"
    assert many - few < 4096 * 200, "what grows with tokens is a few numbers each"
    assert largest <= 4 * 4096 * reader_module.chunk_rows(4096, "cpu") < full / 5, (
        "no operation makes more than one chunk of logits"
    )
    kept, _ = _peaks(4096, keep=1 << 40)
    assert kept >= full, "the measure sees logits when they are kept"
