"""Requests to and results from rollout engines. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence or stop token, or a stop string, was produced."""
    LENGTH = "length"
    """``max_tokens`` was reached."""
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. Temperature 0 is greedy; ``top_k`` 0 and ``top_p`` 1 switch their filters off.

    Args:
        stop: stop strings; generation ends when one appears in the decoded completion. The tokens that made it are kept.
        stop_token_ids: further token ids that end a row, beside the model's end-of-sequence ids.
        seed: row ``i`` of the request (prompt-major) samples from its own stream derived from (seed, i), so a row's
            tokens do not depend on what else is in the batch. None takes a fresh seed.
        row_offset: number of the request's first row in those streams. A part of a larger request, on one of several
            replicas, then samples what the whole request would.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    row_offset: int = 0


@dataclass(frozen=True)
class GenerateRequest:
    """``prompts``: token ids, one list a prompt."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Args:
        prompt_index: index into the request's prompts.
        sample_index: 0 .. n-1 within the prompt.
        token_ids: sampled tokens, an ending token included.
        log_probs: natural log-prob of each token under the distribution it was sampled from (temperature and filters
            applied); for greedy decoding, under temperature 1.
        finish_reason: why it ended.
    """

    prompt_index: int
    sample_index: int
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason

    @property
    def sampled(self) -> list[bool]:
        """True for each of ``token_ids`` that the policy has sampled; all of them, but for a :class:`Conversation`."""
        return [True] * len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Turn:
    """One turn of the policy in a conversation, and what followed it.

    Args:
        start, end: its tokens are ``token_ids[start:end]`` of the conversation; those up to the next turn's start are the
            observation and the template's glue around it.
        text: as the environment has read it, without special tokens.
        reward: of this turn.
        observation: the text of the messages that followed; empty after the last turn.
    """

    start: int
    end: int
    text: str
    reward: float = 0.0
    observation: str = ""


class Ending(StrEnum):
    """Why a conversation is over."""

    DONE = "done"
    """The environment said so."""
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    """The budget of tokens was used up, or has no place for the next observation and an answer."""
    ERROR = "error"
    """The environment failed, and ``rollout.environment.on_error`` is zero."""


@dataclass(frozen=True)
class Conversation(Completion):
    """A completion of several turns: ``token_ids`` are all tokens after the prompt, sampled turns and observations in the order
    in which the policy saw them; ``log_probs`` are 0.0 at the tokens of observations.

    Args:
        metrics: further numbers that the environment has given, by name.
    """

    turns: tuple[Turn, ...] = ()
    ending: Ending = Ending.DONE
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def sampled(self) -> list[bool]:
        mask = [False] * len(self.token_ids)
        for turn in self.turns:
            mask[turn.start : turn.end] = [True] * (turn.end - turn.start)
        return mask

    @property
    def num_sampled(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)

    @property
    def reward(self) -> float:
        """The sum of the turns' rewards; 0 where the environment failed."""
        return 0.0 if self.ending is Ending.ERROR else sum(turn.reward for turn in self.turns)

    @property
    def answer_text(self) -> str:
        """The text of the last turn."""
        return self.turns[-1].text if self.turns else ""


@dataclass(frozen=True)
class ScoreRequest:
    """``sequences``: whole token sequences; ``topk`` > 0 asks for that many alternatives a position."""

    sequences: Sequence[Sequence[int]]
    topk: int = 0
    temperature: float = 1.0


@dataclass(frozen=True)
class TokenScores:
    """``log_probs[t]`` is log p(token t | tokens before it); 0.0 at t = 0. ``topk_*`` are [T][K] when asked for."""

    log_probs: list[float]
    topk_ids: list[list[int]] = field(default_factory=list)
    topk_log_probs: list[list[float]] = field(default_factory=list)
