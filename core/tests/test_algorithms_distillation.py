"""Divergences of distillation against whole-vocabulary definitions in float64, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from rlctl.algorithms.distillation import (
    SAMPLED_MODES,
    TAIL_FLOOR,
    TOPK_MODES,
    k1_reward,
    overlap_ratio,
    sampled_divergence,
    topk_divergence,
)

N, V = 24, 50


def logits(seed: int, scale: float = 1.5) -> torch.Tensor:
    return torch.randn(N, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def whole(kind: str, student: torch.Tensor, teacher: torch.Tensor, beta: float = 0.5) -> torch.Tensor:
    """The definition over all outcomes of two tables of logits or log-probs, ``[N]``."""
    p, q = student.softmax(-1), teacher.softmax(-1)

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a.log() - b.log())).sum(-1)

    m = beta * q + (1 - beta) * p
    return {
        "forward_kl_topk": kl(q, p),
        "reverse_kl_topk": kl(p, q),
        "jsd_topk": beta * kl(q, m) + (1 - beta) * kl(p, m),
    }[kind]


def support(kind: str, student: torch.Tensor, teacher: torch.Tensor, k: int) -> torch.Tensor:
    return (student if kind == "reverse_kl_topk" else teacher).topk(k).indices


def by_gradient(loss: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    [grad] = torch.autograd.grad(loss.sum(), table, retain_graph=True)
    return grad


@pytest.mark.parametrize("kind", TOPK_MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_of_the_vocabulary_is_the_whole_divergence(kind: str, dtype: torch.dtype) -> None:
    exact, teacher = logits(1).requires_grad_(), logits(2)
    want = whole(kind, exact, teacher, 0.3)
    mine = exact.detach().to(dtype).requires_grad_()
    ids = support(kind, exact, teacher, V)
    log_q = teacher.to(dtype).log_softmax(-1).gather(-1, ids)
    found = topk_divergence(mine.log_softmax(-1).gather(-1, ids), log_q, kind, beta=0.3)
    assert (found.loss.double() - want).abs().max() < 1e-6
    assert (by_gradient(found.loss, mine).double() - by_gradient(want, exact)).abs().max() < 1e-6
    assert (found.student_mass - 1).abs().max() < 1e-6
    assert (found.teacher_mass - 1).abs().max() < 1e-6
    assert want.min() > 0.05


@pytest.mark.parametrize("kind", TOPK_MODES)
@pytest.mark.parametrize("k", [1, 4, 20])
def test_fewer_tokens_and_the_tail_as_one_outcome(kind: str, k: int) -> None:
    exact, teacher = logits(3).requires_grad_(), logits(4)
    ids = support(kind, exact, teacher, k)
    merged = []
    for table in (exact, teacher):
        log_p = table.log_softmax(-1)
        rest = torch.ones(N, V, dtype=torch.bool).scatter(1, ids, False)
        tail = torch.where(rest, log_p, -math.inf).logsumexp(-1, keepdim=True)
        merged.append(torch.cat([log_p.gather(-1, ids), tail], -1))
    want = whole(kind, *merged)
    mine = exact.detach().float().requires_grad_()
    found = topk_divergence(mine.log_softmax(-1).gather(-1, ids), teacher.float().log_softmax(-1).gather(-1, ids), kind)
    # float32 here: 1 - mass has an absolute error of 1e-7, which the logarithm of a small tail magnifies.
    smallest = min(m[:, -1].exp().min().item() for m in merged)
    assert smallest > 3 * TAIL_FLOOR
    assert (found.loss.double() - want).abs().max() < 1e-5
    assert (by_gradient(found.loss, mine).double() - by_gradient(want, exact)).abs().max() < 1e-4
    double = topk_divergence(exact.log_softmax(-1).gather(-1, ids), teacher.log_softmax(-1).gather(-1, ids), kind)
    assert (double.loss - want).abs().max() < 1e-9
    assert (by_gradient(double.loss, exact) - by_gradient(want, exact)).abs().max() < 1e-9
    # Merging outcomes never raises a divergence.
    assert (found.loss <= whole(kind, exact, teacher) + 1e-5).all()


@pytest.mark.parametrize("kind", TOPK_MODES)
def test_a_teacher_that_is_the_student_gives_exactly_nothing(kind: str) -> None:
    table = logits(5).float().requires_grad_()
    for k in (1, 8, V):
        log_p = table.log_softmax(-1)
        picked = log_p.gather(-1, log_p.topk(k).indices)
        loss = topk_divergence(picked, picked.detach(), kind).loss
        assert loss.abs().max() < (1e-7 if kind == "jsd_topk" else 1e-12)
        assert by_gradient(loss, table).abs().max() < 1e-6


def test_a_student_that_lost_the_tail_is_led_back_to_it() -> None:
    """Its tail is below the floor, the teacher's is not: tokens of the tail must be pushed up, not down."""
    student = torch.tensor([[0.0, 0.0, -17.0, -17.0]]).requires_grad_()
    teacher = torch.tensor([[0.4, 0.4, 0.1, 0.1]]).log()
    log_p = student.log_softmax(-1)
    assert 0 < log_p[0, 2:].exp().sum() < TAIL_FLOOR
    loss = topk_divergence(log_p[:, :2], teacher[:, :2], "forward_kl_topk").loss
    assert loss.item() == pytest.approx(0.2 * math.log(0.2 / TAIL_FLOOR) + 0.8 * math.log(0.8), rel=1e-4)
    assert (by_gradient(loss, student)[0, 2:] < 0).all()


@pytest.mark.parametrize("kind", TOPK_MODES)
def test_impossible_tokens_give_no_nan(kind: str) -> None:
    student = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]).log().requires_grad_()
    teacher = torch.tensor([[0.7, 0.3, 0.0], [0.7, 0.3, 0.0]]).log()
    loss = topk_divergence(student, teacher, kind, log_prob_min=-30.0).loss
    assert torch.isfinite(loss).all()
    assert torch.isfinite(by_gradient(loss, student)).all()
    both = torch.tensor([[0.0, -math.inf]]).requires_grad_()
    loss = topk_divergence(both, torch.tensor([[0.0, -math.inf]]), kind).loss
    assert loss.abs().item() < 1e-6
    assert torch.isfinite(by_gradient(loss, both)).all()


def test_the_floor_bounds_the_ratio_and_not_the_weight() -> None:
    student = torch.tensor([[0.0, -60.0]]).requires_grad_()
    teacher = torch.tensor([[0.5, 0.5]]).log()
    free = topk_divergence(student, teacher, "forward_kl_topk").loss
    assert free.item() == pytest.approx(math.log(0.5) + 30.0, rel=1e-5)
    kept = topk_divergence(student, teacher, "forward_kl_topk", log_prob_min=-10.0)
    assert kept.loss.item() == pytest.approx(math.log(0.5) + 5.0, abs=1e-4)
    assert by_gradient(kept.loss, student)[0, 1] == 0
    impossible = topk_divergence(teacher.clone(), torch.tensor([[0.0, -60.0]]), "reverse_kl_topk", log_prob_min=-10.0)
    assert impossible.loss.item() == pytest.approx(math.log(0.5) + 5.0, abs=1e-4)
    assert impossible.teacher_mass.item() == pytest.approx(1.0)


@pytest.mark.parametrize("kind", TOPK_MODES)
def test_a_bound_on_a_tokens_loss_stops_its_gradient(kind: str) -> None:
    table, teacher = logits(6).float().requires_grad_(), logits(7).float()
    ids = support(kind, table, teacher, 8)
    args = (table.log_softmax(-1).gather(-1, ids), teacher.log_softmax(-1).gather(-1, ids), kind)
    free = topk_divergence(*args).loss
    bound = free.median().item()
    loss = topk_divergence(*args, loss_max=bound).loss
    assert torch.equal(loss, free.clamp(max=bound))
    grad = by_gradient(loss, table)
    over = free > bound
    assert over.any()
    assert (grad[over] == 0).all()
    assert (grad[~over] != 0).any(-1).all()


def test_sampled_divergences_equal_their_definitions() -> None:
    d = torch.tensor([-3.0, -0.5, 0.0, 0.7, 4.0], dtype=torch.float64)
    teacher = torch.full_like(d, -2.0)
    for kind, want in {"k2": d * d / 2, "k3": (-d).exp() - 1 + d, "abs": d.abs()}.items():
        assert torch.allclose(sampled_divergence(teacher + d, teacher, kind), want, atol=1e-12), kind
        assert torch.allclose(sampled_divergence(teacher + d, teacher, kind, loss_max=0.6), want.clamp(max=0.6)), kind
    for kind in ("k1", "k4"):
        with pytest.raises(ValueError, match=r"k1_reward|unknown"):
            sampled_divergence(d, d, kind)
    with pytest.raises(ValueError, match="unknown"):
        topk_divergence(d[:, None], d[:, None], "reverse_kl")


def in_expectation(per_token: torch.Tensor, weights: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Gradient that samples give on average: the weights of the samples have none."""
    return by_gradient((weights.detach() * per_token).sum(-1), table)


def test_what_the_gradients_of_samples_are_on_average() -> None:
    """Over all tokens with the student's probabilities: the docstrings' claims, exactly."""
    table, teacher = logits(8, 1.0).requires_grad_(), logits(9, 1.0)
    log_p, log_q = table.log_softmax(-1), teacher.log_softmax(-1)
    forward = by_gradient(whole("forward_kl_topk", table, teacher), table)
    reverse = by_gradient(whole("reverse_kl_topk", table, teacher), table)
    p = log_p.exp()
    assert torch.allclose(in_expectation(sampled_divergence(log_p, log_q, "k2"), p, table), reverse, atol=1e-12)
    assert torch.allclose(in_expectation(sampled_divergence(log_p, log_q, "k3"), p, table), forward, atol=1e-12)
    reward = k1_reward(log_p, log_q)
    assert not reward.requires_grad
    assert torch.allclose(in_expectation(-reward * log_p, p, table), reverse, atol=1e-12)
    assert torch.allclose((p * -reward).sum(-1), whole("reverse_kl_topk", table, teacher), atol=1e-12)
    # k1 as a loss: nothing of the teacher is in its gradient, and on average there is none.
    assert in_expectation(log_p - log_q, p, table).abs().max() < 1e-12
    assert not torch.allclose(forward, reverse, atol=1e-2)


def test_a_reward_is_bounded_on_both_sides() -> None:
    reward = k1_reward(torch.tensor([-1.0, -9.0, -1.0]), torch.tensor([-9.0, -1.0, -1.5]), clip=2.0)
    assert reward.tolist() == [-2.0, 2.0, -0.5]


def test_overlap_is_the_share_of_the_teachers_tokens() -> None:
    student = torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6]])
    teacher = torch.tensor([[4, 9, 2, 0], [1, 2, 3, 4]])
    assert overlap_ratio(student, teacher).tolist() == [0.5, 0.0]


@pytest.mark.parametrize("kind", [*SAMPLED_MODES, *TOPK_MODES])
def test_no_divergence_is_negative(kind: str) -> None:
    student, teacher = logits(10, 6.0).float().log_softmax(-1), logits(11, 6.0).float().log_softmax(-1)
    if kind in SAMPLED_MODES:
        assert (sampled_divergence(student, teacher, kind) >= 0).all()
    else:
        ids = support(kind, student, teacher, 5)
        assert (topk_divergence(student.gather(-1, ids), teacher.gather(-1, ids), kind).loss > -2e-5).all()
