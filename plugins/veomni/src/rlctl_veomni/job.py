"""Work inside the model's own forward, where its weights are whole.

VeOmni shards the model itself: its embedding, last norm and head are gathered for the time of its forward. The loss needs the
head, so it is computed in there, by a job (see :mod:`rlctl.parts.job`) that is handed to the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Inside:
    """A model as a job sees it. Called, it runs its own code at once: through the module, FSDP's hooks would run again."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self._model = model
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def take_jobs(model: nn.Module) -> None:
    """From now on ``model(job=job)`` returns ``job(model)`` of whole weights; any other call stays what it was."""
    own = model.forward

    def forward(*args: Any, job: Callable[[Any], Any] | None = None, **kwargs: Any) -> Any:
        return own(*args, **kwargs) if job is None else job(Inside(model, own))

    model.forward = forward  # type: ignore[method-assign]
