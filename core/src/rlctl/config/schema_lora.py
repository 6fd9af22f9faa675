"""The ``model.lora`` section: adapters in the place of all weights, and what it asks of the other sections. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pydantic import Field, PositiveFloat

from rlctl.config.base import Count, Strict

if TYPE_CHECKING:
    from rlctl.config.schema import RunConfig


ALL_LINEAR = "all-linear"


class LoraConfig(Strict):
    """Low-rank adapters (LoRA): they are trained, the model's own weights stay as they are. {} takes the defaults."""

    rank: Count = Field(default=16, description="Rank of every adapter.")
    alpha: PositiveFloat = Field(
        default=32.0,
        description="An adapter's output is multiplied by alpha / rank (alpha / sqrt(rank) with use_rslora).",
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Share of an adapter's inputs that training leaves out."
    )
    target_modules: str | list[str] = Field(
        default="all-linear",
        description="Layers that get an adapter. all-linear: every linear layer but the head; a list: names, or ends of names; "
        "other text: a regular expression for whole names.",
    )
    exclude_modules: str | list[str] | None = Field(
        default=None, description="Layers that get none, by a list of names or a regular expression."
    )
    use_rslora: bool = Field(default=False, description="Divide alpha by the root of the rank.")


def matching(names: Iterable[str], patterns: str | Sequence[str]) -> list[str]:
    """The names that a regular expression matches as a whole; or, of a list, that are one of its names or end in one."""
    if isinstance(patterns, str):
        return [name for name in names if re.fullmatch(patterns, name)]
    return [name for name in names if any(name == p or name.endswith(f".{p}") for p in patterns)]


def chosen_layers(names: Sequence[str], targets: str | Sequence[str], exclude: str | Sequence[str] | None) -> list[str]:
    """Of the linear layers ``names``, those that get an adapter."""
    chosen = list(names) if targets == ALL_LINEAR else matching(names, targets)
    out = set() if exclude is None else set(matching(chosen, exclude))
    return [name for name in chosen if name not in out]


def names_hint(names: Iterable[str], targets: str | Sequence[str]) -> str | None:
    """What to write where text that stands for a regular expression is a plain name of layers."""
    if isinstance(targets, str) and targets and matching(names, [targets]):
        return f"target_modules=[{targets}]: text alone is a regular expression for whole names, a list has names or their ends"
    return None


def _pattern_fault(pattern: object) -> str | None:
    if isinstance(pattern, str):
        try:
            re.compile(pattern)
        except re.error as error:
            return str(error)
    return None


def lora_faults(config: RunConfig) -> list[str]:
    """What is wrong with adapters in ``config``, one line each."""
    faults: list[str] = []
    adapted = {"model.lora": config.model.lora}
    if config.critic is not None and config.critic.model is not None:
        adapted["critic.model.lora"] = config.critic.model.lora
    faults += [
        f"{path}.target_modules names no layer: set it to all-linear"
        for path, lora in adapted.items()
        if lora is not None and not lora.target_modules
    ]
    faults += [
        f"{path}.{key} is no regular expression ({fault}): write a list for names"
        for path, lora in adapted.items()
        for key in ("target_modules", "exclude_modules")
        if lora is not None and (fault := _pattern_fault(getattr(lora, key))) is not None
    ]
    teacher = config.teacher
    if teacher is not None:
        sections = {"teacher.model": teacher.model, **{f"teacher.models.{k}": m for k, m in teacher.models.items()}}
        faults += [
            f"{path}.lora has nothing to do: a teacher is never trained by adapters; take {path}.lora out"
            for path, model in sections.items()
            if model is not None and model.lora is not None
        ]
    return faults


def random_base_words(config: RunConfig) -> str | None:
    """What to say where adapters are trained on weights that are drawn at random and never trained; None anywhere else."""
    model, warm = config.model, config.warm_start
    drawn = model.config is not None or model.init == "random"
    if model.lora is None or not drawn or (config.trainer.type == "rl" and warm is not None and not warm.lora):
        return None
    return (
        "model.lora trains adapters on random weights, which stay as they were drawn: set model.path to trained ones"
        + (", or warm_start.lora=false" if warm is not None else "")
    )


def reference_is_base(config: RunConfig) -> bool:
    """Whether the reference is the actor's own model without its adapters, so that no second one is built.

    It is where both live in the same processes on one backend in one layout. Its own ``engine`` section then does nothing.
    """
    ref, actor = config.ref, config.actor
    return (
        config.needs_reference
        and config.model.lora is not None
        and config.pool_of("ref") == config.pool_of("actor")
        and config.backend_of("ref") == config.backend_of("actor")
        and ref.parallel == actor.parallel
    )
