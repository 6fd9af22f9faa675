"""Every policy loss under every aggregation against the references, values and gradients, through the loss that engines call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import flat, packed
from hypothesis import given
from hypothesis import strategies as st
from oracle import aggregation, covariance_losses, policy_losses, sequence_losses
from oracle.basics import gradients, leaves
from oracle.cases import Case, case, cases

from rlctl.algorithms.calling import choose_tokens
from rlctl.algorithms.lookup import Algorithm, builtin
from rlctl.algorithms.losses import PolicyLoss
from rlctl.algorithms.policy_losses.covariance import covariances
from rlctl.algorithms.policy_losses.dppo_kl import binary_kl
from rlctl.algorithms.policy_losses.gspo import gspo_policy_loss
from rlctl.algorithms.table import POLICY_LOSSES
from rlctl.batch import PackedBatch
from rlctl.config.schema import ActorConfig
from rlctl.config.schema_algorithm import PolicyLossConfig
from rlctl.logits import LossOutput
from rlctl.normalizer import item_weights
from rlctl.normalizer_modes import LossAggMode
from rlctl.records import AlgorithmKind, AlgorithmSpec

CASES = cases(80)
NORM = 5
MODES = [str(mode) for mode in LossAggMode]
BOUND: dict[str, Any] = {"log_ratio_bound": 20.0}
Terms = list[list[torch.Tensor]]

# A share so large that every case has several tokens to choose.
COV: dict[str, Any] = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 4.0}


def candidates(one: Case) -> set[tuple[int, int]]:
    return covariance_losses.clip_cov_candidates(
        one.old_log_probs, one.old_log_probs, one.advantages, one.masks, cov_low=0.05, cov_high=4.0
    )


def chosen(one: Case) -> set[tuple[int, int]]:
    return covariance_losses.kl_cov_chosen(one.old_log_probs, one.advantages, one.masks, 0.2)


Wanted = Callable[[Case, Terms], Terms]
REFERENCES: dict[str, tuple[dict[str, Any], Wanted]] = {
    "vanilla": ({}, lambda c, lp: policy_losses.vanilla(lp, c.old_log_probs, c.advantages, c.masks, **BOUND)),
    "vanilla with bounds": (
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5},
        lambda c, lp: policy_losses.vanilla(
            lp, c.old_log_probs, c.advantages, c.masks, clip_low=0.1, clip_high=0.3, dual_clip=1.5, **BOUND
        ),
    ),
    "gspo": ({}, lambda c, lp: sequence_losses.gspo(lp, c.old_log_probs, c.advantages, c.masks)),
    "gspo with bounds": (
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
        lambda c, lp: sequence_losses.gspo(lp, c.old_log_probs, c.advantages, c.masks, clip_low=0.2, clip_high=0.3),
    ),
    "cispo": (
        {},
        lambda c, lp: policy_losses.cispo(
            lp, c.old_log_probs, c.advantages, c.masks, clip_low=1.0, clip_high=0.2, **BOUND
        ),
    ),
    "cispo with bounds": (
        {"clip_ratio_low": 0.1, "clip_ratio_high": 2.0},
        lambda c, lp: policy_losses.cispo(
            lp, c.old_log_probs, c.advantages, c.masks, clip_low=0.1, clip_high=2.0, **BOUND
        ),
    ),
    "sapo": ({}, lambda c, lp: policy_losses.sapo(lp, c.old_log_probs, c.advantages, c.masks, **BOUND)),
    "sapo with taus": (
        {"tau_pos": 0.5, "tau_neg": 3.0},
        lambda c, lp: policy_losses.sapo(lp, c.old_log_probs, c.advantages, c.masks, tau_pos=0.5, tau_neg=3.0, **BOUND),
    ),
    "gpg": ({}, lambda c, lp: policy_losses.gpg(lp, c.advantages, c.masks)),
    "clip_cov": (
        COV,
        lambda c, lp: covariance_losses.clip_cov(lp, c.old_log_probs, c.advantages, c.masks, candidates(c), **BOUND),
    ),
    "kl_cov": (
        {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
        lambda c, lp: covariance_losses.kl_cov(
            lp, c.old_log_probs, c.advantages, c.masks, share=0.2, kl_coef=0.7, chosen=chosen(c), **BOUND
        ),
    ),
    "geo_mean": ({}, lambda c, lp: sequence_losses.geo_mean(lp, c.old_log_probs, c.advantages, c.masks)),
    "geo_mean with bounds": (
        {"clip_ratio_low": 0.05, "clip_ratio_high": 1.0},
        lambda c, lp: sequence_losses.geo_mean(
            lp, c.old_log_probs, c.advantages, c.masks, clip_low=0.05, clip_high=1.0
        ),
    ),
    "dppo_tv": (
        {},
        lambda c, lp: policy_losses.dppo_tv(
            lp, c.old_log_probs, c.advantages, c.masks, threshold_low=0.15, threshold_high=0.15, **BOUND
        ),
    ),
    "dppo_tv with bounds": (
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.4, "clip_ratio_c": 2.0},
        lambda c, lp: policy_losses.dppo_tv(
            lp, c.old_log_probs, c.advantages, c.masks, threshold_low=0.02, threshold_high=0.4, ratio_cap=2.0, **BOUND
        ),
    ),
    "dppo_kl": (
        {},
        lambda c, lp: policy_losses.dppo_kl(
            lp, c.old_log_probs, c.advantages, c.masks, threshold_low=0.05, threshold_high=0.05, **BOUND
        ),
    ),
}


class Reader:
    """The reader of a policy whose log-probs are the leaves themselves."""

    def __init__(self, log_probs: torch.Tensor, mask: torch.Tensor) -> None:
        self._log_probs = torch.where(mask, log_probs, 0.0)

    def log_prob_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._log_probs, torch.zeros_like(self._log_probs)


def ready(one: Case, loss_mode: str, mode: str, dtype: torch.dtype, **settings: Any) -> tuple[PolicyLoss, PackedBatch]:
    """The loss, and the batch as the controller hands it out: weighted, and with the tokens that the loss chooses."""
    section = PolicyLossConfig(loss_mode=loss_mode, **settings)
    batch = packed(one, dtype)
    batch = batch.with_items(item_weight=item_weights(batch, mode, norm_length=NORM))
    chooser = builtin(AlgorithmKind.POLICY_LOSS, loss_mode).chooser
    if chooser is not None:
        batch = choose_tokens(chooser, section, batch, torch.Generator().manual_seed(one.seed))
    return PolicyLoss(ActorConfig(policy_loss=section)), batch


def run(loss: PolicyLoss, batch: PackedBatch, log_probs: torch.Tensor) -> tuple[LossOutput, torch.Tensor]:
    """What the loss says, and its gradient ``[N]``."""
    leaf = log_probs.clone().requires_grad_()
    out = loss(Reader(leaf, batch.items["loss_mask"]), batch)  # type: ignore[arg-type]  # all that it asks for
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    return replace(out, loss=out.loss.detach()), gradient


def test_every_loss_is_compared() -> None:
    assert {name.partition(" ")[0] for name in REFERENCES} == set(POLICY_LOSSES)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", REFERENCES)
def test_a_loss_equals_its_paper(variant: str, mode: str) -> None:
    """In float64 to 1e-6 of the largest term (the weights are float32), in float32 to its rounding."""
    settings, wanted = REFERENCES[variant]
    # Each aggregation sees a part of the cases, and all five of them all.
    for one in CASES[MODES.index(mode) :: len(MODES)]:
        log_probs = leaves(one.log_probs)
        total = aggregation.aggregate(wanted(one, log_probs), one.masks, mode, norm=NORM)
        value = float(total.detach())
        want = flat(gradients(total, log_probs))
        scale = max(1.0, abs(value), float(want.abs().max()))
        for dtype, within in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
            loss, batch = ready(one, variant.partition(" ")[0], mode, dtype, **settings)
            out, gradient = run(loss, batch, flat(one.log_probs, dtype))
            assert float(out.loss) == pytest.approx(value, abs=within * scale), one.seed
            torch.testing.assert_close(
                gradient.double(), want, rtol=0, atol=within * scale, msg=f"{variant} {one.seed}"
            )


@pytest.mark.parametrize("variant", REFERENCES)
def test_micro_batches_change_nothing(variant: str) -> None:
    """The sum over any cut of the rows is the whole: rows are whole, and what needs all tokens was chosen before."""
    settings, _ = REFERENCES[variant]
    for one in CASES[:25]:
        loss, batch = ready(one, variant.partition(" ")[0], "seq-mean-token-mean", torch.float64, **settings)
        log_probs = flat(one.log_probs)
        whole, gradient = run(loss, batch, log_probs)
        rows = list(range(batch.num_rows))
        total, parts = 0.0, []
        for part in ([r for r in rows if r % 2], [r for r in rows if r % 2 == 0]):
            if part:
                index = torch.cat([torch.arange(batch.num_items)[batch.row_ids() == r] for r in part])
                out, found = run(loss, batch.select(part), log_probs[index])
                total += float(out.loss)
                parts.append((index, found))
        assert total == pytest.approx(float(whole.loss), rel=1e-9, abs=1e-9)
        together = torch.cat([found for _, found in parts])[torch.cat([index for index, _ in parts]).argsort()]
        torch.testing.assert_close(together, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_what_stands_under_the_mask_is_nobodys(name: str) -> None:
    for one in CASES[:15]:
        loss, batch = ready(one, name, "token-mean", torch.float32, **REFERENCES[name][0])
        out, gradient = run(loss, batch, flat(one.log_probs, torch.float32))
        wild = ~batch.items["loss_mask"]
        fields = {
            k: torch.where(wild, math.nan, v) for k, v in batch.items.items() if k in ("advantages", "old_log_probs")
        }
        again, same = run(loss, batch.with_items(**fields), flat(one.log_probs, torch.float32))
        assert float(again.loss) == float(out.loss)
        assert torch.equal(same, gradient)
        assert {k: float(v) for k, v in again.sums.items()} == {k: float(v) for k, v in out.sums.items()}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_vanishes_with_the_advantage_where_its_record_says_so(name: str) -> None:
    """The rows that ``actor.skip_zero_advantage`` leaves out are those that this holds of."""
    found = []
    for one in CASES[:25]:
        loss, batch = ready(one, name, "token-sum", torch.float64, **REFERENCES[name][0])
        if name == "kl_cov":
            batch = batch.with_items(cov_chosen=batch.items["loss_mask"])
        batch = batch.with_items(advantages=torch.zeros(batch.num_items, dtype=torch.float64))
        out, gradient = run(loss, batch, flat(one.log_probs))
        found.append(not gradient.any() and float(out.loss) == 0.0)
    assert all(found) == POLICY_LOSSES[name].vanishes
    assert POLICY_LOSSES[name].vanishes or not any(found)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_extremes_are_finite(name: str) -> None:
    """A token of a billionth of its old probability, and one of a billion times it; certain tokens."""
    one = case(1)
    loss, batch = ready(one, name, "token-mean", torch.float32)
    for now, old in ((-2000.0, 0.0), (0.0, -2000.0), (0.0, 0.0), (-1e-9, -1e-9)):
        batch = batch.with_items(old_log_probs=torch.full((batch.num_items,), old))
        out, gradient = run(loss, batch, torch.full((batch.num_items,), now))
        assert math.isfinite(float(out.loss)), (now, old)
        assert bool(gradient.isfinite().all()), (now, old)


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"clip_cov"}))
def test_on_policy_every_loss_has_the_gradient_of_the_policy(name: str) -> None:
    """At the policy that sampled, and with one advantage a row, d loss = -A d log p: no bound is active there."""
    for one in CASES[:25]:
        flattened = replace(one, advantages=[[row[0] if row else 0.0] * len(row) for row in one.advantages])
        loss, batch = ready(flattened, name, "seq-mean-token-mean", torch.float64)
        out, gradient = run(loss, batch, batch.items["old_log_probs"])
        want = -batch.items["advantages"] * batch.items["item_weight"]
        torch.testing.assert_close(gradient, want.double(), rtol=1e-6, atol=1e-9)
        assert float(out.sums["actor/pg_clipfrac"]) == 0.0


def test_the_choice_of_clip_cov_is_random_among_the_candidates() -> None:
    seen = 0
    for one in CASES:
        loss, batch = ready(one, "clip_cov", "token-mean", torch.float64, **{**COV, "clip_cov_ratio": 0.2})
        places = {(r, t) for r, mask in enumerate(one.masks) for t in range(len(mask))}
        at = dict(zip(sorted(places), batch.items["cov_chosen"].tolist(), strict=True))
        picked = {place for place, is_chosen in at.items() if is_chosen}
        allowed = candidates(one)
        assert picked <= allowed
        assert len(picked) == min(len(allowed), covariance_losses.clip_cov_number(one.masks, 0.2)), one.seed
        seen += 0 < len(picked) < len(allowed)
        again = ready(one, "clip_cov", "token-mean", torch.float64, **{**COV, "clip_cov_ratio": 0.2})[1]
        assert torch.equal(again.items["cov_chosen"], batch.items["cov_chosen"]), "a seed is a choice"
        out, _ = run(loss, batch, batch.items["old_log_probs"])
        count = float(batch.items["loss_mask"].sum())
        assert float(out.sums["actor/pg_clipfrac"]) == pytest.approx(len(picked) / count, abs=1e-6)
    assert seen > 20


def test_the_mask_bounds_the_choice_where_nothing_is_trained() -> None:
    one = replace(case(1), masks=[[False] * n for n in case(1).lengths])
    for name in ("clip_cov", "kl_cov"):
        assert not ready(one, name, "token-mean", torch.float64)[1].items["cov_chosen"].any()
    assert covariances(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool)).shape == (0,)


def test_gspo_keeps_its_digits_beside_large_log_probs() -> None:
    """Its bounds are 3e-4, and float32 numbers near -20 are 2e-6 apart: only differences may be added up."""
    mask, row_ids = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.long)
    old = torch.tensor([-20.0, -20.0, -20.0, -20.0])
    new = (old + torch.tensor([4e-4, 0.0, 0.0, 0.0])).requires_grad_()
    moved = float((new.detach() - old).double().mean())
    out = gspo_policy_loss(new, old, torch.ones(4), mask, row_ids, 1)
    assert (-out.loss.double() - math.exp(moved)).abs().max().item() < 2e-7
    assert out.clipped is not None
    assert not out.clipped.any()


@given(old=st.floats(-12, -1e-3), new=st.floats(-12, -1e-3))
def test_the_kl_of_two_outcomes_is_right_near_certainty(old: float, new: float) -> None:
    p, q = math.exp(old), math.exp(new)
    want = p * (old - new) + -math.expm1(old) * (math.log(-math.expm1(old)) - math.log(-math.expm1(new)))
    found = binary_kl(torch.tensor([old]), torch.tensor([new])).item()
    assert found == pytest.approx(want, rel=1e-4, abs=1e-6), (p, q)


@pytest.mark.parametrize(
    ("name", "share"),
    [("vanilla", 0.5), ("gspo", 1.0), ("cispo", 0.5), ("sapo", 0.0), ("gpg", 0.0), ("geo_mean", 0.5), ("dppo_tv", 0.5)],
)
def test_what_the_clip_share_counts(name: str, share: float) -> None:
    """Two tokens of one row with A = 1: one where it was, one of ten times its probability."""
    one = replace(
        case(1), masks=[[True, True]], advantages=[[1.0, 1.0]], groups=[0],
        old_log_probs=[[-1.0, -3.0]], ref_log_probs=[[0.0, 0.0]], rollout_log_probs=[[0.0, 0.0]], token_rewards=[[0.0, 0.0]],
    )  # fmt: skip
    loss, batch = ready(one, name, "token-mean", torch.float64)
    out, gradient = run(loss, batch, torch.tensor([-1.0, -3.0 + math.log(10.0)], dtype=torch.float64))
    assert float(out.sums["actor/pg_clipfrac"]) == pytest.approx(share)
    # Whose gradient is gone: CISPO bounds a weight and keeps it.
    gone = {"vanilla": [False, True], "gspo": [True, True], "geo_mean": [False, True], "dppo_tv": [False, True]}
    assert (gradient == 0).tolist() == gone.get(name, [False, False])


def test_a_loss_of_ones_own_need_not_think_of_the_mask() -> None:
    """Old log-probs and advantages that are no numbers where nothing is trained reach no gradient."""
    algorithm = Algorithm(AlgorithmSpec("own", AlgorithmKind.POLICY_LOSS, "algorithm_cases:unguarded_loss"), "")
    for one in CASES[:15]:
        loss, batch = ready(one, "vanilla", "token-mean", torch.float64)
        loss = replace(loss, algorithm=algorithm)
        out, gradient = run(loss, batch, flat(one.log_probs))
        wild = ~batch.items["loss_mask"]
        fields = {k: torch.where(wild, math.nan, batch.items[k]) for k in ("advantages", "old_log_probs")}
        again, same = run(loss, batch.with_items(**fields), flat(one.log_probs))
        assert float(again.loss) == float(out.loss)
        assert torch.equal(same, gradient)
