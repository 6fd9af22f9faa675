"""The rollouts of a step: one generation batch, or with dynamic sampling as many as it takes to fill the batch with prompts that
teach something."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from rlctl.algorithms.dynamic_sampling import has_signal
from rlctl.config.schema_algorithm import FilterGroupsConfig
from rlctl.errors import GuardError
from rlctl.generation import Completion
from rlctl.trainers.advantages import component_values
from rlctl.trainers.evaluation import ScoredRollout, score_completions
from rlctl.trainers.rewards import truncated
from rlctl.trainers.seeds import step_seed

if TYPE_CHECKING:
    from rlctl.trainers.rl import RLTrainer, StepTimer

_STREAM = 16
"""First of the seed streams of the generation batches after the first one, which samples as a step without dynamic sampling does."""


@dataclass(frozen=True)
class Gathered:
    """What a step trains on.

    Args:
        num_tokens: generated tokens, those of prompts that were left out too.
        seconds: in which they were generated.
        staleness: the most updates that a batch is older than the policy.
        metrics: of dynamic sampling, and of sampling ahead.
    """

    rollout: ScoredRollout
    num_tokens: int
    seconds: float
    staleness: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


def gather(trainer: RLTrainer, step: int, timer: StepTimer) -> Gathered:
    """Sample and score the prompts of one step. The sampler moves on by whole generation batches, so its state is where a resumed run
    goes on.

    Raises:
        GuardError: with dynamic sampling, no prompt of all the generation batches teaches anything.
    """
    seed, section = trainer.context.config.trainer.seed, trainer.context.config.algorithm.filter_groups
    if section is None:
        one = _sample(trainer, step, step_seed(seed, step), timer)
        return Gathered(one.rollout, _tokens(one.rollout), one.seconds, one.staleness, _how_stale(trainer, [one]))
    wanted = trainer.context.config.data.train_batch_size
    kept: list[ScoredRollout] = []
    scores: list[float] = []
    drawn: list[_Batch] = []
    found = sampled = num_tokens = batches = 0
    present: set[str] = set()
    while found < wanted and batches < section.max_num_gen_batches:
        stream = _STREAM + batches if batches else 0
        drawn.append(_sample(trainer, step, step_seed(seed, step, stream), timer))
        part = drawn[-1].rollout
        batches += 1
        prompts = prompts_with_signal(trainer, section, part)
        kept.append(of_prompts(part, prompts[: wanted - found]))
        found += len(prompts)
        sampled += len(part.prompts)
        num_tokens += _tokens(part)
        scores += part.scores
        present |= {name for reward in part.rewards for name in reward.components}
    compared = "value of each component" if _by_component(trainer, section) else section.metric
    if found == 0:
        _require_metric(section.metric, present)
        raise GuardError(
            f"no prompt of {batches} generation batches has samples that differ in their {compared}",
            found=f"{sampled} prompts, scores from {min(scores):g} to {max(scores):g}",
            wanted="some prompts that the policy answers now well, now badly",
            next="take data of another difficulty, raise algorithm.filter_groups.max_num_gen_batches or rollout.n, or take "
            "algorithm.filter_groups out",
        )
    if found < wanted:
        trainer.context.reporter.message(
            f"step {step}: trains on {found} of {wanted} prompts, the others of {sampled} have samples of one {compared}; "
            f"algorithm.filter_groups.max_num_gen_batches={section.max_num_gen_batches} ended the search"
        )
    metrics = {
        "train/num_gen_batches": float(batches),
        "dynamic_sampling/prompts_sampled": float(sampled),
        "dynamic_sampling/prompts_constant": float(sampled - found),
        "dynamic_sampling/prompts_surplus": float(max(0, found - wanted)),
        "dynamic_sampling/score_mean": sum(scores) / len(scores),
        **_how_stale(trainer, drawn),
    }
    return Gathered(
        joined(kept), num_tokens, sum(one.seconds for one in drawn), max(one.staleness for one in drawn), metrics
    )


@dataclass(frozen=True)
class _Batch:
    """One generation batch, with its rewards; seconds and staleness as in :class:`rlctl.trainers.ahead.Drawn`."""

    rollout: ScoredRollout
    seconds: float
    staleness: int = 0


def _how_stale(trainer: RLTrainer, drawn: Sequence[_Batch]) -> dict[str, float]:
    """What is said of batches that were drawn ahead."""
    if trainer.ahead is None:
        return {}
    found = [one.staleness for one in drawn]
    return {
        "training/staleness_mean": sum(found) / len(found),
        "training/staleness_max": float(max(found)),
        "perf/time_per_gen": sum(one.seconds for one in drawn),
    }


def _sample(trainer: RLTrainer, step: int, seed: int, timer: StepTimer) -> _Batch:
    """One generation batch of the sampler's next prompts; drawn ahead, it has a seed of its own already."""
    reporter = trainer.context.reporter
    if trainer.ahead is not None:
        drawn = trainer.ahead.draw(step, timer)
        with timer("reward"), reporter.phase("reward", None):
            scored = score_completions(drawn.rows, drawn.prompts, drawn.completions, trainer.encoder, trainer.scorer)
        return _Batch(scored, drawn.seconds, drawn.staleness)
    start = time.perf_counter()
    with timer("gen"):
        rows = [trainer.train_rows[i] for i in trainer.sampler.next()]
        with reporter.phase("generate", len(rows) * trainer.context.config.rollout.n) as bar:
            prompts, completions = trainer.rollout.converse(rows, trainer.encoder, "sample", seed, bar.advance)
    seconds = time.perf_counter() - start
    with timer("reward"), reporter.phase("reward", None):
        return _Batch(score_completions(rows, prompts, completions, trainer.encoder, trainer.scorer), seconds)


def prompts_with_signal(trainer: RLTrainer, section: FilterGroupsConfig, rollout: ScoredRollout) -> list[int]:
    """The prompts of ``rollout``, in its order, whose samples differ in ``section.metric``.

    For an estimator that scales each component by itself (gdpo) they differ where any component does: components that differ
    and whose sum does not give advantages too.
    """
    if section.metric == "reward":
        values = trainer.rewards.unscaled(rollout)
    else:
        named = [
            r.score if section.metric == "score" else r.components.get(section.metric, 0.0) for r in rollout.rewards
        ]
        values = torch.tensor(named, dtype=torch.float64)
    groups = torch.tensor([c.prompt_index for c in rollout.completions])
    masked = trainer.context.config.algorithm.mask_truncated_completions
    trained = ~truncated(rollout) if masked else None
    signal = has_signal(values, groups, trained)
    if _by_component(trainer, section):
        names = [name for name, weight in trainer.advantages.components if weight]
        for one in component_values(rollout.rewards, names):
            signal |= has_signal(one, groups, trained)
    return sorted(set(groups[signal].tolist()))


def _by_component(trainer: RLTrainer, section: FilterGroupsConfig) -> bool:
    """True where the estimator reads the components one by one, and no single one of them was chosen."""
    return section.metric in ("reward", "score") and trainer.advantages.takes("components")


def _require_metric(metric: str, present: set[str]) -> None:
    """Tell a metric that nothing has from one in which nothing differs.

    Raises:
        GuardError: no row had the component ``metric``.
    """
    if metric in ("reward", "score") or metric in present:
        return
    raise GuardError(
        f"no row has the reward component {metric} of algorithm.filter_groups.metric",
        found=", ".join(sorted(present)),
        wanted="reward, score, or one of these",
        next="correct algorithm.filter_groups.metric",
    )


def of_prompts(rollout: ScoredRollout, prompts: Sequence[int]) -> ScoredRollout:
    """The part of ``rollout`` that is of ``prompts``, which are numbered anew from 0."""
    place = {prompt: i for i, prompt in enumerate(prompts)}
    own = [i for i, c in enumerate(rollout.completions) if c.prompt_index in place]
    return ScoredRollout(
        [rollout.rows[p] for p in prompts],
        [rollout.prompts[p] for p in prompts],
        [_moved(rollout.completions[i], place[rollout.completions[i].prompt_index]) for i in own],
        [rollout.texts[i] for i in own],
        [rollout.rewards[i] for i in own],
    )


def joined(parts: Sequence[ScoredRollout]) -> ScoredRollout:
    """Rollouts one after the other, their prompts numbered on: a row that was drawn twice is two prompts."""
    starts = [sum(len(part.prompts) for part in parts[:i]) for i in range(len(parts))]
    return ScoredRollout(
        [row for part in parts for row in part.rows],
        [prompt for part in parts for prompt in part.prompts],
        [
            _moved(c, start + c.prompt_index)
            for start, part in zip(starts, parts, strict=True)
            for c in part.completions
        ],
        [text for part in parts for text in part.texts],
        [reward for part in parts for reward in part.rewards],
    )


def _moved(completion: Completion, prompt: int) -> Completion:
    return replace(completion, prompt_index=prompt)


def _tokens(rollout: ScoredRollout) -> int:
    return sum(c.num_sampled for c in rollout.completions)
