"""The decoding loop: rows that share a batch, one token at a time, until each has ended.

Shapes: P prompts, C copies of each, R rows still running, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlctl.errors import EngineError
from rlctl.generation import Completion, FinishReason, SamplingParams
from rlctl_fsdp.runners import Runner
from rlctl_fsdp.sampling import draw, uniforms
from rlctl_fsdp.stopping import StopRules

_COMPACT_SHARE = 0.125
"""Share of finished rows from which on the batch is made smaller; moving the cache costs about one step's reading of it."""
_RANDOM_BLOCK = 64


@dataclass(frozen=True)
class Chunk:
    """Rows decoded together: ``copies`` samples, from number ``first_sample`` on, of each of ``prompts``."""

    prompts: tuple[int, ...]
    first_sample: int
    copies: int


def plan_chunks(
    lengths: Sequence[int], n: int, max_new: int, max_rows: int, max_tokens: int, any_length: bool
) -> list[Chunk]:
    """Split a request into batches within ``max_rows`` and ``max_tokens`` (rows x (longest prompt + ``max_new``)).

    Prompts are taken in the order of their length, so that little is padded; samples of one prompt stay together where
    they fit, so that it is read once. A single row is always allowed.
    """

    def fit(length: int) -> int:
        return max(1, min(max_rows, max_tokens // (length + max_new)))

    chunks: list[Chunk] = []
    pending: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        length = lengths[index]
        if n > fit(length):
            size = fit(length)
            chunks += [Chunk((index,), s, min(size, n - s)) for s in range(0, n, size)]
            continue
        full = (len(pending) + 1) * n > fit(length)
        if pending and (full or (not any_length and lengths[pending[-1]] != length)):
            chunks.append(Chunk(tuple(pending), 0, n))
            pending = []
        pending.append(index)
    if pending:
        chunks.append(Chunk(tuple(pending), 0, n))
    return chunks


def decode_chunk(
    runner: Runner,
    chunk: Chunk,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    seed: int,
    stops: StopRules,
    device: torch.device,
) -> Iterator[Completion]:
    """Yield the completions of one chunk, each as soon as it has ended.

    Raises:
        EngineError: the model's logits are not finite.
    """
    pairs = [(p, chunk.first_sample + c) for p in chunk.prompts for c in range(chunk.copies)]
    numbers = np.array([params.row_offset + p * params.n + s for p, s in pairs], dtype=np.uint64)
    total, limit = len(pairs), params.max_tokens
    history = torch.zeros(total, limit, dtype=torch.long)
    log_probs = torch.zeros(total, limit)
    rows = torch.arange(total)
    running = torch.ones(total, dtype=torch.bool)
    greedy = params.temperature == 0.0
    block = torch.empty(0)
    logits = runner.prefill([prompts[i] for i in chunk.prompts], chunk.copies, limit)
    logits = logits.repeat_interleave(chunk.copies, 0) if chunk.copies > 1 else logits
    for step in range(limit):
        if not greedy and step % _RANDOM_BLOCK == 0:
            count = min(_RANDOM_BLOCK, limit - step)
            block = torch.from_numpy(uniforms(seed, numbers, step, count)).to(device)
        u = None if greedy else block[rows.to(device), step % _RANDOM_BLOCK]
        sampled, sampled_log_probs = draw(logits, params, u)
        tokens = sampled.cpu()
        history[rows, step] = tokens
        log_probs[rows, step] = sampled_log_probs.cpu()
        done = stops.finished(tokens, history, rows, step)
        ended = (running if step + 1 == limit else running & done).nonzero()[:, 0]
        if len(ended):
            which = rows[ended]
            ids, values = history[which, : step + 1], log_probs[which, : step + 1]
            if not bool(torch.isfinite(values).all()):
                raise _not_finite([pairs[i] for i in which.tolist()], values)
            stopped = done[ended].tolist()
            for i, a, b, stop in zip(which.tolist(), ids.tolist(), values.tolist(), stopped, strict=True):
                prompt, sample = pairs[i]
                yield Completion(prompt, sample, a, b, FinishReason.STOP if stop else FinishReason.LENGTH)
        running = running & ~done
        alive = int(running.sum())
        if step + 1 == limit or alive == 0:
            return
        if len(rows) - alive >= max(1.0, _COMPACT_SHARE * len(rows)):
            index = running.nonzero()[:, 0]
            runner.keep(index.to(device))
            rows, running, sampled = rows[index], running[index], sampled[index.to(device)]
        logits = runner.step(sampled)


def _not_finite(pairs: list[tuple[int, int]], values: torch.Tensor) -> EngineError:
    row, token = (~torch.isfinite(values)).nonzero()[0].tolist()
    prompt, sample = pairs[row]
    return EngineError(
        "generation met logits that are not finite",
        found=f"log-prob {values[row, token].item()} at token {token} of sample {sample} of prompt {prompt}",
        wanted="finite numbers",
        next="look at actor/grad_norm of the steps before, or lower actor.optim.lr; in float16, use bfloat16",
    )


def decode(
    make_runner: Callable[[], Runner],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    seed: int,
    stops: StopRules,
    device: torch.device,
    max_rows: int,
    max_tokens: int,
) -> Iterator[Completion]:
    """Yield all completions of a request in the order in which they end."""
    any_length = make_runner().any_length
    lengths = [len(p) for p in prompts]
    for chunk in plan_chunks(lengths, params.n, params.max_tokens, max_rows, max_tokens, any_length):
        yield from decode_chunk(make_runner(), chunk, prompts, params, seed, stops, device)
