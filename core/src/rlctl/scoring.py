"""What ``infer_batch`` asks of a reader, by the head of the model.

N tokens of the micro-batch, K alternatives.

``sum_p2`` is the sum of the squared probabilities of the vocabulary. ``topk_ids`` and ``topk_log_probs`` are of the ``meta[TOPK]``
most probable tokens; ``log_probs_at`` is of the tokens of the item field ``SCORE_IDS`` ``[N, K]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlctl.batch import PackedBatch
from rlctl.errors import EngineError
from rlctl.logits import LossOutput
from rlctl.records import ModelType

TOPK = "topk"
"""Key of a batch's ``meta``: how many alternatives are asked for."""

SCORE_IDS = "score_ids"
"""Item field of a batch, ``[N, K]``: the tokens whose log-probs are asked for."""

_TOPK = ("topk_ids", "topk_log_probs")

_OPTIONAL = {
    "experts": ("what its experts were", "a mixture of experts on an engine whose notes have 'experts'"),
    "sum_p2": ("the sum of the squared probabilities", "an engine whose reader has sum_p2()"),
}
"""What not every reader has, in words, and where it is."""

SCORES: dict[ModelType, tuple[str, ...]] = {
    ModelType.LANGUAGE_MODEL: (
        "log_probs",
        "entropy",
        "sum_p2",
        "experts",
        "topk_ids",
        "topk_log_probs",
        "log_probs_at",
    ),
    ModelType.VALUE_MODEL: ("values",),
}
"""What a model with each head can be asked for."""


def check_scores(want: Sequence[str], model_type: ModelType, backend: str) -> None:
    """Refuse what a model with another head would have to say, before anything runs.

    Raises:
        EngineError: a value model is asked for what only a language model has, or the other way round.
    """
    known = {name for names in SCORES.values() for name in names}
    assert want, "infer_batch needs something to compute"
    assert set(want) <= known, want
    other = [name for name in want if name not in SCORES[model_type]]
    if other:
        [owner] = (str(m) for m, names in SCORES.items() if other[0] in names)
        raise EngineError(
            f"the engine of {backend!r} holds a {model_type}, which has no {' and no '.join(other)}",
            found=f"{', '.join(want)} of a {model_type}",
            wanted=f"a {owner}, or of this one {', '.join(SCORES[model_type])}",
            next=f"build the engine with model_type {owner}",
        )


@dataclass(frozen=True)
class ScoreLoss:
    """A loss that only hands scores back: ``items[name]`` is ``[N]``, of ``experts`` ``[N, L, K]``, of several tokens a place
    ``[N, K]``, detached."""

    want: tuple[str, ...]

    def __call__(self, reader: Any, batch: PackedBatch) -> LossOutput:
        items: dict[str, torch.Tensor] = {}
        if {"log_probs", "entropy"} <= set(self.want):
            items["log_probs"], items["entropy"] = reader.log_prob_and_entropy()
        if set(_TOPK) & set(self.want):
            values = reader.topk(int(batch.meta[TOPK]))
            items |= {name: v for name, v in zip(reversed(_TOPK), values, strict=True) if name in self.want}
        if "log_probs_at" in self.want:
            items["log_probs_at"] = reader.log_prob_at(batch.items[SCORE_IDS])
        for name in self.want:
            if name not in items:
                items[name] = _one(reader, name)
        return LossOutput(loss=_first(items).float().sum(), items={k: v.detach() for k, v in items.items()})


def _first(items: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(iter(items.values()))


def _one(reader: Any, name: str) -> torch.Tensor:
    if name in _OPTIONAL:
        method = getattr(reader, name, None)
        if method is None:
            what, wanted = _OPTIONAL[name]
            raise EngineError(f"this engine does not report {what}", found=f"a reader without {name}()", wanted=wanted)
        return method()
    method = {"log_probs": "log_prob", "entropy": "entropy", "values": "values"}[name]
    return getattr(reader, method)()
