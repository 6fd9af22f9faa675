"""Prompts in, completions out, rewards on them: shared by training steps and validation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.data.prompts import PromptEncoder
from rlctl.data.rewards import RewardResult, RewardScorer
from rlctl.data.rows import Row
from rlctl.generation import Completion, Conversation, Ending, FinishReason
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
                "completion": self._transcript(i, encoder),
                "answer": self.rows[self.completions[i].prompt_index].answer,
                "score": self.rewards[i].score,
                "components": self.rewards[i].components,
                "num_tokens": len(self.completions[i].token_ids),
                "finish_reason": str(self.completions[i].finish_reason),
                **_turns(self.completions[i]),
            }
            for i in indices
        ]

    def _transcript(self, i: int, encoder: PromptEncoder) -> str:
        one = self.completions[i]
        return encoder.decode(one.token_ids) if isinstance(one, Conversation) else self.texts[i]


def _turns(completion: Completion) -> dict[str, Any]:
    """What a sample says of the turns of a conversation; nothing of a single completion."""
    if not isinstance(completion, Conversation):
        return {}
    turns = [
        {"text": t.text, "observation": t.observation, "reward": t.reward, "num_tokens": t.end - t.start}
        for t in completion.turns
    ]
    return {"turns": turns, "ending": str(completion.ending)}


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
    """Decode and reward completions; of a conversation the text is that of its last turn, and its length what was sampled."""
    texts = [c.answer_text if isinstance(c, Conversation) else encoder.decode(c.token_ids) for c in completions]
    rewards = scorer.score(
        [rows[c.prompt_index] for c in completions],
        texts,
        [str(c.finish_reason) for c in completions],
        [c.num_sampled for c in completions],
        [c if isinstance(c, Conversation) else None for c in completions],
    )
    return ScoredRollout(rows, prompts, completions, texts, rewards)


def length_metrics(rollout: ScoredRollout) -> dict[str, float]:
    """``response_length/*`` and ``prompt_length/*``, in tokens; ``clip_ratio`` is the share cut by the limit."""
    response = [len(c.token_ids) for c in rollout.completions]  # of a conversation with what the environment said
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
        **turn_metrics(rollout.completions),
    }


def turn_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """``num_turns/*``, ``environment/*`` of conversations; nothing where there are none."""
    found = [c for c in completions if isinstance(c, Conversation)]
    if not found:
        return {}
    turns, share = [len(c.turns) for c in found], 1 / len(found)
    return {
        "num_turns/mean": sum(turns) * share,
        "num_turns/max": float(max(turns)),
        "num_turns/min": float(min(turns)),
        "num_turns/clip_ratio": sum(c.ending is Ending.MAX_TURNS for c in found) * share,
        "environment/errors": float(sum(c.ending is Ending.ERROR for c in found)),
        "environment/sampled_tokens/mean": sum(c.num_sampled for c in found) * share,
        "environment/observed_tokens/mean": sum(len(c.token_ids) - c.num_sampled for c in found) * share,
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
            prompts, completions = rollout.converse(batch, encoder, "validate", seed + start)
            part = score_completions(batch, prompts, completions, encoder, scorer)
            parts.append(part)
            for completion, score in zip(part.completions, part.scores, strict=True):
                scores.append(score)
                lengths.append(len(completion.token_ids))
                by_source[batch[completion.prompt_index].data_source].append(score)
            bar.advance(len(batch))
    metrics = {"val/score/mean": sum(scores) / len(scores), "val/response_length/mean": sum(lengths) / len(lengths)}
    if len(by_source) > 1:
        metrics |= {f"val/score/{name}": sum(v) / len(v) for name, v in by_source.items()}
    turns = turn_metrics([c for part in parts for c in part.completions])
    return metrics | {f"val/{name}": value for name, value in turns.items()}, parts
