"""Log-probs and top-k of given tokens, under the weights that the rollout engine serves.

Shapes: P rows, T tokens of a row, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlctl.errors import EngineError
from rlctl.generation import ScoreRequest, TokenScores
from rlctl.logits import to_logits_scale
from rlctl_fsdp.runners import Runner

_MAX_LOGITS = 1 << 26
"""Most logits that exist at once (elements)."""


def _batches(lengths: Sequence[int], max_tokens: int, any_length: bool) -> list[list[int]]:
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        last = batches[-1] if batches else []
        same = bool(last) and (any_length or lengths[last[0]] == lengths[i])
        if same and (len(last) + 1) * lengths[i] <= max_tokens:
            last.append(i)
        else:
            batches.append([i])
    return batches


def score_sequences(
    runner: Runner, request: ScoreRequest, vocab: int, device: torch.device, max_tokens: int
) -> list[TokenScores]:
    """Score whole sequences, in batches of at most ``max_tokens`` padded tokens.

    Raises:
        EngineError: an empty sequence, or a temperature that is not positive.
    """
    if request.temperature <= 0:
        raise EngineError("scores need a positive temperature", found=request.temperature, wanted="for example 1.0")
    if any(not len(s) for s in request.sequences):
        raise EngineError("a sequence to score is empty", found="no tokens", wanted="at least one token")
    lengths = [len(s) for s in request.sequences]
    out: list[TokenScores | None] = [None] * len(lengths)
    budget = max(1, min(max_tokens, _MAX_LOGITS // vocab))
    for batch in _batches(lengths, budget, runner.any_length):
        logits = runner.logits([request.sequences[i] for i in batch])
        for i, row in zip(batch, logits, strict=True):
            out[i] = _score(row[: lengths[i]], request.sequences[i], request, device)
    return [scores for scores in out if scores is not None]


def _score(logits: torch.Tensor, tokens: Sequence[int], request: ScoreRequest, device: torch.device) -> TokenScores:
    x = to_logits_scale(logits[:-1], request.temperature).log_softmax(-1)
    ids = torch.tensor(list(tokens[1:]), device=device, dtype=torch.long)
    log_probs = [0.0, *x.gather(-1, ids[:, None])[:, 0].tolist()]
    if request.topk <= 0:
        return TokenScores(log_probs)
    top = x.topk(min(request.topk, x.shape[-1]), dim=-1)
    return TokenScores(log_probs, [[], *top.indices.tolist()], [[], *top.values.tolist()])
