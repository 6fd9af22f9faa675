"""Phases of this backend's work: what a rank is doing, and for an allocation that fails in one, the settings that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlctl.runtime import phases
from rlctl.runtime.out_of_memory import is_out_of_memory, out_of_memory

_HELP = {
    "init": "set actor.engine.param_offload=true, use more ranks, or take a smaller model",
    "scoring": "lower actor.max_tokens_per_device or actor.engine.logits_budget_mib, or raise parallel.usp",
    "forward": "lower actor.max_tokens_per_device, set actor.engine.activation_checkpointing=true, or raise parallel.usp",
    "backward": "lower actor.max_tokens_per_device, set actor.engine.activation_checkpointing=true, or raise parallel.usp",
    "optimizer step": "set actor.engine.optimizer_offload=true, or use more ranks",
    "export": "set actor.engine.optimizer_offload=true, so that moments leave room for a whole tensor",
}


@contextmanager
def phase(name: str, detail: str = "") -> Iterator[None]:
    """A :class:`rlctl.runtime.phases.phase` in which a failed allocation becomes an ``EngineError`` that names it."""
    with phases.phase(name):
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(error, name, detail, _HELP[name]) from error
