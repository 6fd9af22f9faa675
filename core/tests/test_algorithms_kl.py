"""The KL estimators and the KL over the vocabulary against the references, values and gradients."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from algorithm_cases import flat, packed
from hypothesis import given
from hypothesis import strategies as st
from oracle import aggregation
from oracle import kl as reference
from oracle.basics import gradients, leaves
from oracle.cases import cases

from rlctl.algorithms.kl import ALIASES, ESTIMATORS, FULL, full_kl, kl_estimate
from rlctl.algorithms.losses import PolicyLoss
from rlctl.batch import PackedBatch
from rlctl.config.schema import ActorConfig
from rlctl.config.schema_roles import KlType
from rlctl.normalizer import item_weights
from rlctl.normalizer_modes import LossAggMode
from rlctl.readers import DenseReader

CASES = cases(60)
KINDS = [name + plus for name in ESTIMATORS for plus in ("", "+")]


def test_the_configuration_takes_what_there_is() -> None:
    names = [*ESTIMATORS, *ALIASES]
    assert set(get_args(KlType)) == {*names, *(f"{name}+" for name in names), FULL}


@pytest.mark.parametrize("kind", KINDS)
def test_an_estimator_equals_its_definition(kind: str) -> None:
    for one in CASES:
        log_probs = leaves(one.log_probs)
        terms = reference.per_token(log_probs, one.ref_log_probs, one.masks, kind)
        total = aggregation.aggregate(terms, one.masks, "token-sum")
        want, want_gradient = (
            flat([[float(t.detach()) for t in row] for row in terms]),
            flat(gradients(total, log_probs)),
        )
        mask = packed(one).items["loss_mask"]
        scale = max(1.0, float(want.abs().max()), float(want_gradient.abs().max()))
        for dtype, within in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
            leaf = flat(one.log_probs, dtype).requires_grad_()
            found = torch.where(mask, kl_estimate(leaf, flat(one.ref_log_probs, dtype), kind), 0.0)
            torch.testing.assert_close(found.double(), want, rtol=0, atol=within * scale)
            (gradient,) = torch.autograd.grad(found.sum(), leaf)
            torch.testing.assert_close(gradient.double(), want_gradient, rtol=0, atol=within * scale)


@given(d=st.floats(-1e-3, 1e-3))
def test_k3_keeps_its_digits_near_zero(d: float) -> None:
    """exp(-d) - 1 + d is about d^2 / 2, far below the rounding of exp(-d) in float32."""
    found = kl_estimate(torch.tensor([d]), torch.zeros(1), "k3").item()
    exact = torch.tensor(d, dtype=torch.float32).double()
    assert found == pytest.approx(float((-exact).expm1() + exact), abs=1.5e-10)
    assert found >= -1e-10


def whole(one_logits: list[list[list[float]]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([token for row in one_logits for token in row], dtype=dtype)


@pytest.mark.parametrize("mode", [str(m) for m in LossAggMode])
def test_the_full_kl_in_the_loss_equals_the_sum_over_the_vocabulary(mode: str) -> None:
    """Through the reader: value and gradient by the logits."""
    for one in CASES[:12]:
        logits = [[leaves([token])[0] for token in row] for row in one.logits]
        terms = reference.full_per_token(logits, one.ref_logits, one.masks)
        total = aggregation.aggregate(terms, one.masks, mode, norm=5)
        flat_leaves = [[leaf for token in row for leaf in token] for row in logits]
        want = flat(gradients(0.7 * total, flat_leaves)).view(-1, 5)
        batch = packed(one, torch.float32)
        batch = batch.with_items(
            item_weight=item_weights(batch, mode, norm_length=5),
            input_ids=torch.zeros(batch.num_items, dtype=torch.long),
            ref_log_probs_all=whole(one.ref_logits, torch.float32).log_softmax(-1),
            advantages=torch.zeros(batch.num_items),
        )
        leaf = whole(one.logits, torch.float32).requires_grad_()
        config = ActorConfig(use_kl_loss=True, kl_loss_type="full", kl_loss_coef=0.7)
        out = PolicyLoss(config)(_reader(leaf, batch), batch)
        assert float(out.sums["actor/kl_loss"]) == pytest.approx(float(total.detach()), rel=1e-5, abs=1e-6)
        (gradient,) = torch.autograd.grad(out.loss, leaf)
        torch.testing.assert_close(gradient.double(), want, rtol=0, atol=2e-6 * max(1.0, float(want.abs().max())))


def _reader(logits: torch.Tensor, batch: PackedBatch) -> DenseReader:
    """The references' logits are those that predict the token; a reader takes those of the token before."""
    return DenseReader(torch.cat([logits[1:], logits[:1]]), batch)


def test_a_token_that_the_policy_rules_out_counts_nothing() -> None:
    ours = torch.tensor([[0.0, -torch.inf], [-0.5, -0.9]], requires_grad=True)
    theirs = torch.tensor([[-0.5, -0.9], [-0.2, -1.7]])
    found = full_kl(ours, theirs)
    assert found[0].item() == pytest.approx(0.5)
    (gradient,) = torch.autograd.grad(found.sum(), ours)
    assert bool(gradient.isfinite().all())
