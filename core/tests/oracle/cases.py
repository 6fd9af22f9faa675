"""Seeded random batches: ragged rows, masks, groups in shuffled order, ties, extreme ratios.

Every number is a multiple of 2^-12 (rewards: of 2^-3) and small, so that float32 holds it exactly: a difference
between a float32 version and the reference is the version's arithmetic, never its input.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

VOCABULARY = 5
GRID = 4096


@dataclass(frozen=True)
class Case:
    """One batch. Per row: groups, rewards, greedy_rewards, truncated, components (component, row). Per token the rest."""

    seed: int
    groups: list[int]
    masks: list[list[bool]]
    rewards: list[float]
    greedy_rewards: list[float]
    components: list[list[float]]
    component_weights: list[float]
    truncated: list[bool]
    token_rewards: list[list[float]]
    """Mostly 0 with the row's reward at its last unmasked token; sometimes dense."""
    values: list[list[float]]
    old_values: list[list[float]]
    returns: list[list[float]]
    advantages: list[list[float]]
    """One value a row, as the outcome estimators give; in some cases different at each token. 0.0 where masked."""
    log_probs: list[list[float]]
    old_log_probs: list[list[float]]
    ref_log_probs: list[list[float]]
    rollout_log_probs: list[list[float]]
    sum_pi_squared: list[list[float]]
    logits: list[list[list[float]]]
    ref_logits: list[list[list[float]]]

    @property
    def lengths(self) -> list[int]:
        return [len(mask) for mask in self.masks]


def _grid(value: float, steps: int = GRID) -> float:
    return round(value * steps) / steps


def _log_prob(rng: random.Random) -> float:
    """Of a sampled token: mostly near 0, with a tail down to about -12."""
    return min(-_grid(rng.expovariate(1.0) * rng.choice((0.05, 0.5, 2.0))), -1 / GRID)


def _moved(rng: random.Random, log_prob: float) -> float:
    """The same token under another policy: equal, near, far, or extreme (the log ratio of the two stays within +-14)."""
    step = rng.choices(
        (0.0, rng.gauss(0, 0.02), rng.gauss(0, 0.3), rng.gauss(0, 2), rng.uniform(-14, 14)), (1, 4, 4, 2, 1)
    )
    return min(_grid(log_prob + max(min(step[0], 14.0), -14.0)), -1 / GRID)


def _group_rewards(rng: random.Random, size: int) -> list[float]:
    """All equal, right or wrong, graded with ties, or any."""
    kind = rng.choice(("equal", "binary", "graded", "any", "any"))
    if kind == "equal":
        return [rng.choice((0.0, 1.0, -0.5, 0.375))] * size
    if kind == "binary":
        return [float(rng.random() < 0.5) for _ in range(size)]
    if kind == "graded":
        return [rng.randrange(-1, 4) / 2 for _ in range(size)]
    return [_grid(rng.gauss(0, 1), 8) for _ in range(size)]


def _mask(rng: random.Random, length: int) -> list[bool]:
    kind = rng.choice(("all", "all", "random", "turns"))
    if kind == "all":
        return [True] * length
    if kind == "random":
        return [rng.random() < 0.7 for _ in range(length)]
    start, stop = sorted((rng.randrange(length + 1), rng.randrange(length + 1)))
    return [not start <= token < stop for token in range(length)]


def case(seed: int, *, min_group: int = 1, max_group: int = 5, min_tokens: int = 2) -> Case:
    """The batch of ``seed``: 1 to 5 groups of ``min_group`` to ``max_group`` rows of 1 to 7 tokens, shuffled.

    One batch in three has a row that is masked throughout. There are always at least ``min_tokens`` unmasked tokens.
    """
    rng = random.Random(seed)
    drawn: list[tuple[int, float]] = []
    for group in rng.sample(range(100), rng.randint(1, 5)):
        drawn += [(group, reward) for reward in _group_rewards(rng, rng.randint(min_group, max_group))]
    rng.shuffle(drawn)
    groups = [group for group, _ in drawn]
    rewards = [reward for _, reward in drawn]
    number = len(drawn)

    lengths = [rng.randint(1, 7) for _ in range(number)]
    masks = [_mask(rng, length) for length in lengths]
    if number > 1 and seed % 3 == 0:
        hidden = rng.randrange(number)
        masks[hidden] = [False] * lengths[hidden]
    # Too few tokens to whiten: some row is made whole, and long enough.
    if sum(map(sum, masks)) < min_tokens:
        row = rng.randrange(number)
        lengths[row] = max(lengths[row], min_tokens)
        masks[row] = [True] * lengths[row]

    def tokens(draw) -> list[list[float]]:
        return [[draw() for _ in range(length)] for length in lengths]

    def moved(rows: list[list[float]]) -> list[list[float]]:
        return [[_moved(rng, value) for value in row] for row in rows]

    token_rewards = [[0.0] * length for length in lengths]
    dense = rng.random() < 0.3
    for row, mask in enumerate(masks):
        kept = [token for token, keep in enumerate(mask) if keep]
        if kept:
            token_rewards[row][kept[-1]] = rewards[row]
        if dense:
            token_rewards[row] = [value + _grid(rng.gauss(0, 0.3), 8) for value in token_rewards[row]]

    values = tokens(lambda: _grid(rng.gauss(0, 1)))
    per_token = rng.random() < 0.3
    advantages = []
    for mask in masks:
        of_row = rng.choice((0.0, 1.0, _grid(rng.gauss(0, 1)), _grid(rng.gauss(0, 1))))
        drawn_row = [_grid(rng.gauss(0, 1)) if per_token else of_row for _ in mask]
        advantages.append([value if keep else 0.0 for value, keep in zip(drawn_row, mask, strict=True)])

    old_log_probs = tokens(lambda: _log_prob(rng))
    log_probs = moved(old_log_probs)
    # Of a distribution that gives the token this probability: between all the rest on one other token and spread out.
    sum_pi_squared = [
        [math.exp(value) ** 2 + (1 - math.exp(value)) ** 2 * rng.uniform(0.01, 1) for value in row]
        for row in old_log_probs
    ]
    logits = [[[_grid(rng.gauss(0, 2)) for _ in range(VOCABULARY)] for _ in mask] for mask in masks]
    return Case(
        seed=seed,
        groups=groups,
        masks=masks,
        rewards=rewards,
        greedy_rewards=[rng.randrange(0, 5) / 4 for _ in range(number)],
        components=[rewards, [float(rng.random() < 0.5) for _ in drawn], [_grid(rng.gauss(0, 5), 8) for _ in drawn]],
        component_weights=[1.0, 0.5, 0.25],
        truncated=[rng.random() < 0.3 for _ in drawn],
        token_rewards=token_rewards,
        values=values,
        old_values=[[_grid(value + rng.gauss(0, 0.4)) for value in row] for row in values],
        returns=tokens(lambda: _grid(rng.gauss(0, 1))),
        advantages=advantages,
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        ref_log_probs=moved(log_probs),
        rollout_log_probs=moved(old_log_probs),
        # Upwards: 1 - 2 pi + sum pi^2 is at least (1 - pi)^2 and must not become negative by rounding.
        sum_pi_squared=[[math.ceil(value * GRID) / GRID for value in row] for row in sum_pi_squared],
        logits=logits,
        ref_logits=[[[_grid(v + rng.gauss(0, 1)) for v in token] for token in row] for row in logits],
    )


def cases(number: int, *, start: int = 0, **shape: int) -> list[Case]:
    """``number`` cases of consecutive seeds."""
    return [case(seed, **shape) for seed in range(start, start + number)]
