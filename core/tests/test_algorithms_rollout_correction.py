"""Rollout correction against the float64 reference: weights, rejections, and the loss and gradient that they make."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_cases import flat, packed
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import aggregation, policy_losses, rollout_correction
from oracle.basics import gradients, leaves
from oracle.cases import Case, case, cases
from pydantic import ValidationError

from rlctl.algorithms.distillation_loss import TEACHER_TEMPERATURE, DistillationLoss
from rlctl.algorithms.losses import IS_WEIGHTS, PolicyLoss
from rlctl.algorithms.rollout_correction import (
    LEVELS,
    LogRatios,
    catastrophic_tokens,
    divergences,
    effective_sample_size,
    importance_weights,
    kept_tokens,
    log_ratios,
    rows_of,
)
from rlctl.batch import PackedBatch
from rlctl.config.schema import ActorConfig, RunConfig
from rlctl.config.schema_correction import RolloutCorrectionConfig
from rlctl.config.schema_distillation import DistillationConfig
from rlctl.config.yaml_source import parse_value
from rlctl.normalizer import item_weights
from rlctl.trainers.rollout_correction import CorrectionStage

CASES = cases(80)
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


def ratios(one: Case, dtype: torch.dtype = torch.float32) -> LogRatios:
    batch = packed(one, dtype)
    old, rollout = batch.items["old_log_probs"], batch.items["rollout_log_probs"]
    return log_ratios(old, rollout, batch.items["loss_mask"], batch.row_ids(), batch.num_rows)


def given_of(one: Case) -> tuple[Any, Any, Any]:
    return one.old_log_probs, one.rollout_log_probs, one.masks


@pytest.mark.parametrize("level", LEVELS)
def test_weights_and_rejections_equal_the_reference(level: str) -> None:
    bounded, rejected = 0, 0
    for one in CASES:
        found = ratios(one)
        for threshold, lower in ((0.7, None), (1.6, 0.3), (5.0, 0.0)):
            want = flat(rollout_correction.truncated_weights(*given_of(one), level=level, threshold=threshold))
            weights = importance_weights(found, level, threshold)
            assert weights.dtype == torch.float32
            torch.testing.assert_close(weights.double(), want, rtol=0, atol=1e-6)
            kept = flat(
                rollout_correction.rejection_masks(*given_of(one), level=level, upper=threshold, lower=lower),
                torch.bool,
            )
            assert torch.equal(kept_tokens(found, level, threshold, lower), kept)
            if lower is not None:  # IcePop is the ratio where it lies within, as rejection has it, and else 0
                inner = flat(rollout_correction.ratios(*given_of(one), level)) * kept
                torch.testing.assert_close(
                    importance_weights(found, level, threshold, lower).double(), inner, rtol=0, atol=1e-6
                )
            bounded += int((weights == torch.tensor(threshold)).sum())
            rejected += int((found.mask & ~kept).sum())
    assert bounded > 100
    assert rejected > 100


class Reader:
    """A model's log-probs as they are."""

    def __init__(self, log_probs: torch.Tensor) -> None:
        self._log_probs = log_probs

    def log_prob_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._log_probs, torch.zeros_like(self._log_probs)


def corrected(one: Case, mode: str, dtype: torch.dtype = torch.float64, **section: Any) -> tuple[PackedBatch, dict]:
    batch, metrics = CorrectionStage(RolloutCorrectionConfig(**section), check_rollout=False)(packed(one, dtype))
    return batch.with_items(item_weight=item_weights(batch, mode, norm_length=5)), metrics


def loss_of(batch: PackedBatch, log_probs: torch.Tensor) -> tuple[float, torch.Tensor]:
    leaf = log_probs.clone().requires_grad_()
    out = PolicyLoss(ActorConfig())(Reader(leaf), batch)  # type: ignore[arg-type]  # all that it asks for
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    return float(out.loss.detach()), gradient


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_the_loss_and_its_gradient_equal_the_reference(level: str, mode: str) -> None:
    """Weights multiply the reference's terms, rejected tokens are out of its mask, and so out of its means."""
    section = {
        "rollout_is": level, "rollout_is_threshold": 1.5,
        "rollout_rs": level, "rollout_rs_threshold": 3.0, "rollout_rs_threshold_lower": 0.25,
    }  # fmt: skip
    lost = 0
    for one in CASES[:40]:
        log_probs = leaves(one.log_probs)
        terms = policy_losses.vanilla(log_probs, one.old_log_probs, one.advantages, one.masks, log_ratio_bound=20.0)
        weights = rollout_correction.truncated_weights(*given_of(one), level=level, threshold=1.5)
        kept = rollout_correction.rejection_masks(*given_of(one), level=level, upper=3.0, lower=0.25)
        terms = [
            [t * w if k else 0.0 for t, w, k in zip(*row, strict=True)]
            for row in zip(terms, weights, kept, strict=True)
        ]
        total = aggregation.aggregate(terms, kept, mode, norm=5)
        want, wanted = flat(gradients(total, log_probs)), float(total.detach())
        scale = max(1.0, abs(wanted), float(want.abs().max()))
        batch, _ = corrected(one, mode, **section)
        value, gradient = loss_of(batch, flat(one.log_probs))
        assert value == pytest.approx(wanted, abs=1e-6 * scale), one.seed
        torch.testing.assert_close(gradient, want, rtol=0, atol=1e-6 * scale)
        gone = ~flat(kept, torch.bool)
        assert not gradient[gone].any()
        lost += int(gone.sum()) - int((~flat(one.masks, torch.bool)).sum())
    assert lost > 20


def test_equal_policies_change_nothing() -> None:
    """Bit by bit: a weight of 1 is no weight, and nothing is rejected."""
    for one in CASES[:20]:
        same = replace(one, rollout_log_probs=one.old_log_probs)
        section = {"rollout_rs": "token", "rollout_rs_threshold": 1.0, "rollout_token_veto_threshold": 0.99}
        batch, metrics = corrected(same, "token-mean", torch.float32, rollout_is="sequence", **section)
        plain = packed(one, torch.float32)
        plain = plain.with_items(item_weight=item_weights(plain, "token-mean", norm_length=5))
        assert torch.equal(batch.items["loss_mask"], plain.items["loss_mask"])
        a, b = loss_of(batch, flat(one.log_probs, torch.float32)), loss_of(plain, flat(one.log_probs, torch.float32))
        assert a[0] == b[0]
        assert torch.equal(a[1], b[1])
        assert {metrics[f"rollout_corr/{name}"] for name in ("kl", "k3_kl", "chi2_token", "chi2_seq")} == {0.0}
        assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0)
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.0


def test_weights_scale_the_policy_term_alone() -> None:
    """With weights of 0 what is left are KL, entropy and distillation, as they were."""
    one = replace(CASES[3], advantages=[[1.0] * n for n in CASES[3].lengths])
    batch = packed(one, torch.float32)
    batch = batch.with_items(
        item_weight=item_weights(batch, "token-mean", norm_length=5),
        teacher_log_probs=batch.items["ref_log_probs"] - 0.25,
    )
    batch = replace(batch, meta={TEACHER_TEMPERATURE: 1.0})
    actor = ActorConfig(use_kl_loss=True, kl_loss_coef=0.5, entropy_coeff=0.1)
    reader: Any = Reader(flat(one.log_probs, torch.float32))
    weights = torch.full((batch.num_items,), 0.25)
    for loss in (PolicyLoss(actor), DistillationLoss(actor, DistillationConfig(loss_mode="k3", use_task_rewards=True))):
        whole = loss(reader, batch)
        part = loss(reader, batch.with_items(**{IS_WEIGHTS: weights}))
        policy = float(whole.sums["actor/pg_loss"])
        assert policy != 0
        assert float(part.sums["actor/pg_loss"]) == pytest.approx(policy / 4, rel=1e-6)
        assert float(whole.loss - part.loss) == pytest.approx(0.75 * policy, rel=1e-5)
    # The reward of k1 is a policy loss, and weighed as one.
    distilled = DistillationLoss(actor, DistillationConfig(loss_mode="k1"))
    whole, part = distilled(reader, batch), distilled(reader, batch.with_items(**{IS_WEIGHTS: weights}))
    assert float(part.sums["actor/pg_loss"]) == pytest.approx(float(whole.sums["actor/pg_loss"]) / 4, rel=1e-6)


LOG2 = math.log(2)


def by_hand(**section: Any) -> tuple[PackedBatch, dict[str, float]]:
    """Ratios 2 and 1/4 (and a token that is not trained between) in the first row, 4 in the second, none in the third."""
    one = replace(
        case(1),
        groups=[0, 0, 1],
        masks=[[True, False, True], [True], [False]],
        old_log_probs=[[-1.0, 9.0, -3.0], [-2.0], [-1.0]],
        rollout_log_probs=[[-1.0 - LOG2, -9.0, -3.0 + 2 * LOG2], [-2.0 - 2 * LOG2], [-5.0]],
        **{name: [[0.0] * 3, [0.0], [0.0]] for name in ("advantages", "ref_log_probs", "token_rewards")},
    )
    batch, found = CorrectionStage(RolloutCorrectionConfig(**section), check_rollout=True)(packed(one))
    return batch, {name.removeprefix("rollout_corr/"): value for name, value in found.items()}


def test_metrics_by_hand() -> None:
    batch, found = by_hand()
    assert IS_WEIGHTS not in batch.items
    assert found == {
        "kl": pytest.approx(-LOG2 / 3),  # log-ratios 1, -2 and 2 of log 2
        "k3_kl": pytest.approx((2 + 0.25 + 4) / 3 - 1 - LOG2 / 3),
        "chi2_token": pytest.approx((4 + 1 / 16 + 16) / 3 - 1),
        "chi2_seq": pytest.approx((1 / 4 + 16) / 2 - 1),
        "training/rollout_probs_diff_mean": pytest.approx(
            (math.exp(-1) / 2 + 3 * math.exp(-3) + 0.75 * math.exp(-2)) / 3
        ),
        "training/rollout_probs_diff_max": pytest.approx(math.exp(-1) / 2),
    }
    batch, found = by_hand(rollout_is="token", rollout_is_threshold=3.0)
    assert batch.items[IS_WEIGHTS].tolist() == pytest.approx([2, 0, 0.25, 3, 0])
    assert found["rollout_is_mean"] == pytest.approx(1.75)
    assert found["rollout_is_std"] == pytest.approx(math.sqrt((4 + 1 / 16 + 9) / 3 - 1.75**2))
    assert (found["rollout_is_min"], found["rollout_is_max"]) == pytest.approx((0.25, 3))
    assert found["rollout_is_eff_sample_size"] == pytest.approx(5.25**2 / (3 * (4 + 1 / 16 + 9)))
    assert found["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert "rollout_is_ratio_fraction_low" not in found
    batch, found = by_hand(rollout_is="token", rollout_is_threshold=3.0, rollout_is_threshold_lower=0.5)
    assert batch.items[IS_WEIGHTS].tolist() == pytest.approx([2, 0, 0, 0, 0])
    assert batch.items["loss_mask"].tolist() == [True, False, True, True, False]  # IcePop rejects nothing
    assert found["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)


def test_rejection_and_veto_by_hand() -> None:
    batch, found = by_hand(rollout_rs="token", rollout_rs_threshold=3.0)  # from 1/3
    assert batch.items["loss_mask"].tolist() == [True, False, False, False, False]
    assert found["rollout_rs_masked_fraction"] == pytest.approx(2 / 3)
    assert found["rollout_rs_seq_masked_fraction"] == 1.0  # of the two rows with a trained token
    batch, found = by_hand(rollout_token_veto_threshold=0.3)
    assert batch.items["loss_mask"].tolist() == [False, False, False, True, False]
    assert found["rollout_is_catastrophic_token_fraction"] == pytest.approx(1 / 3)
    assert (found["rollout_is_veto_fraction"], found["rollout_rs_seq_masked_fraction"]) == (0.5, 0.5)
    assert found["rollout_rs_masked_fraction"] == pytest.approx(2 / 3)
    # Weights are said of what is trained: nothing, where all is rejected.
    batch, found = by_hand(
        rollout_is="token", rollout_rs="sequence", rollout_rs_threshold=0.1, rollout_rs_threshold_lower=0.0
    )
    assert not batch.items["loss_mask"].any()
    assert not batch.items[IS_WEIGHTS].any()
    assert "rollout_is_mean" not in found
    assert found["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)


def test_a_batch_without_a_trained_token_is_defined() -> None:
    one = replace(case(1), masks=[[False] * n for n in case(1).lengths])
    section = {"rollout_is": "geometric", "rollout_rs": "sequence", "rollout_rs_threshold": 2.0}
    batch, metrics = corrected(one, "token-mean", **section)
    assert not batch.items[IS_WEIGHTS].any()
    assert metrics == {
        "rollout_corr/rollout_rs_masked_fraction": 0.0,
        "rollout_corr/rollout_rs_seq_masked_fraction": 0.0,
    }
    assert divergences(ratios(one)) == {}
    assert effective_sample_size(torch.zeros(3)) == 0.0


def test_impossible_tokens_have_weights_and_the_masked_are_nobodys() -> None:
    old = torch.tensor([-math.inf, -1.0, math.nan, -0.5])
    rollout = torch.tensor([-0.1, -math.inf, math.inf, -0.5])
    mask = torch.tensor([True, True, False, True])
    found = log_ratios(old, rollout, mask, torch.tensor([0, 0, 0, 1]), 2)
    for level, want in (("token", [0, 2, 0, 1]), ("sequence", [1, 1, 0, 1]), ("geometric", [1, 1, 0, 1])):
        assert importance_weights(found, level, 2.0).tolist() == pytest.approx(want, abs=1e-8)
    assert catastrophic_tokens(found, 1e-4).tolist() == [True, False, False, False]
    assert all(math.isfinite(value) for value in divergences(found).values())
    assert rows_of(torch.zeros(4, dtype=torch.bool), found.row_ids, 2).tolist() == [False, False]
    with pytest.raises(ValueError, match="level"):
        found.at("word")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), level=st.sampled_from(LEVELS), threshold=st.floats(0.1, 20.0))
def test_weights_are_bounded_constants_of_their_row(seed: int, level: str, threshold: float) -> None:
    one = case(seed)
    batch, _ = corrected(one, "token-mean", rollout_is=level, rollout_is_threshold=threshold)
    weights = batch.items[IS_WEIGHTS]
    assert not weights.requires_grad
    assert float(weights.min()) >= 0
    assert float(weights.max()) <= torch.tensor(threshold).item()
    # The other rows of the batch have no part in a row's weights, nor has its place among them.
    order = list(reversed(range(len(one.masks))))
    turned = corrected(_rows(one, order), "token-mean", rollout_is=level, rollout_is_threshold=threshold)[0]
    assert torch.equal(turned.items[IS_WEIGHTS], batch.select(order).items[IS_WEIGHTS])
    if level != "token":
        for row in range(len(one.masks)):
            at = (batch.row_ids() == row) & batch.items["loss_mask"]
            assert len(weights[at].unique()) <= 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), level=st.sampled_from(LEVELS), upper=st.floats(1.0, 20.0), wider=st.floats(1.0, 5.0))
def test_a_wider_interval_keeps_more(seed: int, level: str, upper: float, wider: float) -> None:
    found = ratios(case(seed))
    narrow, wide = (kept_tokens(found, level, bound) for bound in (upper, upper * wider))
    assert not (narrow & ~wide).any()
    assert not (wide & ~found.mask).any()
    if level != "token":  # whole rows
        for row in range(len(found.rows)):
            at = (found.row_ids == row) & found.mask
            assert narrow[at].all() or not narrow[at].any()


def _rows(one: Case, order: list[int]) -> Case:
    fields = ("groups", "masks", "advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "token_rewards")
    return replace(one, **{name: [getattr(one, name)[row] for row in order] for name in fields})


FAULTS = {
    "bypass and weights": ({"bypass_mode": True, "rollout_is": "token"}, "recomputes none"),
    "bypass and rejection": (
        {"bypass_mode": True, "rollout_rs": "token", "rollout_rs_threshold": 2.0},
        "recomputes none",
    ),
    "bypass and a veto": ({"bypass_mode": True, "rollout_token_veto_threshold": 0.1}, "recomputes none"),
    "a bound of no weights": ({"rollout_is_threshold": 3.0}, "set rollout_is"),
    "a bound of no rejection": ({"rollout_rs_threshold_lower": 0.5}, "set rollout_rs"),
    "rejection without a bound": ({"rollout_rs": "token"}, "needs"),
    "bounds in the wrong order": ({"rollout_rs": "token", "rollout_rs_threshold": 0.5}, "nothing lies between"),
    "IcePop's too": ({"rollout_is": "token", "rollout_is_threshold_lower": 3.0}, "nothing lies between"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_settings_that_contradict_each_other_are_refused_in_words(name: str) -> None:
    section, words = FAULTS[name]
    values = {"model": {"path": "m"}, "data": {"task": {"name": "sum"}}, "algorithm": {"rollout_correction": section}}
    with pytest.raises(ValidationError, match=words) as caught:
        RunConfig.model_validate(values)
    assert "algorithm.rollout_correction." in str(caught.value)


def test_the_sections_of_the_page_are_taken() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    shown = re.findall(r"rollout_correction: (\{.*?\})", page)
    assert len(shown) == 5
    for text in shown:
        values = {"model": {"path": "m"}, "data": {"task": {"name": "sum"}}}
        values["algorithm"] = {"rollout_correction": parse_value(text)}
        assert RunConfig.model_validate(values).algorithm.rollout_correction is not None


def test_weights_of_a_policy_loss_that_there_is_not_are_refused() -> None:
    values = {
        "model": {"path": "m"}, "data": {"task": {"name": "sum"}}, "teacher": {"model": {"path": "t"}},
        "distillation": {"loss_mode": "k3"}, "algorithm": {"rollout_correction": {"rollout_is": "token"}},
    }  # fmt: skip
    with pytest.raises(ValidationError, match="weighs the policy loss"):
        RunConfig.model_validate(values)
    values["distillation"] = {"loss_mode": "k1"}
    assert RunConfig.model_validate(values).algorithm.rollout_correction is not None
