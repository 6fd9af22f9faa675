"""What ``infer_batch`` asks of a reader, by the head of the model.

N tokens of the micro-batch.
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

SCORES: dict[ModelType, tuple[str, ...]] = {
    ModelType.LANGUAGE_MODEL: ("log_probs", "entropy", "experts"),
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
    """A loss that only hands scores back: ``items[name]`` is ``[N]``, of ``experts`` ``[N, L, K]``, detached."""

    want: tuple[str, ...]

    def __call__(self, reader: Any, batch: PackedBatch) -> LossOutput:
        items: dict[str, torch.Tensor] = {}
        if {"log_probs", "entropy"} <= set(self.want):
            items["log_probs"], items["entropy"] = reader.log_prob_and_entropy()
        for name in self.want:
            if name not in items:
                items[name] = _one(reader, name)
        return LossOutput(loss=next(iter(items.values())).sum(), items={k: v.detach() for k, v in items.items()})


def _one(reader: Any, name: str) -> torch.Tensor:
    if name == "experts":
        experts = getattr(reader, "experts", None)
        if experts is None:
            raise EngineError(
                "this engine does not report what its experts were",
                found="a reader without experts()",
                wanted="a mixture of experts on an engine whose notes have 'experts'",
            )
        return experts()
    method = {"log_probs": "log_prob", "entropy": "entropy", "values": "values"}[name]
    return getattr(reader, method)()
