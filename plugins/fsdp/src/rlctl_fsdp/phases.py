"""Out of memory, with the phase it happened in and the settings that help there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlctl.errors import EngineError

_HELP = {
    "init": "set actor.engine.param_offload=true, use more ranks, or take a smaller model",
    "scoring": "lower actor.max_tokens_per_device or actor.engine.logits_budget_mib",
    "forward": "lower actor.max_tokens_per_device, or set actor.engine.activation_checkpointing=true",
    "backward": "lower actor.max_tokens_per_device, or set actor.engine.activation_checkpointing=true",
    "optimizer step": "set actor.engine.optimizer_offload=true, or use more ranks",
    "export": "set actor.engine.optimizer_offload=true, so that moments leave room for a whole tensor",
}


@contextmanager
def phase(name: str, detail: str = "") -> Iterator[None]:
    """Turn an allocation failure inside into an :class:`EngineError` that names ``name``."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise EngineError(
            f"out of memory during {name}{f' ({detail})' if detail else ''}",
            found=str(error).strip().split("\n")[0],
            wanted="a piece of work that fits",
            next=_HELP[name],
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    # The CPU allocator raises a plain RuntimeError; its text is all there is to tell it by.
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
