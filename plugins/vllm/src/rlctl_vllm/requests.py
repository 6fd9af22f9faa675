"""Requests of rlctl as vLLM's, and its outputs as completions and scores. One row, one vLLM request, one stream of numbers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.errors import EngineError
from rlctl.generation import Completion, FinishReason, GenerateRequest, SamplingParams, ScoreRequest, TokenScores
from rlctl_vllm import compat

_MASK = (1 << 64) - 1
_HIGHEST_TEMPERATURE = 2.0
_LOWEST_TEMPERATURE = 0.01
"""vLLM raises smaller ones to it, and says so only in its log."""


def row_seed(seed: int, row: int) -> int:
    """Seed of a row's own stream, from the request's seed and the row's number: the finaliser of SplitMix64 over both."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    return mix((mix((seed * golden + 1) & _MASK) + (row + 1) * golden) & _MASK) >> 1


@dataclass(frozen=True)
class Rules:
    """When a row ends.

    Args:
        ends: token ids that end a row.
        stop: texts that end a row, found in the decoded completion.
        tokenizer: needed for them.
    """

    ends: tuple[int, ...]
    stop: tuple[str, ...] = ()
    tokenizer: Any = None

    def __post_init__(self) -> None:
        if self.stop and self.tokenizer is None:
            raise EngineError(
                "stop strings need the model's tokenizer",
                found="no tokenizer",
                wanted="model.tokenizer or a model.path with one",
                next="set model.tokenizer, or stop by token id",
            )

    def stops_in(self, tokens: Sequence[int]) -> bool:
        """Whether the text so far has one of the stop strings in it."""
        if not self.stop:
            return False
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return any(s in text for s in self.stop)


def check_request(request: GenerateRequest, vocab: int, longest: int) -> None:
    """Refuse what vLLM would take in silence as something else, or end the process for.

    Raises:
        EngineError: names the parameter, or the prompt.
    """
    params = request.params
    for name, value, good, wanted in (
        ("n", params.n, params.n >= 1, "at least 1"),
        ("max_tokens", params.max_tokens, params.max_tokens >= 1, "at least 1"),
        (
            "temperature",
            params.temperature,
            params.temperature == 0 or _LOWEST_TEMPERATURE <= params.temperature <= _HIGHEST_TEMPERATURE,
            f"0 (greedy), or {_LOWEST_TEMPERATURE} to {_HIGHEST_TEMPERATURE}: vLLM raises smaller ones and refuses greater ones",
        ),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "more than 0, at most 1"),
        ("top_k", params.top_k, params.top_k >= 0, "0 (off) or more"),
    ):
        if not good:
            raise EngineError(f"cannot sample with this {name}", found=value, wanted=wanted)
    check_tokens(request.prompts, "prompt", vocab)
    most = max((len(p) for p in request.prompts), default=0)
    if most + params.max_tokens > longest:
        raise EngineError(
            "prompts and completions are longer than the engine's rows",
            found=f"{most} + {params.max_tokens} tokens",
            wanted=f"at most {longest} (max_model_len, or the positions of the model)",
            next="lower data.max_prompt_length or data.max_response_length, or raise rollout.engine.max_model_len",
        )


def check_tokens(rows: Sequence[Sequence[int]], what: str, vocab: int) -> None:
    """Every row has tokens, and only such as the model knows.

    Raises:
        EngineError: names the row.
    """
    for i, row in enumerate(rows):
        if not len(row):
            raise EngineError(f"{what} {i} is empty", found="no tokens", wanted="at least one token")
        if min(row) < 0 or max(row) >= vocab:
            raise EngineError(
                f"{what} {i} has a token that the model does not know",
                found=max(row) if max(row) >= vocab else min(row),
                wanted=f"ids from 0 to {vocab - 1}",
                next="the tokenizer must be the model's own: check model.tokenizer",
            )


@dataclass
class _Row:
    """A row under way: its own number in the request, and vLLM's id of it."""

    number: int
    id: str
    done: bool = False


def generate(
    llm: compat.LLM, request: GenerateRequest, rules: Rules, on_done: Callable[[Completion], None] | None
) -> list[Completion]:
    """Sample all rows. Whatever ends this, no row of it is left in the engine."""
    params = request.params
    seed = secrets.randbits(63) if params.seed is None else params.seed
    out: list[Completion | None] = [None] * (len(request.prompts) * params.n)
    rows: dict[str, _Row] = {}
    try:
        for number in range(len(out)):
            name = f"row-{number}"
            own = _row_params(params, rules, row_seed(seed, params.row_offset + number))
            rows[name] = _Row(number, compat.add(llm, name, list(request.prompts[number // params.n]), own))
        while not all(row.done for row in rows.values()):
            for output in compat.step(llm):
                row = rows[output.request_id]
                completion = None if row.done else _completion(output, row, params, rules)
                if completion is None:
                    continue
                row.done = True
                if not output.finished:
                    compat.abort(llm, [row.id])
                out[row.number] = completion
                if on_done is not None:
                    on_done(completion)
    finally:
        compat.abort(llm, [row.id for row in rows.values() if not row.done])
    done = [c for c in out if c is not None]
    assert len(done) == len(out), "every row ended"
    return done


def _row_params(params: SamplingParams, rules: Rules, seed: int) -> Any:
    greedy = params.temperature == 0
    return compat.sampling_params(
        temperature=params.temperature,
        top_p=1.0 if greedy else params.top_p,
        top_k=0 if greedy else params.top_k,
        max_tokens=params.max_tokens,
        seed=None if greedy else seed,
        # Which tokens end a row is decided here; vLLM would add those of its own reading of the model's files.
        ignore_eos=True,
        stop_token_ids=list(rules.ends),
        logprobs=0,
        every_step=bool(rules.stop),
    )


def _completion(output: Any, row: _Row, params: SamplingParams, rules: Rules) -> Completion | None:
    """The row's completion, once it has ended."""
    (one,) = output.outputs
    tokens = [int(t) for t in one.token_ids]
    by_text = rules.stops_in(tokens)
    if not (output.finished or by_text):
        return None
    log_probs = [float(at[t].logprob) for at, t in zip(one.logprobs, tokens, strict=True)]
    ended = bool(tokens) and (tokens[-1] in rules.ends or by_text)
    reason = FinishReason.STOP if ended else FinishReason.LENGTH
    return Completion(row.number // params.n, row.number % params.n, tokens, log_probs, reason)


def score(llm: compat.LLM, request: ScoreRequest, vocab: int, longest: int) -> list[TokenScores]:
    """Log-probs (and top-k) of given tokens.

    Raises:
        EngineError: an empty or too long sequence, a token that the model does not know, or no positive temperature.
    """
    if request.temperature <= 0:
        raise EngineError("scores need a positive temperature", found=request.temperature, wanted="for example 1.0")
    check_tokens(request.sequences, "sequence", vocab)
    most = max((len(s) for s in request.sequences), default=0)
    # vLLM scores a prompt on its way to generating one token.
    if most + 1 > longest:
        raise EngineError(
            "a sequence to score is longer than the engine's rows",
            found=f"{most} tokens",
            wanted=f"at most {longest - 1} (max_model_len less one)",
            next="raise rollout.engine.max_model_len",
        )
    topk = min(request.topk, vocab)
    out: list[TokenScores | None] = [None] * len(request.sequences)
    params = compat.sampling_params(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=max(topk, 0))
    ids: list[str] = []
    try:
        with compat.scored_at(llm, request.temperature):
            ids += [compat.add(llm, str(i), list(s), params) for i, s in enumerate(request.sequences)]
            while compat.unfinished(llm):
                for output in compat.step(llm):
                    if output.finished:
                        number = int(output.request_id)
                        out[number] = _scores(output.prompt_logprobs, request.sequences[number], topk)
    finally:
        compat.abort(llm, ids)
    return [scores for scores in out if scores is not None]


def _scores(positions: Sequence[Any], tokens: Sequence[int], topk: int) -> TokenScores:
    """Of one sequence; vLLM has None at its first token, whose log-prob nothing predicts."""
    log_probs = [0.0, *(float(at[t].logprob) for at, t in zip(positions[1:], tokens[1:], strict=True))]
    if topk <= 0:
        return TokenScores(log_probs)
    ids: list[list[int]] = [[]]
    values: list[list[float]] = [[]]
    for at in positions[1:]:
        best = sorted(at.items(), key=lambda pair: -pair[1].logprob)[:topk]
        ids.append([int(token) for token, _ in best])
        values.append([float(found.logprob) for _, found in best])
    return TokenScores(log_probs, ids, values)
