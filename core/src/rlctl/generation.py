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
