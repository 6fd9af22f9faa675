"""Prompts in, completions out, rewards on them: shared by training steps and validation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.data.prompts import PromptEncoder
from rlctl.data.rewards import RewardResult, RewardScorer
from rlctl.data.rows import Row
from rlctl.generation import Completion, FinishReason
from rlctl.roles.rollout import RolloutRole
from rlctl.tracking.reporter import Reporter


@dataclass(frozen=True)
class ScoredRollout:
    """Completions of a list of rows, prompt-major, with rewards."""

    rows: Sequence[Row]
    prompts: Sequence[list[int]]
    completions: Sequence[Completion]
    texts: Sequence[str]
    rewards: Sequence[RewardResult]

    @property
    def scores(self) -> list[float]:
        return [r.score for r in self.rewards]

    def samples(self, step: int, split: str, limit: int, encoder: PromptEncoder) -> list[dict[str, Any]]:
        """``limit`` completions as records for samples.jsonl, one sample of each prompt first."""
        order = sorted(range(len(self.completions)), key=lambda i: (self.completions[i].sample_index, i))[:limit]
        return self.records(step, split, sorted(order), encoder)

    def records(self, step: int, split: str, indices: Sequence[int], encoder: PromptEncoder) -> list[dict[str, Any]]:
        """The completions ``indices`` as records for samples.jsonl."""
        return [
            {
                "step": step,
                "split": split,
                "prompt": encoder.decode(self.prompts[self.completions[i].prompt_index]),
                "completion": self.texts[i],
                "answer": self.rows[self.completions[i].prompt_index].answer,
                "score": self.rewards[i].score,
                "components": self.rewards[i].components,
                "num_tokens": len(self.completions[i].token_ids),
                "finish_reason": str(self.completions[i].finish_reason),
            }
            for i in indices
        ]


def watch_rows(parts: Sequence[ScoredRollout], limit: int) -> list[tuple[int, int]]:
    """(part, completion) of the validation samples to keep for a whole run, chosen at its first validation.

    Half of them are those with the lowest scores, where learning will show; the rest are the first ones.
    """
    places = [(p, i) for p, part in enumerate(parts) for i in range(len(part.completions))]
    worst = sorted(places, key=lambda place: (parts[place[0]].scores[place[1]], place))[: (limit + 1) // 2]
    rest = [place for place in places if place not in worst]
    return sorted(worst + rest[: limit - len(worst)])


def score_completions(
    rows: Sequence[Row],
    prompts: Sequence[list[int]],
    completions: Sequence[Completion],
    encoder: PromptEncoder,
    scorer: RewardScorer,
) -> ScoredRollout:
    """Decode and reward completions."""
    texts = [encoder.decode(c.token_ids) for c in completions]
    rewards = scorer.score(
        [rows[c.prompt_index] for c in completions],
        texts,
        [str(c.finish_reason) for c in completions],
        [len(c.token_ids) for c in completions],
    )
    return ScoredRollout(rows, prompts, completions, texts, rewards)


def length_metrics(rollout: ScoredRollout) -> dict[str, float]:
    """``response_length/*`` and ``prompt_length/*``, in tokens; ``clip_ratio`` is the share cut by the limit."""
    response = [len(c.token_ids) for c in rollout.completions]
    prompt = [len(p) for p in rollout.prompts]
    cut = sum(c.finish_reason is FinishReason.LENGTH for c in rollout.completions)
    return {
        "response_length/mean": sum(response) / len(response),
        "response_length/max": float(max(response)),
        "response_length/min": float(min(response)),
        "response_length/clip_ratio": cut / len(response),
        "prompt_length/mean": sum(prompt) / len(prompt),
        "prompt_length/max": float(max(prompt)),
        "prompt_length/min": float(min(prompt)),
    }


def validate(
    rows: Sequence[Row],
    rollout: RolloutRole,
    encoder: PromptEncoder,
    scorer: RewardScorer,
    *,
    batch_size: int,
    seed: int,
    reporter: Reporter,
) -> tuple[dict[str, float], list[ScoredRollout]]:
    """Sample every validation row under ``rollout.val_kwargs`` and reward it.

    Returns:
        ``val/score/mean``, ``val/score/<data_source>`` and lengths, and the rollouts batch by batch.
    """
    scores: list[float] = []
    lengths: list[int] = []
    by_source: dict[str, list[float]] = defaultdict(list)
    parts: list[ScoredRollout] = []
    with reporter.phase("validation", len(rows)) as bar:
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            prompts = [encoder.prompt_ids(row) for row in batch]
            part = score_completions(batch, prompts, rollout.validate(prompts, seed + start), encoder, scorer)
            parts.append(part)
            for completion, score in zip(part.completions, part.scores, strict=True):
                scores.append(score)
                lengths.append(len(completion.token_ids))
                by_source[batch[completion.prompt_index].data_source].append(score)
            bar.advance(len(batch))
    metrics = {"val/score/mean": sum(scores) / len(scores), "val/response_length/mean": sum(lengths) / len(lengths)}
    if len(by_source) > 1:
        metrics |= {f"val/score/{name}": sum(v) / len(v) for name, v in by_source.items()}
    return metrics, parts
