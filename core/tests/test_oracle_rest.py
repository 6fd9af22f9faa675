"""The reference value loss, rollout correction, DAPO and preference losses, by hand and by identities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracle import aggregation, dapo, preference, rollout_correction
from oracle import value as critic
from oracle.basics import gradients, leaves, value
from oracle.cases import Case, cases

CASES = cases(40)
LOG2 = math.log(2)


# ---- the critic ----------------------------------------------------------------------------------------------------
def of_value(new: float, old: float, wanted: float, cliprange: float | None) -> tuple[float, float]:
    rows = leaves([[new]])
    (((term,),)) = critic.value_loss(rows, [[old]], [[wanted]], [[True]], cliprange=cliprange)
    return value(term), gradients(term, rows)[0][0]


def test_value_loss_by_hand() -> None:
    assert of_value(3.0, 2.5, 1.0, 0.5) == (2, 2)  # 1/2 (3 - 1)^2, within the range
    # Moved from 0 to 3, clipped to 0.5, wanted 1: 1/2 max(4, 0.25): not clipped, for the error is larger unclipped.
    assert of_value(3.0, 0.0, 1.0, 0.5) == (2, 2)
    # Wanted 3: 1/2 max(0, 6.25): the clipped error, and no gradient.
    assert of_value(3.0, 0.0, 3.0, 0.5) == (3.125, 0)
    # From 0 down to -3, clipped to -0.5, wanted -2: 1/2 max(1, 2.25).
    assert of_value(-3.0, 0.0, -2.0, 0.5) == (1.125, 0)
    assert of_value(3.0, 0.0, 3.5, None) == (0.125, -0.5)
    masked = critic.value_loss([[5.0, 5.0]], [[5.0, 5.0]], [[0.0, 0.0]], [[False, True]])
    assert [value(term) for term in masked[0]] == [0, 12.5]


def test_value_loss_is_the_larger_of_two_errors() -> None:
    for batch in CASES[:20]:
        rows = leaves(batch.values)
        terms = critic.value_loss(rows, batch.old_values, batch.returns, batch.masks, cliprange=0.3)
        found = gradients(aggregation.aggregate(terms, batch.masks, "token-sum"), rows)
        for row, mask in enumerate(batch.masks):
            for token, kept in enumerate(mask):
                if not kept:
                    assert (value(terms[row][token]), found[row][token]) == (0, 0)
                    continue
                leaf = torch.tensor(batch.values[row][token], dtype=torch.float64, requires_grad=True)
                old, wanted = batch.old_values[row][token], batch.returns[row][token]
                clipped = torch.clamp(leaf, old - 0.3, old + 0.3)
                loss = 0.5 * torch.maximum((leaf - wanted) ** 2, (clipped - wanted) ** 2)
                loss.backward()
                assert leaf.grad is not None
                assert value(terms[row][token]) == pytest.approx(float(loss.detach()), rel=1e-12)
                assert found[row][token] == pytest.approx(float(leaf.grad), rel=1e-12)


def test_explained_variance_by_hand() -> None:
    masks = [[True, True], [True, False]]
    returns = [[1.0, 2.0], [3.0, 99.0]]
    assert critic.explained_variance(returns, returns, masks) == 1
    assert critic.explained_variance([[7.0, 7.0], [7.0, 0.0]], returns, masks) == 0
    # Residuals 1 - 1, 2 - 3, 3 - 2 = 0, -1, 1: sum of squares 2, as large as that of the returns: 0. Twice: -3.
    assert critic.explained_variance([[1.0, 3.0], [2.0, 0.0]], returns, masks) == 0
    assert critic.explained_variance([[1.0, 4.0], [1.0, 0.0]], returns, masks) == -3
    # An offset is explained: residuals 10, 10, 10.
    assert critic.explained_variance([[-9.0, -8.0], [-7.0, 0.0]], returns, masks) == 1
    assert math.isnan(critic.explained_variance(returns, [[1.0, 1.0], [1.0, 5.0]], masks))
    assert math.isnan(critic.explained_variance(returns, returns, [[True, False], [False, False]]))


# ---- rollout correction --------------------------------------------------------------------------------------------
# Ratios 2 and 1/4 (and 100, masked) in the first row, 4 in the second.
TRAIN = [[-1 + LOG2, -1.0, -1 - 2 * LOG2], [-2.0]]
ROLLOUT = [[-1.0, -1 - math.log(100), -1.0], [-2 - 2 * LOG2]]
MASKS = [[True, False, True], [True]]


def near(rows: list[list[float]]) -> Any:
    return [pytest.approx(row, rel=1e-12) for row in rows]


def test_truncated_weights_by_hand() -> None:
    def found(level: str, threshold: float) -> list[list[float]]:
        return rollout_correction.truncated_weights(TRAIN, ROLLOUT, MASKS, level=level, threshold=threshold)

    assert found("token", 3.0) == near([[2, 0, 0.25], [3]])
    assert found("token", 1.5) == near([[1.5, 0, 0.25], [1.5]])
    assert found("sequence", 3.0) == near([[0.5, 0, 0.5], [3]])  # 2 * 1/4
    assert found("geometric", 9.0) == near([[math.sqrt(0.5), 0, math.sqrt(0.5)], [4]])
    with pytest.raises(ValueError, match="tokens"):
        found("tokens", 1.0)


def test_rejection_by_hand() -> None:
    def found(level: str, upper: float, lower: float | None = None) -> list[list[bool]]:
        return rollout_correction.rejection_masks(TRAIN, ROLLOUT, MASKS, level=level, upper=upper, lower=lower)

    assert found("token", 3.0, 0.2) == [[True, False, True], [False]]
    assert found("token", 3.0) == [[True, False, False], [False]]  # from 1/3
    assert found("sequence", 5.0, 0.4) == [[True, False, True], [True]]
    assert found("sequence", 5.0, 0.6) == [[False, False, False], [True]]
    assert found("geometric", 5.0, 0.6) == [[True, False, True], [True]]  # 0.707
    assert found("geometric", 3.0, 0.6) == [[True, False, True], [False]]
    # The bounds belong to the interval.
    assert rollout_correction.rejection_masks([[-1.0]], [[-1.0]], [[True]], level="token", upper=1.0) == [[True]]


def test_one_token_rows_are_the_same_at_every_level() -> None:
    """And the sequence's ratio is the geometric one to the power of the length, the product of the tokens'."""
    for batch in CASES:
        of = {
            level: rollout_correction.ratios(batch.old_log_probs, batch.rollout_log_probs, batch.masks, level)
            for level in rollout_correction.LEVELS
        }
        for row, mask in enumerate(batch.masks):
            kept = [token for token, keep in enumerate(mask) if keep]
            if kept:
                sequence, geometric = of["sequence"][row][kept[0]], of["geometric"][row][kept[0]]
                assert sequence == pytest.approx(math.prod(of["token"][row][token] for token in kept), rel=1e-9)
                assert sequence == pytest.approx(geometric ** len(kept), rel=1e-9)
                if len(kept) == 1:
                    assert sequence == geometric == of["token"][row][kept[0]]


def test_the_same_policy_weighs_one_and_rejects_nothing() -> None:
    for batch in CASES:
        ours = batch.old_log_probs
        for level in rollout_correction.LEVELS:
            weights = rollout_correction.truncated_weights(ours, ours, batch.masks, level=level, threshold=2.0)
            assert weights == [[float(kept) for kept in mask] for mask in batch.masks]
            kept = rollout_correction.rejection_masks(ours, ours, batch.masks, level=level, upper=1.001)
            assert kept == batch.masks


# ---- DAPO ----------------------------------------------------------------------------------------------------------
def test_overlong_by_hand() -> None:
    # The limit 20, the last 4 of it punished: 16 is free, then a quarter a token.
    found = [dapo.soft_overlong_punishment(length, max_len=20, cache=4) for length in (1, 15, 16, 17, 18, 20, 21, 99)]
    assert found == [0, 0, 0, -0.25, -0.5, -1, -1, -1]
    assert dapo.soft_overlong_punishment(18, max_len=20, cache=4, factor=3.0) == -1.5
    assert dapo.soft_overlong_punishment(21, max_len=20, cache=4, factor=3.0) == -3
    assert dapo.overlong_filter(MASKS, [False, True]) == [[True, False, True], [False]]
    assert dapo.overlong_filter(MASKS, [True, False]) == [[False] * 3, [True]]


# ---- preferences ---------------------------------------------------------------------------------------------------
def test_dpo_by_hand() -> None:
    # Chosen -1 - 2 = -3 (a masked token beside), reference -5; rejected -4, reference -4.5: h = 2 - 0.5 = 1.5.
    chosen, rejected = leaves([[-1.0, -2.0, -7.0]]), leaves([[-4.0]])
    given = ([[-2.0, -3.0, -9.0]], [[-4.5]], [[True, True, False]], [[True]])

    def found(**settings: Any) -> tuple[float, list[float], list[float]]:
        pairs = preference.dpo(chosen, rejected, *given, **settings)
        (loss,) = pairs.losses
        return value(loss), gradients(loss, chosen)[0], gradients(loss, rejected)[0]

    # -log sigmoid(3); its slope by h is -beta sigmoid(-3).
    slope = 2 / (1 + math.exp(3))
    loss, up, down = found(beta=2.0)
    assert loss == pytest.approx(math.log(1 + math.exp(-3)))
    assert up == pytest.approx([-slope, -slope, 0])
    assert down == pytest.approx([slope])
    # A tenth of the label the other way: 0.9 log(1 + e^-3) + 0.1 log(1 + e^3).
    wanted = 0.9 * math.log(1 + math.exp(-3)) + 0.1 * math.log(1 + math.exp(3))
    assert found(beta=2.0, label_smoothing=0.1)[0] == pytest.approx(wanted)
    # ipo: (1.5 - 1/4)^2 = 1.5625, slope 2.5.
    loss, up, down = found(beta=2.0, kind="ipo")
    assert (loss, up, down) == (1.5625, [2.5, 2.5, 0], [-2.5])
    # Means over tokens: h = (-1.5 + 2.5) - 0.5 = 0.5: (0.5 - 0.25)^2.
    assert found(beta=2.0, kind="ipo", average=True)[0] == 0.0625
    # hinge: 1 - 0.5 * 1.5 = 0.25, slope -0.5; and nothing beyond the margin.
    assert found(beta=0.5, kind="hinge") == (0.25, [-0.5, -0.5, 0], [0.5])
    assert found(beta=2.0, kind="hinge") == (0, [0, 0, 0], [0])
    with pytest.raises(ValueError, match="kto"):
        found(kind="kto")

    pairs = preference.dpo(chosen, rejected, *given, beta=2.0)
    assert (pairs.chosen_rewards, pairs.rejected_rewards) == ([4], [1])
    # Without a reference h = -3 + 4 = 1.
    free = preference.dpo(chosen, rejected, None, None, [[True, True, False]], [[True]], beta=2.0)
    assert value(free.losses[0]) == pytest.approx(math.log(1 + math.exp(-2)))
    assert (free.chosen_rewards, free.rejected_rewards) == ([-6], [-8])


def halves(batch: Case) -> Any:
    """The batch's rows as pairs: the first half chosen, the second rejected."""
    number = len(batch.masks) // 2
    ours, theirs, masks = batch.log_probs, batch.ref_log_probs, batch.masks
    end = 2 * number
    return (
        *(ours[:number], ours[number:end], theirs[:number], theirs[number:end]),
        *(masks[:number], masks[number:end]),
    )


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_what_dpo_must_satisfy(kind: str) -> None:
    for batch in CASES:
        chosen, rejected, ref_chosen, ref_rejected, ours, theirs = halves(batch)
        found = preference.dpo(chosen, rejected, ref_chosen, ref_rejected, ours, theirs, kind=kind, beta=0.25)
        assert len(found.losses) == len(ours)
        # The policy equal to the reference: h = 0, whatever the rows.
        same = preference.dpo(chosen, rejected, chosen, rejected, ours, theirs, kind=kind, beta=0.25)
        at_zero = {"sigmoid": LOG2, "ipo": 4.0, "hinge": 1.0}[kind]
        assert [value(loss) for loss in same.losses] == pytest.approx([at_zero] * len(ours))
        # A zero reference is no reference.
        nothing = [[[0.0] * len(row) for row in rows] for rows in (chosen, rejected)]
        zero = preference.dpo(chosen, rejected, nothing[0], nothing[1], ours, theirs, kind=kind, beta=0.25)
        free = preference.dpo(chosen, rejected, None, None, ours, theirs, kind=kind, beta=0.25)
        assert [value(loss) for loss in zero.losses] == [value(loss) for loss in free.losses]
        # The loss follows from the margin of the implicit rewards.
        for loss, up, down in zip(found.losses, found.chosen_rewards, found.rejected_rewards, strict=True):
            margin = up - down
            wanted = {
                "sigmoid": max(-margin, 0) + math.log1p(math.exp(-abs(margin))),
                "ipo": (margin / 0.25 - 2) ** 2,
                "hinge": max(0.0, 1 - margin),
            }[kind]
            assert value(loss) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_label_smoothing_of_a_half_prefers_neither() -> None:
    for batch in CASES[:10]:
        chosen, rejected, ref_chosen, ref_rejected, ours, theirs = halves(batch)
        settings: dict[str, Any] = {"label_smoothing": 0.5, "beta": 0.3}
        one = preference.dpo(chosen, rejected, ref_chosen, ref_rejected, ours, theirs, **settings)
        other = preference.dpo(rejected, chosen, ref_rejected, ref_chosen, theirs, ours, **settings)
        assert [value(loss) for loss in one.losses] == pytest.approx([value(loss) for loss in other.losses])


def test_reward_model_by_hand() -> None:
    chosen, rejected = leaves([[2.0, 0.0, -900.0]]), leaves([[1.0, 0.0, 900.0]])
    losses = preference.reward_model(chosen[0], rejected[0])
    # Differences 1, 0, -1800: log(1 + e^-1), log 2, and 1800 without an overflow.
    assert [value(loss) for loss in losses] == pytest.approx([math.log(1 + math.exp(-1)), LOG2, 1800])
    slopes = gradients(losses[0] + losses[1] + losses[2], chosen)[0]
    assert slopes == pytest.approx([-1 / (1 + math.exp(1)), -0.5, -1])
    # With a margin of 1 the first pair is where the second was.
    losses = preference.reward_model(chosen[0], rejected[0], margins=[1.0, 0.0, 0.0])
    assert value(losses[0]) == pytest.approx(LOG2)
