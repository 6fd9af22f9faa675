"""Losses of pairs against the independent float64 ones, values and gradients by each token, on random masks and lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle import preference
from oracle.basics import gradients, leaves, value
from oracle.cases import Case, cases

from rlctl.algorithms.preference.losses import dpo_losses, reward_losses
from rlctl.algorithms.preference.slopes import SlopeLoss, linearised, row_sums, slopes
from rlctl.batch import PackedBatch, concat, pack, padding_like
from rlctl.config.schema_preference import DPOConfig, RMConfig

NEAR = 1e-6


def average(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(losses)).mean()


def usable(batch: Case) -> bool:
    """Rows as a trainer makes them: each response has a token."""
    return len(batch.masks) >= 2 and all(any(mask) for mask in batch.masks)


def trimmed(batch: Case) -> Case:
    """The rows that have a trained token, the rest left out."""
    kept = [i for i, mask in enumerate(batch.masks) if any(mask)]
    kept = kept[: len(kept) // 2 * 2]
    rows = ("masks", "log_probs", "ref_log_probs", "values")
    return Case(**{**vars(batch), **{name: [getattr(batch, name)[i] for i in kept] for name in rows}})


CASES = [case for batch in cases(60) if usable(case := trimmed(batch))]


@dataclass
class Read:
    """A reader of given numbers."""

    numbers: torch.Tensor

    def log_prob(self) -> torch.Tensor:
        return self.numbers

    def values(self) -> torch.Tensor:
        return self.numbers


def packed(case: Case) -> PackedBatch:
    """Rows in the order chosen, rejected, chosen, ...: even rows of the case are the chosen ones."""
    return pack(
        {"loss_mask": case.masks, "ours": case.log_probs, "theirs": case.ref_log_probs},
        dtypes={"loss_mask": torch.bool, "ours": torch.float32, "theirs": torch.float32},
    )


def token_gradients(batch: PackedBatch, losses: Any, name: str, of_values: bool = False) -> tuple[Any, torch.Tensor]:
    """(losses, ``[N]`` the gradient of their mean by each token), the way that the trainer takes."""
    found, slope = slopes(losses, row_sums(batch, batch.items[name]))
    ready = linearised(batch, slope, batch.items[name])
    numbers = batch.items[name].clone().requires_grad_()
    out = SlopeLoss(of_values)(Read(numbers), ready)
    out.loss.backward()
    assert out.maxes["train/rescored_diff_max"] == 0.0
    assert numbers.grad is not None
    return found, numbers.grad


SETTINGS: list[dict[str, Any]] = [
    {"loss_type": "sigmoid", "beta": 0.1},
    {"loss_type": "sigmoid", "beta": 0.5, "label_smoothing": 0.2},
    {"loss_type": "sigmoid", "beta": 0.3, "average_log_probs": True},
    {"loss_type": "sigmoid", "beta": 0.3, "reference_free": True},
    {"loss_type": "ipo", "beta": 0.4},
    {"loss_type": "ipo", "beta": 0.4, "average_log_probs": True},
    {"loss_type": "hinge", "beta": 0.25},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_dpo_is_the_papers(settings: dict[str, Any]) -> None:
    assert len(CASES) >= 20
    config = DPOConfig(**settings)
    kinked = 0
    for case in CASES:
        batch = packed(case)
        lengths = row_sums(batch, torch.ones(batch.num_items))
        reference = None if config.reference_free else row_sums(batch, batch.items["theirs"])
        found, by_token = token_gradients(batch, lambda rows: dpo_losses(rows, config, lengths, reference), "ours")  # noqa: B023
        rows = leaves(case.log_probs)
        theirs = (None, None) if config.reference_free else (case.ref_log_probs[0::2], case.ref_log_probs[1::2])
        wanted = preference.dpo(
            rows[0::2], rows[1::2], *theirs, case.masks[0::2], case.masks[1::2],
            kind=config.loss_type, beta=config.beta, label_smoothing=config.label_smoothing, average=config.average_log_probs,
        )  # fmt: skip
        assert found.loss.tolist() == pytest.approx([value(loss) for loss in wanted.losses], abs=NEAR, rel=NEAR)
        assert found.chosen_rewards.tolist() == pytest.approx(wanted.chosen_rewards, abs=NEAR, rel=NEAR)
        assert found.rejected_rewards.tolist() == pytest.approx(wanted.rejected_rewards, abs=NEAR, rel=NEAR)
        exact = [g for row in gradients(average(wanted.losses), rows) for g in row]
        if config.loss_type == "hinge" and 0.0 in found.loss.tolist():
            kinked += 1
        assert by_token.tolist() == pytest.approx(exact, abs=NEAR, rel=NEAR)
    assert kinked or config.loss_type != "hinge", "pairs beyond the margin are among the cases"


def test_simpo_is_sigmoid_of_means_without_a_reference() -> None:
    """Its eq. 6 by the other oracle: a margin moves the difference of rewards, as in a reward model's loss."""
    config = DPOConfig(loss_type="simpo", beta=2.0, simpo_gamma=0.7)
    for case in CASES:
        batch = packed(case)
        lengths = row_sums(batch, torch.ones(batch.num_items))
        found, by_token = token_gradients(batch, lambda rows: dpo_losses(rows, config, lengths, None), "ours")  # noqa: B023
        rows = leaves(case.log_probs)
        means = preference.response_log_probs(rows, case.masks, average=True)
        rewards = [2.0 * m for m in means]
        wanted = preference.reward_model(rewards[0::2], rewards[1::2], margins=[0.7] * (len(rows) // 2))
        assert found.loss.tolist() == pytest.approx([value(loss) for loss in wanted], abs=NEAR, rel=NEAR)
        exact = [g for row in gradients(average(wanted), rows) for g in row]
        assert by_token.tolist() == pytest.approx(exact, abs=NEAR, rel=NEAR)


def test_the_nll_term_is_the_chosen_responses_mean() -> None:
    plain, added = DPOConfig(), DPOConfig(nll_coef=0.5)
    for case in CASES[:10]:
        batch = packed(case)
        lengths = row_sums(batch, torch.ones(batch.num_items))
        rows, reference = row_sums(batch, batch.items["ours"]), row_sums(batch, batch.items["theirs"])
        one, two = (slopes(lambda x, c=c: dpo_losses(x, c, lengths, reference), rows) for c in (plain, added))  # noqa: B023
        means = [value(m) for m in preference.response_log_probs(case.log_probs, case.masks, average=True)]
        assert (two[0].loss - one[0].loss).tolist() == pytest.approx([-0.5 * m for m in means[0::2]], abs=NEAR)
        pairs = len(means) // 2
        extra = (two[1] - one[1]).tolist()
        assert extra[1::2] == pytest.approx([0.0] * pairs, abs=1e-12)
        assert extra[0::2] == pytest.approx([-0.5 / sum(mask) / pairs for mask in case.masks[0::2]], abs=NEAR)


@pytest.mark.parametrize("margins", [False, True])
def test_a_reward_models_loss_is_the_papers(margins: bool) -> None:
    for case in CASES:
        # One number a row is read, that of its last token.
        scores = [row[-1] for row in case.values]
        given = [0.25 * i for i in range(len(scores) // 2)] if margins else None
        margin = None if given is None else torch.tensor(given, dtype=torch.float64)
        rows = torch.tensor(scores, dtype=torch.float64)
        found, slope = slopes(lambda x: reward_losses(x, RMConfig(), margin), rows)  # noqa: B023
        (leaf,) = leaves([scores])
        wanted = preference.reward_model(leaf[0::2], leaf[1::2], margins=given)
        assert found.loss.tolist() == pytest.approx([value(loss) for loss in wanted], abs=NEAR, rel=NEAR)
        assert slope.tolist() == pytest.approx(gradients(average(wanted), [leaf])[0], abs=NEAR, rel=NEAR)
        centered, pulled = slopes(lambda x: reward_losses(x, RMConfig(center_rewards_coefficient=0.1), margin), rows)  # noqa: B023
        sums = [a + b for a, b in zip(scores[0::2], scores[1::2], strict=True)]
        assert (centered.loss - found.loss).tolist() == pytest.approx([0.1 * s * s for s in sums], abs=NEAR)
        assert (pulled - slope)[0::2].tolist() == pytest.approx([0.2 * s / len(sums) for s in sums], abs=NEAR)


def test_extreme_pairs_are_finite() -> None:
    rows = torch.tensor([-1e5, 0.0, 0.0, -1e5], dtype=torch.float64)
    for kind in ("sigmoid", "hinge", "ipo", "simpo"):
        config = DPOConfig(loss_type=kind)  # pyright: ignore[reportArgumentType]
        found, slope = slopes(lambda x: dpo_losses(x, config, torch.ones(4), torch.zeros(4)), rows)  # noqa: B023
        assert bool(torch.isfinite(found.loss).all())
        assert bool(torch.isfinite(slope).all()), kind
    assert reward_losses(rows, RMConfig(), None).loss.tolist() == pytest.approx([1e5, 0.0])


def test_the_two_rows_of_a_pair_may_lie_anywhere() -> None:
    """The weighted sum over tokens, cut row by row and with padding beside, has the same gradient as whole."""
    for case in CASES[:10]:
        batch = packed(case)
        lengths = row_sums(batch, torch.ones(batch.num_items))
        reference = row_sums(batch, batch.items["theirs"])
        _, whole = token_gradients(batch, lambda rows: dpo_losses(rows, DPOConfig(), lengths, reference), "ours")  # noqa: B023
        _, slope = slopes(
            lambda rows: dpo_losses(rows, DPOConfig(), lengths, reference),  # noqa: B023
            row_sums(batch, batch.items["ours"]),
        )
        ready = linearised(batch, slope, batch.items["ours"])
        parts = [ready.select([row]) for row in reversed(range(ready.num_rows))]
        apart = concat([*parts, padding_like(ready)])
        numbers = apart.items["ours"].clone().requires_grad_()
        start = 0
        for part in [*parts, padding_like(ready)]:
            out = SlopeLoss()(Read(numbers[start : start + part.num_items]), part)
            out.loss.backward()
            start += part.num_items
        assert numbers.grad is not None
        pieces = list(numbers.grad.split(apart.lengths))[:-1]
        assert torch.equal(torch.cat(pieces[::-1]), whole)
        assert float(numbers.grad[-2:].abs().sum()) == 0.0


def test_a_second_pass_that_says_something_else_is_seen() -> None:
    batch = packed(CASES[0])
    ready = linearised(batch, torch.ones(batch.num_rows), batch.items["ours"])
    out = SlopeLoss()(Read(batch.items["ours"] + 0.25), ready)
    assert math.isclose(float(out.maxes["train/rescored_diff_max"]), 0.25)
