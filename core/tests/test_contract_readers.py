"""The plain reader against probabilities computed one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from rlctl.batch import PackedBatch, pack, padding_like
from rlctl.readers import DenseReader

V = 5


def setup(temperature: float = 1.0) -> tuple[torch.Tensor, PackedBatch]:
    batch = pack(
        {"input_ids": [[1, 4, 2], [0, 3]], "loss_mask": [[False, True, True], [False, True]]},
        meta={"temperature": temperature},
    )
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(0)) * 2
    return logits.requires_grad_(), batch


def slow(logits: torch.Tensor, temperature: float) -> list[float]:
    z = [math.exp(x / temperature) for x in logits.tolist()]
    return [x / sum(z) for x in z]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_values(temperature: float) -> None:
    logits, batch = setup(temperature)
    reader = DenseReader(logits, batch)
    # Item t is predicted by the row of logits before it; items 0 and 3 start their rows.
    p = {t: slow(logits.detach()[t - 1], temperature) for t in (1, 2, 4)}
    ids = batch.items["input_ids"].tolist()
    wanted = [math.log(p[t][ids[t]]) if t in p else 0.0 for t in range(5)]
    assert reader.log_prob().tolist() == pytest.approx(wanted, abs=1e-5)
    entropy = [-sum(x * math.log(x) for x in p[t]) if t in p else 0.0 for t in range(5)]
    assert reader.entropy().tolist() == pytest.approx(entropy, abs=1e-5)
    both = reader.log_prob_and_entropy()
    assert torch.equal(both[0], reader.log_prob())
    assert torch.equal(both[1], reader.entropy())
    other = reader.log_prob(torch.full((5,), 2))
    assert other.tolist() == pytest.approx([math.log(p[t][2]) if t in p else 0.0 for t in range(5)], abs=1e-5)
    pair = reader.log_prob_at(torch.stack([torch.full((5,), 2), batch.items["input_ids"]], dim=1))
    assert torch.equal(pair, torch.stack([other, reader.log_prob()], dim=1))
    squares = [sum(x * x for x in p[t]) if t in p else 0.0 for t in range(5)]
    assert reader.sum_p2().tolist() == pytest.approx(squares, abs=1e-6)
    values, top = reader.topk(2)
    for t in p:
        best = sorted(range(V), key=lambda i: -p[t][i])[:2]
        assert top[t].tolist() == best
        assert values[t].tolist() == pytest.approx([math.log(p[t][i]) for i in best], abs=1e-5)
    assert not values.requires_grad
    assert all(x.dtype == torch.float32 for x in (values, pair, both[0], both[1]))


def test_gradients_reach_scored_rows_alone() -> None:
    logits, batch = setup()
    (DenseReader(logits, batch).log_prob().sum()).backward()
    assert logits.grad is not None
    p = torch.softmax(logits.detach(), -1)
    for row, token in ((0, 4), (1, 2), (3, 3)):
        wanted = torch.nn.functional.one_hot(torch.tensor(token), V) - p[row]
        assert torch.allclose(logits.grad[row], wanted, atol=1e-6)
    assert not logits.grad[[2, 4]].any()


def test_padding_has_a_gradient_and_it_is_zero() -> None:
    _, batch = setup()
    logits = torch.randn(2, V, requires_grad=True)
    reader = DenseReader(logits, padding_like(batch))
    (reader.log_prob().sum() + reader.entropy().sum()).backward()
    assert logits.grad is not None
    assert not logits.grad.any()


def test_impossible_tokens_do_not_make_entropy_nan() -> None:
    logits, batch = setup()
    blocked = logits.detach().clone()
    blocked[:, 0] = float("-inf")
    blocked.requires_grad_()
    entropy = DenseReader(blocked, batch).entropy()
    entropy.sum().backward()
    assert bool(torch.isfinite(entropy).all())
    assert entropy[1].item() > 0
    assert blocked.grad is not None
    assert bool(torch.isfinite(blocked.grad).all())


def test_half_precision_is_read_in_float32() -> None:
    logits, batch = setup()
    reader = DenseReader(logits.detach().bfloat16(), batch)
    assert reader.log_prob().dtype == torch.float32
    total = reader.topk(V)[0][1].exp().sum()
    assert float(total) == pytest.approx(1.0, abs=1e-6)
