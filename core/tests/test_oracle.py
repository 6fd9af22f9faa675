"""The reference advantages, against numbers computed by hand and against what must not change them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from oracle import advantages, token_advantages
from oracle.basics import mean, sample_variance, unmasked, whiten
from oracle.cases import Case, case, cases

CASES = cases(60)
CLOSE = 1e-12


def close(found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]], within: float = CLOSE) -> bool:
    """Same shape, and no number differs by more than ``within``, relative to 1 or its size."""
    assert [len(row) for row in found] == [len(row) for row in wanted]
    pairs = [(a, b) for row, other in zip(found, wanted, strict=True) for a, b in zip(row, other, strict=True)]
    return all(abs(a - b) <= within * max(1.0, abs(b)) for a, b in pairs)


ONE = [[True]] * 4


# ---- by hand ------------------------------------------------------------------------------------------------------
def test_grpo_by_hand() -> None:
    # Group 7: rewards 1, 0, 2. Mean 1, squared differences 0, 1, 1, sample variance 2 / 2 = 1, std 1.
    # Group 3: one row of reward 5: mean 0, std 1. Rows of two tokens, the second of the first masked.
    masks = [[True, False], [True, True], [True], [True]]
    found = advantages.grpo([1, 5, 0, 2], masks, [7, 3, 7, 7])
    by_std = 1 / (1 + 1e-6)
    assert close(found, [[0, 0], [5 * by_std, 5 * by_std], [-by_std], [by_std]])
    assert advantages.grpo([1, 5, 0, 2], masks, [7, 3, 7, 7], norm_by_std=False) == [[0, 0], [5, 5], [-1], [1]]
    assert advantages.dr_grpo([1, 5, 0, 2], masks, [7, 3, 7, 7]) == [[0, 0], [5, 5], [-1], [1]]


def test_grpo_passk_by_hand() -> None:
    # Best 3, second 1: 3 - 1 = 2 for the best, 0 for the others. Std: mean 4/3, squared differences
    # (5/3)^2 + (4/3)^2 + (1/3)^2 = (25 + 16 + 1) / 9 = 14/3, over n - 1 = 2: 7/3.
    found = advantages.grpo_passk([3, 0, 1], ONE[:3], [0, 0, 0], norm_by_std=False)
    assert found == [[2], [0], [0]]
    found = advantages.grpo_passk([3, 0, 1], ONE[:3], [0, 0, 0])
    assert close(found, [[2 / (math.sqrt(7 / 3) + 1e-6)], [0], [0]])
    # Two that are best: leaving one out changes nothing.
    assert advantages.grpo_passk([3, 3, 1], ONE[:3], [0, 0, 0]) == [[0], [0], [0]]
    with pytest.raises(ValueError, match="one row"):
        advantages.grpo_passk([3, 0, 1], ONE[:3], [0, 0, 1])


def test_rloo_by_hand() -> None:
    # 1 - (4 + 7) / 2 = -4.5;  4 - (1 + 7) / 2 = 0;  7 - (1 + 4) / 2 = 4.5; alone: 9 - 0.
    assert advantages.rloo([1, 4, 9, 7], ONE, [0, 0, 1, 0]) == [[-4.5], [0], [9], [4.5]]


def test_opo_by_hand() -> None:
    # Lengths 1 and 3, rewards 1 and 0: b = (1 * 1 + 3 * 0) / 4 = 0.25. A masked token is not counted.
    found = advantages.opo([1, 0], [[True, False], [True, True, True]], [0, 0])
    assert found == [[0.75, 0], [-0.25, -0.25, -0.25]]
    assert advantages.opo([1], [[True]], [0]) == [[1]]


def test_gpg_by_hand() -> None:
    # Group 0: mean 0.5, advantages 0.5 and -0.5. Group 1: equal rewards, advantages 0. alpha = 4 / 2 = 2.
    assert advantages.gpg([1, 0, 0.1, 0.1], ONE, [0, 0, 1, 1]) == [[1], [-1], [0], [0]]
    # Of the rewards 3 are not 0: alpha = 4 / 3.
    found = advantages.gpg([1, 0, 0.1, 0.1], ONE, [0, 0, 1, 1], count="rewards")
    assert close(found, [[2 / 3], [-2 / 3], [0], [0]])
    assert close(advantages.gpg([1, 0], ONE[:2], [0, 0], f_norm=4.0), [[0.125], [-0.125]])
    # (0.1 + 0.1 + 0.1) / 3 is not 0.1 in floats; the rows count as equal all the same, and the alone row's 1 counts.
    found = advantages.gpg([0.1, 0.1, 0.1, 1.0], ONE, [0, 0, 0, 1])
    assert close(found, [[0], [0], [0], [4]])


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # After the group mean 0.5: tokens 0.5, -0.5, -0.5, -0.5. Mean -0.25, squared differences 0.5625 + 3 * 0.0625 = 0.75,
    # sample variance 0.75 / 3 = 0.25: (0.5 + 0.25) / 0.5 = 1.5 and (-0.5 + 0.25) / 0.5 = -0.5.
    found = advantages.reinforce_plus_plus_baseline([1, 0], [[True], [True, True, False, True]], [0, 0], eps=0.0)
    assert close(found, [[1.5], [-0.5, -0.5, 0, -0.5]])


def test_gdpo_by_hand() -> None:
    # First reward 1, 0: mean 0.5, sample std sqrt(0.5): +-0.5 / sqrt(0.5) = +-sqrt(0.5). Second 0, 10: mean 5, sample
    # std sqrt(50): -+sqrt(0.5). Weights 1 and 0.5: +-0.5 sqrt(0.5) = +-sqrt(0.125). Whitened: mean 0, sample variance
    # 2 * 0.125 / 1 = 0.25, std 0.5: +-sqrt(0.125) / 0.5 = +-sqrt(0.5).
    found = advantages.gdpo([[1, 0], [0, 10]], ONE[:2], [0, 0], weights=[1, 0.5], group_eps=0.0, eps=0.0)
    assert close(found, [[math.sqrt(0.5)], [-math.sqrt(0.5)]])
    # Equal weights: the two cancel, as they must; summing the rewards first would have the second win.
    assert close(advantages.gdpo([[1, 0], [0, 10]], ONE[:2], [0, 0], group_eps=0.0), [[0], [0]], 1e-9)


def test_gae_by_hand() -> None:
    # gamma 0.5, lam 0.5. Tokens: value 1, 2, 4; rewards 0, 1, 3.
    # delta_2 = 3 - 4 = -1;                A_2 = -1                          return 3
    # delta_1 = 1 + 0.5 * 4 - 2 = 1;       A_1 = 1 + 0.25 * -1 = 0.75        return 2.75
    # delta_0 = 0 + 0.5 * 2 - 1 = 0;       A_0 = 0 + 0.25 * 0.75 = 0.1875    return 1.1875
    found = token_advantages.gae([[0, 1, 3]], [[1, 2, 4]], [[True] * 3], gamma=0.5, lam=0.5, whitened=False)
    assert found == ([[0.1875, 0.75, -1]], [[1.1875, 2.75, 3]])
    # The same tokens with masked ones between them, whatever these hold.
    found = token_advantages.gae(
        [[0, 9, 1, 9, 3]], [[1, 8, 2, 8, 4]], [[True, False, True, False, True]], gamma=0.5, lam=0.5, whitened=False
    )
    assert found == ([[0.1875, 0, 0.75, 0, -1]], [[1.1875, 0, 2.75, 0, 3]])


def test_whitening_by_hand() -> None:
    # 1, 3, 5 (the 100 is masked): mean 3, sample variance (4 + 0 + 4) / 2 = 4.
    found = whiten([[1, 100], [3, 5]], [[True, False], [True, True]], eps=0.0)
    assert found == [[-1, 0], [0, 1]]
    found = whiten([[1, 100], [3, 5]], [[True, False], [True, True]], eps=5.0)
    assert close(found, [[-2 / 3, 0], [0, 2 / 3]])  # sqrt(4 + 5) = 3
    with pytest.raises(ValueError, match="two"):
        whiten([[1.0], [2.0]], [[True], [False]])


def test_reinforce_plus_plus_by_hand() -> None:
    # gamma 0.5: returns 0 + 0.5 * 4 = 2 and 4 (the masked token between costs no discount); the other row -3.
    # Mean 1, squared differences 1, 9, 16, sample variance 13.
    found, returns = token_advantages.reinforce_plus_plus(
        [[0, 7, 4], [-3]], [[True, False, True], [True]], gamma=0.5, eps=0.0
    )
    assert returns == [[2, 0, 4], [-3]]
    assert close(found, [[1 / math.sqrt(13), 0, 3 / math.sqrt(13)], [-4 / math.sqrt(13)]])


def test_remax_by_hand() -> None:
    # To go: 1 + 2 = 3, 2; less the greedy response's 0.5.
    found = token_advantages.remax([[1, 2], [1]], [[True, True], [False]], [0.5, 9])
    assert found == ([[2.5, 1.5], [0]], [[3, 2], [0]])


def test_optimal_token_baseline_by_hand() -> None:
    # Vocabulary of two, so sum pi^2 = pi^2 + (1 - pi)^2 and 1 - 2 pi + sum pi^2 = 2 (1 - pi)^2.
    # Row 0: pi 0.5, 0.5: steps 0.5, 0.5; W = 0.5, 1. Row 1: pi 0.5: W = 0.5. Rewards 1 and 0 at the end.
    # t = 0: B = (1 * 0.5 + 0 * 0.5) / 1 = 0.5. t = 1: row 0 alone there, B = 1.
    half = math.log(0.5)
    squares = [[0.5, 0.5], [0.5]]
    probs = [[half, half], [half]]
    found = token_advantages.optimal_token_baseline(
        [[0, 1], [0]], [[True, True], [True]], [0, 0], probs, squares, eps=0.0
    )
    assert close(found[0], [[0.5, 0.0], [-0.5]])
    assert found[1] == [[1, 1], [0]]
    # Weights 2 on row 0: steps 4 * 0.5: B_0 = 1 * 2 / (2 + 0.5) = 0.8.
    found = token_advantages.optimal_token_baseline(
        [[0, 1], [0]],
        [[True, True], [True]],
        [0, 0],
        probs,
        squares,
        rollout_is_weights=[[2, 2], [1]],
        eps=0.0,
    )
    assert close(found[0], [[0.2, 0.0], [-0.8]])
    # W accumulates. Row 0 as before with reward 3; row 1: pi 0.5, then 1 (a step of 0): W = 0.5, 0.5, reward 0.
    # t = 0: B = 3 * 0.5 / 1 = 1.5. t = 1: B = 3 * 1 / 1.5 = 2.
    found = token_advantages.optimal_token_baseline(
        [[0, 3], [0, 0]], [[True, True]] * 2, [0, 0], [[half, half], [half, 0.0]], [[0.5, 0.5], [0.5, 1.0]], eps=0.0
    )
    assert close(found[0], [[1.5, 1.0], [-1.5, -2.0]])
    # Alone: no baseline.
    found = token_advantages.optimal_token_baseline([[0, 1]], [[True, True]], [0], [[half, half]], [[0.5, 0.5]])
    assert found[0] == [[1, 1]]


# ---- what must not matter, and what must ---------------------------------------------------------------------------
def outcome(name: str, batch: Case, rewards: Sequence[float] | None = None) -> list[list[float]]:
    rewards = batch.rewards if rewards is None else rewards
    if name == "gdpo":
        return advantages.gdpo([rewards, *batch.components[1:]], batch.masks, batch.groups, weights=[1, 0.5, 0.25])
    return getattr(advantages, name)(rewards, batch.masks, batch.groups)


def permuted(batch: Case, order: list[int], rewards: Sequence[float]) -> tuple[list, list, list]:
    return [rewards[i] for i in order], [batch.masks[i] for i in order], [batch.groups[i] for i in order]


OUTCOME = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "gdpo"]


@pytest.mark.parametrize("name", [*OUTCOME, "grpo_passk"])
def test_a_shift_of_all_rewards_changes_nothing(name: str) -> None:
    """In groups of two and more: a group of one has no mean of its own. Shifts are dyadic, so that floats are exact."""
    for batch in cases(40, min_group=2):
        shifted = [reward + 2.0 for reward in batch.rewards]
        assert close(outcome(name, batch, shifted), outcome(name, batch), 1e-9), batch.seed


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus_baseline", "gdpo"])
def test_a_scale_of_all_rewards_changes_almost_nothing(name: str) -> None:
    """Only through the eps: 1e-6 of the deviations here, which are at least 0.05 where they are not 0."""
    for batch in cases(40, min_group=2):
        scaled = [reward * 4.0 for reward in batch.rewards]
        assert close(outcome(name, batch, scaled), outcome(name, batch), 1e-4), batch.seed


@pytest.mark.parametrize("name", [*OUTCOME, "grpo_passk"])
def test_the_order_of_the_rows_does_not_matter(name: str) -> None:
    for batch in cases(20, min_group=2):
        order = list(range(len(batch.groups)))
        random.Random(batch.seed).shuffle(order)
        rewards, masks, groups = permuted(batch, order, batch.rewards)
        if name == "gdpo":
            parts = [[part[i] for i in order] for part in batch.components]
            found = advantages.gdpo(parts, masks, groups)
            wanted = advantages.gdpo(batch.components, batch.masks, batch.groups)
        else:
            found = getattr(advantages, name)(rewards, masks, groups)
            wanted = outcome(name, batch)
        assert close(found, [wanted[i] for i in order], 1e-9), batch.seed


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo"])
def test_groups_do_not_touch_each_other(name: str) -> None:
    """The advantages of a group are those that it has alone."""
    for batch in CASES[:30]:
        wanted = outcome(name, batch)
        for group in set(batch.groups):
            rows = [row for row, of_row in enumerate(batch.groups) if of_row == group]
            alone = getattr(advantages, name)(*permuted(batch, rows, batch.rewards))
            assert close(alone, [wanted[row] for row in rows]), batch.seed


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gpg"])
def test_a_group_of_one_keeps_its_reward(name: str) -> None:
    for reward in (0.5, -2.0):
        (found,) = getattr(advantages, name)([reward], [[True, True]], ["only"])
        assert found == pytest.approx([reward, reward], rel=2e-6)


@pytest.mark.parametrize("name", [*OUTCOME, "grpo_passk"])
def test_equal_rewards_give_no_advantage(name: str) -> None:
    masks = [[True, True], [True], [True, False, True]]
    if name == "gdpo":
        found = advantages.gdpo([[0.5] * 3, [2.0] * 3], masks, ["g"] * 3)
    else:
        found = getattr(advantages, name)([0.5] * 3, masks, ["g"] * 3)
    assert found == [[0, 0], [0], [0, 0, 0]]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_group_advantages_sum_to_zero(name: str) -> None:
    for batch in cases(30, min_group=2):
        per_row = getattr(advantages, name)(batch.rewards, [[True]] * len(batch.groups), batch.groups)
        for group in set(batch.groups):
            total = math.fsum(per_row[row][0] for row, of_row in enumerate(batch.groups) if of_row == group)
            assert abs(total) < 1e-9, batch.seed


def test_rloo_is_dr_grpo_times_n_over_n_minus_one() -> None:
    for size in (2, 3, 5):
        rewards = [float(value) for value in range(size)]
        masks = [[True]] * size
        plain = advantages.dr_grpo(rewards, masks, [0] * size)
        wanted = [[value * size / (size - 1) for value in row] for row in plain]
        assert close(advantages.rloo(rewards, masks, [0] * size), wanted)


def test_opo_is_dr_grpo_where_lengths_are_equal() -> None:
    masks = [[True, True]] * 3
    assert close(advantages.opo([1, 2, 6], masks, [0] * 3), advantages.dr_grpo([1, 2, 6], masks, [0] * 3))


def process() -> dict[str, Callable[[Case], tuple[list[list[float]], list[list[float]]]]]:
    return {
        "gae": lambda c: token_advantages.gae(c.token_rewards, c.values, c.masks, gamma=0.9, lam=0.8),
        "reinforce_plus_plus": lambda c: token_advantages.reinforce_plus_plus(c.token_rewards, c.masks, gamma=0.9),
        "remax": lambda c: token_advantages.remax(c.token_rewards, c.masks, c.greedy_rewards),
        "optimal_token_baseline": lambda c: token_advantages.optimal_token_baseline(
            c.token_rewards, c.masks, c.groups, c.old_log_probs, c.sum_pi_squared
        ),
    }


@pytest.mark.parametrize("name", [*OUTCOME, *process()])
def test_masked_tokens_get_zero_and_the_others_numbers(name: str) -> None:
    for batch in CASES:
        found = process()[name](batch) if name in process() else (outcome(name, batch),)
        for rows in found:
            assert [len(row) for row in rows] == batch.lengths
            for row, mask in zip(rows, batch.masks, strict=True):
                assert all(math.isfinite(value) for value in row)
                assert all(value == 0 for value, kept in zip(row, mask, strict=True) if not kept)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_whitened_advantages_have_mean_zero_and_variance_one(name: str) -> None:
    for batch in CASES:
        found, returns = process()[name](batch)
        values = unmasked(found, batch.masks)
        assert abs(mean(values)) < 1e-9, batch.seed
        if name == "reinforce_plus_plus" and sample_variance(unmasked(returns, batch.masks)) < 1e-3:
            continue
        assert sample_variance(values) == pytest.approx(1, abs=1e-3), batch.seed


def test_gae_with_lam_one_is_the_discounted_return_less_the_value() -> None:
    for batch in CASES[:30]:
        found, returns = token_advantages.gae(
            batch.token_rewards, batch.values, batch.masks, gamma=0.9, lam=1.0, whitened=False
        )
        _, discounted = token_advantages.reinforce_plus_plus(batch.token_rewards, batch.masks, gamma=0.9)
        assert close(returns, discounted, 1e-9)
        for row, mask in enumerate(batch.masks):
            for token, kept in enumerate(mask):
                wanted = discounted[row][token] - batch.values[row][token] if kept else 0.0
                assert found[row][token] == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("name", list(process()))
def test_what_a_masked_token_holds_does_not_matter(name: str) -> None:
    """Masked tokens taken out of the rows leave the advantages of the others as they are.

    Not for optimal_token_baseline, which compares rows position by position: there only their contents are changed.
    """
    for batch in CASES[:30]:
        found = process()[name](batch)[0]
        kept = [[token for token, keep in enumerate(mask) if keep] for mask in batch.masks]

        def pick(rows: list[list[float]], kept: list[list[int]] = kept) -> list[list[float]]:
            return [[row[token] for token in tokens] for row, tokens in zip(rows, kept, strict=True)]

        def spoil(rows: list[list[float]], masks: list[list[bool]] = batch.masks) -> list[list[float]]:
            return [
                [value if keep else 77.0 for value, keep in zip(row, mask, strict=True)]
                for row, mask in zip(rows, masks, strict=True)
            ]

        fields = dict(batch.__dict__)
        change = spoil if name == "optimal_token_baseline" else pick
        for field in ("token_rewards", "values", "sum_pi_squared"):
            fields[field] = change(fields[field])
        if change is pick:
            fields["masks"] = [[True] * len(tokens) for tokens in kept]
            assert close(process()[name](Case(**fields))[0], pick(found), 1e-9), batch.seed
        else:
            assert close(process()[name](Case(**fields))[0], found, 1e-9), batch.seed


# ---- the cases themselves ------------------------------------------------------------------------------------------
def test_the_cases_hold_what_they_promise() -> None:
    seen = cases(300)
    assert case(17) == case(17) != case(18)
    sizes = {batch.groups.count(group) for batch in seen for group in batch.groups}
    assert sizes == {1, 2, 3, 4, 5}
    assert {length for batch in seen for length in batch.lengths} == set(range(1, 8))
    assert sum(any(not any(mask) for mask in batch.masks) for batch in seen) > 60
    assert sum(any(all(mask) for mask in batch.masks) for batch in seen) > 200
    shuffled = [batch for batch in seen if len(set(batch.groups)) > 1 and batch.groups != sorted(batch.groups)]
    assert len(shuffled) > 150
    equal = ties = 0
    for batch in seen:
        for group in set(batch.groups):
            rewards = [r for r, g in zip(batch.rewards, batch.groups, strict=True) if g == group]
            equal += len(rewards) > 1 and len(set(rewards)) == 1
            ties += len(set(rewards)) not in (1, len(rewards))
    assert equal > 50
    assert ties > 50
    steps = [
        new - old
        for batch in seen
        for row, old_row in zip(batch.log_probs, batch.old_log_probs, strict=True)
        for new, old in zip(row, old_row, strict=True)
    ]
    assert max(steps) > 3
    assert min(steps) < -8
    assert max(map(abs, steps)) <= 14
    assert sum(step == 0 for step in steps) > 100
    assert sum(abs(step) < 0.2 for step in steps) > len(steps) / 3
    for batch in seen:
        assert sum(map(sum, batch.masks)) >= 2
        for rows in (batch.log_probs, batch.old_log_probs, batch.ref_log_probs, batch.rollout_log_probs):
            assert [len(row) for row in rows] == batch.lengths
            assert all(-64 < value < 0 and (value * 4096).is_integer() for row in rows for value in row)
        for row, squares in zip(batch.old_log_probs, batch.sum_pi_squared, strict=True):
            for value, square in zip(row, squares, strict=True):
                assert math.exp(value) ** 2 <= square <= 1
                assert 1 - 2 * math.exp(value) + square >= 0
