"""Group advantages, the clipped loss and the KL estimators against plain, slow definitions."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlctl.algorithms.advantages.grpo import grpo_advantages
from rlctl.algorithms.kl import kl_estimate
from rlctl.algorithms.policy_losses.vanilla import vanilla_policy_loss

scores = st.lists(st.floats(-5, 5), min_size=1, max_size=6)


@given(st.lists(scores, min_size=1, max_size=5), st.booleans(), st.randoms())
def test_group_advantages_equal_the_definition_in_any_row_order(groups, by_std, rng):
    rows = [(g, s) for g, group in enumerate(groups) for s in group]
    rng.shuffle(rows)
    got = grpo_advantages(
        torch.tensor([s for _, s in rows]), torch.tensor([g for g, _ in rows]), norm_by_std=by_std
    ).tolist()
    for (g, s), value in zip(rows, got, strict=True):
        group = torch.tensor(groups[g]).tolist()
        single = torch.tensor(s).item()
        want = 0.0
        if len(group) > 1 and max(group) != min(group):
            want = single - statistics.fmean(group)
            want /= (statistics.stdev(group) + 1e-6) if by_std else 1.0
        assert value == pytest.approx(want, rel=1e-4, abs=1e-5)


def test_equal_scores_have_exactly_no_advantage_even_when_their_mean_rounds():
    # 0.1 is no binary fraction: the mean of many copies need not equal it.
    value = grpo_advantages(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.long))
    assert value.tolist() == [0.0] * 7


def slow_vanilla(lp, old, adv, low, high, c):
    ratio = math.exp(lp - old)
    loss = max(-adv * ratio, -adv * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -adv * c) if adv < 0 else loss


@given(
    st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.floats(-3, 3)), min_size=1, max_size=20),
    st.floats(0.05, 0.4),
    st.floats(0.05, 0.4),
    st.floats(1.5, 5),
)
def test_clipped_loss_equals_the_scalar_definition(rows, low, high, c):
    lp, old, adv = (torch.tensor(x, dtype=torch.float64) for x in zip(*rows, strict=True))
    out = vanilla_policy_loss(lp, old, adv, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c)
    for i, row in enumerate(rows):
        assert out.loss[i].item() == pytest.approx(slow_vanilla(*row, low, high, c), rel=1e-9, abs=1e-12)


def test_gradient_is_zero_where_a_bound_holds_and_the_score_function_where_ratio_is_one():
    old = torch.tensor([-1.0, -1.0, -1.0, -3.0])
    lp = torch.tensor([-1.0, -0.5, -1.6, -0.1], requires_grad=True)
    adv = torch.tensor([2.0, 2.0, -2.0, -2.0])
    out = vanilla_policy_loss(lp, old, adv)
    out.loss.sum().backward()
    assert lp.grad is not None
    # On policy: -A. Ratio over 1 + high with A > 0, and under 1 - low with A < 0: clipped. Far over with A < 0: dual clip.
    assert lp.grad.tolist() == pytest.approx([-2.0, 0.0, 0.0, 0.0])
    assert out.clipped.tolist() == [False, True, True, False]
    assert out.dual_clipped.tolist() == [False, False, False, True]


def test_one_broken_token_makes_no_infinity():
    out = vanilla_policy_loss(torch.tensor([0.0]), torch.tensor([-2000.0]), torch.tensor([1.0]))
    assert math.isfinite(out.loss.item())
    assert math.isfinite(kl_estimate(torch.tensor([-2000.0]), torch.tensor([0.0]), "k3").item())


@pytest.mark.parametrize(("name", "alias"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_kl_aliases_are_the_same_numbers(name, alias):
    a, b = torch.tensor([-1.0, -0.2, -3.0]), torch.tensor([-1.5, -0.1, -2.0])
    assert torch.equal(kl_estimate(a, b, name), kl_estimate(a, b, alias))


def test_k1_and_k3_are_unbiased_and_k2s_gradient_is_the_kl_gradient():
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(torch.randn(5, dtype=torch.float64), 0)
    p = torch.log_softmax(logits, 0)
    probs = p.exp().detach()
    true_kl = (p.exp() * (p - q)).sum()
    (true_gradient,) = torch.autograd.grad(true_kl, logits, retain_graph=True)
    # Expectations over samples of p, taken exactly.
    for kind in ("k1", "k3"):
        assert (probs * kl_estimate(p, q, kind)).sum().item() == pytest.approx(true_kl.item(), abs=1e-12)
    (gradient,) = torch.autograd.grad((probs * kl_estimate(p, q, "k2")).sum(), logits, retain_graph=True)
    assert torch.allclose(gradient, true_gradient, atol=1e-12)
    (useless,) = torch.autograd.grad((probs * kl_estimate(p, q, "k1")).sum(), logits)
    assert useless.abs().max() < 1e-12  # why k1 as a loss regularises nothing


def test_unknown_kl_names_the_known_ones():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k9")
