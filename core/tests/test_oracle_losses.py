"""The reference policy losses, KL estimators and aggregations, against numbers computed by hand and identities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from oracle import aggregation, covariance_losses, kl, policy_losses, sequence_losses
from oracle.basics import floats, gradients, leaves, mean, value
from oracle.cases import Case, cases

CASES = cases(40)
SMALL = [batch for batch in CASES if sum(batch.lengths) <= 24][:6]
E = math.e


def of_one(loss: Callable[..., Any], log_ratio: float, advantage: float, **settings: Any) -> tuple[float, float]:
    """Value and gradient by the log-prob of one token with old log-prob -1."""
    (leaf,) = leaves([[-1.0 + log_ratio]])
    terms = loss([leaf], [[-1.0]], [[advantage]], [[True]], **settings)
    return value(terms[0][0]), gradients(terms[0][0], [leaf])[0][0]


def pair(loss: float, gradient: float) -> Any:
    return pytest.approx((loss, gradient), rel=1e-12, abs=1e-12)


LOG2 = math.log(2)


# ---- by hand -------------------------------------------------------------------------------------------------------
def test_vanilla_by_hand() -> None:
    # Bounds 0.8 and 1.3. d(r A) / d log pi = r A.
    settings = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}
    found = {
        key: of_one(policy_losses.vanilla, *key, **settings)
        for key in [(0.0, 2.0), (LOG2, 2.0), (-LOG2, 2.0), (LOG2, -2.0), (-LOG2, -2.0), (2 * LOG2, -2.0)]
    }
    assert found[0.0, 2.0] == pair(-2, -2)  # r = 1
    assert found[LOG2, 2.0] == pair(-2.6, 0)  # r = 2: min(4, 1.3 * 2), clipped
    assert found[-LOG2, 2.0] == pair(-1, -1)  # r = 0.5: min(1, 0.8 * 2) = 1, not clipped
    assert found[LOG2, -2.0] == pair(4, 4)  # r = 2: min(-4, -2.6) = -4, below 3 * 2
    assert found[-LOG2, -2.0] == pair(1.6, 0)  # r = 0.5: min(-1, -1.6), clipped
    assert found[2 * LOG2, -2.0] == pair(6, 0)  # r = 4: 8, but dual clip 3 * 2
    assert of_one(policy_losses.vanilla, 2 * LOG2, -2.0, dual_clip=None) == pair(8, 8)
    # A bound on the log ratio: e^1 instead of e^1.5, and no gradient; within it nothing changes.
    assert of_one(policy_losses.vanilla, 1.5, -1.0, dual_clip=None, log_ratio_bound=1.0) == pair(E, 0)
    assert of_one(policy_losses.vanilla, 1.0, -1.0, dual_clip=None, log_ratio_bound=1.5) == pair(E, E)


def test_cispo_by_hand() -> None:
    # r = 2 clipped to 1.2: -1.2 * A * log pi; the gradient is -1.2 A although the ratio is clipped.
    log_prob = -1 + LOG2
    assert of_one(policy_losses.cispo, LOG2, 2.0) == pair(-1.2 * 2 * log_prob, -2.4)
    assert of_one(policy_losses.cispo, -LOG2, -1.0, clip_low=1.0) == pair(0.5 * (-1 - LOG2), 0.5)


def test_sapo_by_hand() -> None:
    # r = 1: sigmoid(0) = 1/2, value -A * 4 / tau / 2 = -2 A / tau, gradient -A (sigmoid' = 1/4 times tau 4 / tau r).
    assert of_one(policy_losses.sapo, 0.0, 3.0) == pair(-6, -3)
    assert of_one(policy_losses.sapo, 0.0, -3.0) == pair(6 / 1.05, 3)
    # r = 2, tau 1: s = 1 / (1 + e^-1); value -4 s; gradient -4 s (1 - s) r.
    s = 1 / (1 + math.exp(-1))
    assert of_one(policy_losses.sapo, LOG2, 1.0) == pair(-4 * s, -8 * s * (1 - s))
    # Below 0 the other temperature.
    s = 1 / (1 + math.exp(-2))
    assert of_one(policy_losses.sapo, LOG2, -1.0, tau_neg=2.0) == pair(2 * s, 8 * s * (1 - s))


def test_gpg_by_hand() -> None:
    (leaf,) = leaves([[-0.5]])
    terms = policy_losses.gpg([leaf], [[3.0]], [[True]])
    assert (value(terms[0][0]), gradients(terms[0][0], [leaf])) == (1.5, [[-3.0]])


def test_dppo_by_hand() -> None:
    # pi_old 0.25, pi 0.5 (r = 2): TV 0.25. KL = 0.25 log 0.5 + 0.75 log 1.5 = -0.25 log 2 + 0.75 log 1.5 = 0.1308.
    assert policy_losses.binary_tv(0.25, 0.5) == 0.25
    distance = -0.25 * LOG2 + 0.75 * math.log(1.5)
    assert policy_losses.binary_kl(0.25, 0.5) == pytest.approx(distance, rel=1e-12)
    assert policy_losses.binary_kl(0.5, 0.5) == 0
    assert policy_losses.binary_kl(1.0, 0.5) == pytest.approx(LOG2)

    def found(loss: Callable[..., Any], advantage: float, old: float, new: float, **settings: float) -> Any:
        (leaf,) = leaves([[math.log(new)]])
        terms = loss([leaf], [[math.log(old)]], [[advantage]], [[True]], **settings)
        return value(terms[0][0]), gradients(terms[0][0], [leaf])[0][0]

    tv, by_kl = policy_losses.dppo_tv, policy_losses.dppo_kl
    kept = pair(-2 * 3 * math.log(0.5), -6)  # -r A log pi, gradient -r A
    assert found(tv, 3.0, 0.25, 0.5, threshold_low=0.1, threshold_high=0.3) == kept
    assert found(tv, 3.0, 0.25, 0.5, threshold_low=0.3, threshold_high=0.1) == pair(0, 0)
    assert found(by_kl, 3.0, 0.25, 0.5, threshold_low=0.1, threshold_high=0.14) == kept
    assert found(by_kl, 3.0, 0.25, 0.5, threshold_low=0.14, threshold_high=0.1) == pair(0, 0)
    # Far away, but the advantage pushes back: kept. And the other way round for A < 0.
    far = {"threshold_low": 0.1, "threshold_high": 0.1}
    assert found(tv, -3.0, 0.25, 0.5, **far) == pair(2 * 3 * math.log(0.5), 6)
    assert found(tv, -3.0, 0.5, 0.25, **far) == pair(0, 0)
    assert found(tv, 3.0, 0.5, 0.25, **far) == pair(-0.5 * 3 * math.log(0.25), -1.5)
    # The cap of the weight: r = 2 counts as 1.5.
    open_ = {"threshold_low": 1.0, "threshold_high": 1.0, "ratio_cap": 1.5}
    assert found(tv, 1.0, 0.25, 0.5, **open_) == pair(-1.5 * math.log(0.5), -1.5)
    # A ratio of 100 is a small TV where both are rare: DPPO keeps what PPO would clip, and the reverse.
    assert found(tv, 1.0, 1e-4, 1e-2, **far, ratio_cap=1e9)[1] == pytest.approx(-100)
    assert found(tv, 1.0, 0.8, 0.94, **far) == pair(0, 0)


def test_gspo_by_hand() -> None:
    # Log ratios log 2 and 0 (the masked token has any): s = exp((log 2 + 0) / 2) = sqrt 2. A = -1, no clip there:
    # each term sqrt 2, with gradient sqrt 2 at its own token alone.
    rows = leaves([[-1 + LOG2, -7.0, -2.0]])
    terms = sequence_losses.gspo(rows, [[-1.0, -1.0, -2.0]], [[-1.0] * 3], [[True, False, True]])
    root = math.sqrt(2)
    assert floats(terms)[0] == pytest.approx([root, 0, root])
    assert gradients(terms[0][0], rows)[0] == pytest.approx([root, 0, 0])
    assert gradients(terms[0][2], rows)[0] == pytest.approx([0, 0, root])
    # A = 1: clipped to 1 + clip_high.
    terms = sequence_losses.gspo(
        rows, [[-1.0, -1.0, -2.0]], [[1.0] * 3], [[True, False, True]], clip_low=0.1, clip_high=0.25
    )
    assert floats(terms)[0] == [-1.25, 0, -1.25]
    assert not terms[0][0].requires_grad
    # Log ratio 12 is capped at 10.
    capped = sequence_losses.gspo(leaves([[-1.0]]), [[-13.0]], [[-1.0]], [[True]])
    assert value(capped[0][0]) == pytest.approx(math.exp(10))


def test_geo_mean_by_hand() -> None:
    # A = 2, log ratios 1 (clipped to 0.4) and -1 (not clipped on that side): mean -0.3; loss -2 e^-0.3; its gradient at
    # the second token -2 e^-0.3 / 2, at the clipped one 0.
    rows = leaves([[-1.0, -3.0]])
    terms = sequence_losses.geo_mean(rows, [[-2.0, -2.0]], [[2.0, 2.0]], [[True, True]])
    loss = aggregation.aggregate(terms, [[True, True]], "seq-mean-token-mean")
    assert value(loss) == pytest.approx(-2 * math.exp(-0.3))
    assert gradients(loss, rows)[0] == pytest.approx([0, -math.exp(-0.3)])
    # A = -2: the other side: 1 and -0.4, mean 0.3.
    terms = sequence_losses.geo_mean(rows, [[-2.0, -2.0]], [[-2.0, -2.0]], [[True, True]])
    loss = aggregation.aggregate(terms, [[True, True]], "seq-mean-token-mean")
    assert value(loss) == pytest.approx(2 * math.exp(0.3))
    assert gradients(loss, rows)[0] == pytest.approx([math.exp(0.3), 0])
    # With the second token masked its mean is 1, of one token.
    terms = sequence_losses.geo_mean(rows, [[-2.0, -2.0]], [[-2.0, 0.0]], [[True, False]])
    assert floats(terms)[0] == pytest.approx([2 * E, 0])


def test_covariances_by_hand() -> None:
    # Log-probs -1, -3 (mean -2), advantages 1, 0 (mean 0.5): 1 * 0.5 and -1 * -0.5. The masked token counts nowhere.
    found = covariance_losses.covariances([[-1.0, -9.0], [-3.0]], [[1.0, 5.0], [0.0]], [[True, False], [True]])
    assert found == {(0, 0): 0.5, (1, 0): 0.5}


def test_clip_cov_by_hand() -> None:
    masks, old = [[True, True, True]], [[-1.0, -1.0, -1.0]]
    rows = leaves([[-1.0, -1.0, -1.0 + LOG2]])
    terms = covariance_losses.clip_cov(rows, old, [[2.0, 2.0, 2.0]], masks, {(0, 1)})
    assert floats(terms)[0] == pytest.approx([-2, 0, -2.4])
    total = terms[0][0] + terms[0][1] + terms[0][2]
    assert gradients(total, rows)[0] == pytest.approx([-2, 0, 0])
    # Log-probs -1, -1, -1 + log 2, advantages 2, 0, 1 (mean 1): the means' differences are -log2/3 (twice), 2 log2 / 3
    # and 1, -1, 0: covariances -log2/3, log2/3, 0. The last is clipped (r = 2, A > 0), so not a candidate.
    bounds = {"cov_low": -1.0, "cov_high": 1.0}
    found = covariance_losses.clip_cov_candidates(rows, old, [[2.0, 0.0, 1.0]], masks, **bounds)
    assert found == {(0, 0), (0, 1)}
    found = covariance_losses.clip_cov_candidates(rows, old, [[2.0, 0.0, 1.0]], masks, cov_low=0.0, cov_high=1.0)
    assert found == {(0, 1)}
    assert covariance_losses.clip_cov_number(masks, 0.7) == 2
    assert covariance_losses.clip_cov_number(masks, 2e-4) == 1


def test_kl_cov_by_hand() -> None:
    # As above, covariances -log2/3, log2/3, 0: the highest third is the second token.
    masks, old = [[True, True, True]], [[-1.0, -1.5, -1.0]]
    rows = leaves([[-1.0, -1.0, -1.0 + LOG2]])
    assert covariance_losses.kl_cov_chosen(rows, [[2.0, 0.0, 1.0]], masks, 0.34) == {(0, 1)}
    terms = covariance_losses.kl_cov(rows, old, [[2.0, 0.0, 1.0]], masks, share=0.34, kl_coef=10.0)
    # -r A = -2, 0, -2; the second gets 10 * |-1 + 1.5| = 5 with gradient 10.
    assert floats(terms)[0] == pytest.approx([-2, 5, -2])
    total = terms[0][0] + terms[0][1] + terms[0][2]
    assert gradients(total, rows)[0] == pytest.approx([-2, 10, -2])


def test_kl_estimators_by_hand() -> None:
    # log pi = -1, log ref = -3: d = 2: 2, 2, e^-2 + 1, 2; gradients 1, 2, 1 - e^-2, 1.
    wanted = {"k1": (2, 1), "k2": (2, 2), "k3": (math.exp(-2) + 1, 1 - math.exp(-2)), "abs": (2, 1)}
    for kind, (exact, gradient) in wanted.items():
        for suffix, through in (("", gradient), ("+", 2)):
            (leaf,) = leaves([[-1.0]])
            found = kl.estimate(leaf[0], -3.0, kind + suffix)
            assert (value(found), gradients(found, [leaf])[0][0]) == pair(exact, through)
    # d = -3: k3 = e^3 - 4 = 16.09, limited to 10 without gradient; straight through, the gradient of k2 stays.
    (leaf,) = leaves([[-4.0]])
    assert value(kl.estimate(leaf[0], -1.0, "k3")) == pytest.approx(math.exp(3) - 4)
    limited = kl.estimate(leaf[0], -1.0, "k3", k3_bound=10)
    assert (value(limited), limited.requires_grad) == (10, False)
    limited = kl.estimate(leaf[0], -1.0, "k3+", k3_bound=10)
    assert (value(limited), gradients(limited, [leaf])[0][0]) == pair(10, -3)
    with pytest.raises(ValueError, match="k4"):
        kl.estimate(-1.0, -1.0, "k4")


def test_full_kl_by_hand() -> None:
    # pi = (1/2, 1/2), ref = (1/4, 3/4): 1/2 log 2 + 1/2 log(2/3) = 1/2 log(4/3).
    # d KL / d logit_v = pi_v (log(pi_v / ref_v) - KL): 1/2 (log 2 - KL), 1/2 (log(2/3) - KL).
    logits = leaves([[0.0, 0.0]])
    found = kl.full(logits[0], [math.log(0.25), math.log(0.75)])
    exact = 0.5 * math.log(4 / 3)
    assert value(found) == pytest.approx(exact)
    assert gradients(found, logits)[0] == pytest.approx([0.5 * (LOG2 - exact), 0.5 * (math.log(2 / 3) - exact)])
    # Logits that are large, and a shift of them, change nothing.
    assert value(kl.full([800.0, 800.0], [math.log(0.25), math.log(0.75)])) == pytest.approx(exact)


def test_controllers_by_hand() -> None:
    fixed = kl.FixedController(0.1)
    assert [fixed.update(9.0, 10), fixed.value] == [0.1, 0.1]
    # KL 6.6 of 6: error 0.1; 100 rows of a horizon of 1000: 0.2 * (1 + 0.1 * 0.1) = 0.202.
    adaptive = kl.AdaptiveController(0.2, target=6.0, horizon=1000)
    assert adaptive.update(6.6, 100) == pytest.approx(0.202)
    # Far above and below, the error is cut at +-0.2.
    assert adaptive.update(600.0, 100) == pytest.approx(0.202 * 1.02)
    assert adaptive.update(0.0, 100) == pytest.approx(0.202 * 1.02 * 0.98)
    # Rows (1, 3) and (4, masked): row means 2 and 4, the batch's 3. The empty row does not count.
    assert kl.batch_kl([[1, 3], [4, 9], [7]], [[True, True], [True, False], [False]]) == 3
    found = kl.penalised_rewards([[0.0, 1.0], [2.0]], [[1.0, 2.0], [5.0]], [[True, True], [False]], 0.5)
    assert found == [[-0.5, 0.0], [0.0]]


def test_aggregations_by_hand() -> None:
    masks = [[True, True, True], [True, False], [False]]
    terms = [[1.0, 2.0, 3.0], [10.0, math.nan], [math.nan]]
    wanted = {
        "token-mean": 16 / 4,
        "token-sum": 16,
        "seq-mean-token-sum": (6 + 10) / 2,  # the empty row is no sequence
        "seq-mean-token-mean": (2 + 10) / 2,
        "seq-mean-token-sum-norm": (6 + 10) / 2 / 8,
    }
    assert tuple(wanted) == aggregation.MODES
    for mode, total in wanted.items():
        norm = 8 if mode.endswith("norm") else None
        assert value(aggregation.aggregate(terms, masks, mode, norm=norm)) == pytest.approx(total), mode
        assert value(aggregation.aggregate([[math.nan]], [[False]], mode, norm=norm)) == 0
    with pytest.raises(ValueError, match="norm"):
        aggregation.weights(masks, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="token-mean"):
        aggregation.weights(masks, "mean")


# ---- identities ----------------------------------------------------------------------------------------------------
def numeric(batch: Case, loss: Callable[[Any], torch.Tensor], step: float = 1e-6) -> list[list[float]]:
    """Central differences of ``loss`` by each log-prob."""
    out = []
    for row, log_probs in enumerate(batch.log_probs):
        of_row = []
        for token in range(len(log_probs)):
            values = []
            for sign in (1, -1):
                moved = [list(other) for other in batch.log_probs]
                moved[row][token] += sign * step
                values.append(value(loss(moved)))
            of_row.append((values[0] - values[1]) / (2 * step))
        out.append(of_row)
    return out


def differentiable(batch: Case) -> dict[str, Callable[[Any], Sequence[Sequence[Any]]]]:
    """The losses without a detached factor, whose gradient is the derivative of their value."""
    given = (batch.old_log_probs, batch.advantages, batch.masks)
    return {
        "vanilla": lambda rows: policy_losses.vanilla(rows, *given),
        "sapo": lambda rows: policy_losses.sapo(rows, *given),
        "gpg": lambda rows: policy_losses.gpg(rows, batch.advantages, batch.masks),
        "geo_mean": lambda rows: sequence_losses.geo_mean(rows, *given),
        "clip_cov": lambda rows: covariance_losses.clip_cov(rows, *given, {(0, 0)}),
        "kl_cov": lambda rows: covariance_losses.kl_cov(rows, *given, share=0.2, kl_coef=1.0, chosen={(0, 0)}),
        "k1": lambda rows: kl.per_token(rows, batch.ref_log_probs, batch.masks, "k1"),
        "k2": lambda rows: kl.per_token(rows, batch.ref_log_probs, batch.masks, "k2"),
        "k3": lambda rows: kl.per_token(rows, batch.ref_log_probs, batch.masks, "k3"),
    }


@pytest.mark.parametrize("name", list(differentiable(CASES[0])))
def test_gradients_are_the_derivatives_of_the_values(name: str) -> None:
    for batch in SMALL:

        def loss(rows: Any, batch: Case = batch) -> torch.Tensor:
            return aggregation.aggregate(differentiable(batch)[name](rows), batch.masks, "seq-mean-token-mean")

        rows = leaves(batch.log_probs)
        total = loss(rows)
        # Differences of a total of 1e6 hold about 1e-4.
        within = 1e-5 * max(1.0, abs(value(total)))
        kink = name == "kl_cov" and batch.log_probs[0][0] == batch.old_log_probs[0][0]  # |log ratio| at 0
        slopes, differences = gradients(total, rows), numeric(batch, loss)
        for row, mask in enumerate(batch.masks):
            for token in range(len(mask)):
                if not (kink and (row, token) == (0, 0)):
                    wanted = pytest.approx(differences[row][token], rel=1e-4, abs=within)
                    assert slopes[row][token] == wanted, (batch.seed, row, token)


def test_gspo_has_the_gradient_of_the_sequence_form() -> None:
    """For one advantage a row: the seq-mean-token-mean of the terms against -min(s A, clip(s) A) of eq. 5."""
    bounds: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}
    for batch in CASES:
        per_row = [round(i - len(batch.masks) / 2) + 0.5 for i in range(len(batch.masks))]
        per_token = [[of_row] * len(mask) for of_row, mask in zip(per_row, batch.masks, strict=True)]
        rows = leaves(batch.log_probs)
        terms = sequence_losses.gspo(rows, batch.old_log_probs, per_token, batch.masks, log_ratio_cap=None, **bounds)
        loss = aggregation.aggregate(terms, batch.masks, "seq-mean-token-mean")

        losses = []
        for row, mask in enumerate(batch.masks):
            kept = [token for token, keep in enumerate(mask) if keep]
            if kept:
                steps = [rows[row][token] - batch.old_log_probs[row][token] for token in kept]
                s = torch.exp(torch.stack(steps).mean())
                losses.append(-torch.minimum(s * per_row[row], torch.clamp(s, 0.8, 1.3) * per_row[row]))
        wanted = torch.stack(losses).mean()
        assert value(loss) == pytest.approx(value(wanted), rel=1e-10)
        for ours, theirs in zip(gradients(loss, rows), gradients(wanted, rows), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-10, abs=1e-12), batch.seed


def test_on_policy_all_losses_have_the_policy_gradient() -> None:
    """Where log_probs are the old ones the gradient of each term is -A at its token, whatever the method."""
    for batch in CASES[:20]:
        given = (batch.old_log_probs, batch.advantages, batch.masks)
        methods: list[tuple[Callable[..., Any], dict[str, Any]]] = [
            (policy_losses.vanilla, {}),
            (policy_losses.cispo, {}),
            (policy_losses.sapo, {}),
            (policy_losses.dppo_tv, {"threshold_low": 0.0, "threshold_high": 0.0}),
            (policy_losses.dppo_kl, {"threshold_low": 0.0, "threshold_high": 0.0}),
            (sequence_losses.gspo, {}),
            (covariance_losses.clip_cov, {"chosen": ()}),
            (covariance_losses.kl_cov, {"chosen": (), "share": 0.0, "kl_coef": 1.0}),
        ]
        for loss, settings in methods:
            rows = leaves(batch.old_log_probs)
            terms = loss(rows, *given, **settings)
            found = gradients(aggregation.aggregate(terms, batch.masks, "token-sum"), rows)
            for ours, advantages in zip(found, batch.advantages, strict=True):
                assert ours == pytest.approx([-a for a in advantages], rel=1e-12), (loss.__name__, batch.seed)


def test_masked_tokens_have_no_value_and_no_gradient() -> None:
    for batch in CASES[:15]:
        rows = leaves(batch.log_probs)
        for name, loss in differentiable(batch).items():
            terms = loss(rows)
            assert [len(row) for row in terms] == batch.lengths
            total = aggregation.weighted_sum(terms, [[1.0] * length for length in batch.lengths])
            for of_row, slopes, mask in zip(terms, gradients(total, rows), batch.masks, strict=True):
                for term, slope, kept in zip(of_row, slopes, mask, strict=True):
                    assert kept or (value(term), slope) == (0, 0), name
                    assert math.isfinite(value(term)), name


def test_sampled_kl_estimates_the_full_one() -> None:
    """The mean of k1 and of k3 over the vocabulary, weighted by pi, is the full KL; both k2 and k3 are never negative.

    And the gradient of k2, so weighted, is the full KL's: what the straight-through variants are for. The gradient of
    k1 so weighted is 0.
    """
    for batch in CASES[:10]:
        logits, ref = batch.logits[0][0], batch.ref_logits[0][0]
        ours, theirs = [value(v) for v in kl.log_softmax(logits)], [value(v) for v in kl.log_softmax(ref)]
        wanted = value(kl.full(logits, ref))
        for kind in ("k1", "k3"):
            estimates = [value(kl.estimate(a, b, kind)) for a, b in zip(ours, theirs, strict=True)]
            assert math.fsum(math.exp(a) * e for a, e in zip(ours, estimates, strict=True)) == pytest.approx(wanted)
        slopes = {}
        for kind in ("k1", "k3+", "k2"):
            (leaf,) = leaves([logits])
            log_probs = kl.log_softmax(leaf)
            total = sum(
                (math.exp(a) * kl.estimate(p, b, kind) for a, p, b in zip(ours, log_probs, theirs, strict=True)),
                torch.zeros((), dtype=torch.float64),
            )
            slopes[kind] = gradients(total, [leaf])[0]
        (leaf,) = leaves([logits])
        exact = gradients(kl.full(leaf, ref), [leaf])[0]
        assert slopes["k2"] == pytest.approx(exact, abs=1e-12)
        assert slopes["k3+"] == pytest.approx(exact, abs=1e-12)
        assert slopes["k1"] == pytest.approx([0.0] * len(logits), abs=1e-12)
        assert mean([abs(slope) for slope in exact]) > 1e-3


def test_weights_sum_to_what_the_mode_says() -> None:
    for batch in CASES:
        counts = [sum(mask) for mask in batch.masks]
        rows = sum(count > 0 for count in counts)
        wanted = {
            "token-mean": 1,
            "token-sum": sum(counts),
            "seq-mean-token-sum": sum(counts) / rows,
            "seq-mean-token-mean": 1,
            "seq-mean-token-sum-norm": sum(counts) / rows / 7,
        }
        for mode, total in wanted.items():
            weights = aggregation.weights(batch.masks, mode, norm=7)
            assert math.fsum(w for row in weights for w in row) == pytest.approx(total), mode
            for row, mask in zip(weights, batch.masks, strict=True):
                assert all((w > 0) == kept for w, kept in zip(row, mask, strict=True))
