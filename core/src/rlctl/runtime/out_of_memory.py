"""Out of memory, with the phase it happened in and the settings that help there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlctl.errors import EngineError
from rlctl.runtime.phases import Scalar, phase

HELP: Mapping[str, str] = {
    "init": "use more ranks, or take a smaller model",
    "scoring": "lower actor.max_tokens_per_device",
    "forward": "lower actor.max_tokens_per_device",
    "backward": "lower actor.max_tokens_per_device",
    "optimizer step": "use more ranks",
    "generation": "lower the batch bounds in rollout.engine, or data.max_response_length",
    "loading weights": "use more ranks, or a lower model.dtype",
    "saving": "use more ranks",
    "sync": "lower runtime.weight_bucket_mib",
}
"""Phase -> what helps there, on any backend. A backend that knows more says more."""

_TEXT = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """True for a failed allocation, on the host or a device."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # The CPU allocator, and libraries below torch, raise a plain RuntimeError: its text is all there is to tell it by.
    return isinstance(error, RuntimeError) and bool(_TEXT.search(str(error)))


def out_of_memory(error: BaseException, phase: str, detail: str = "", next: str | None = None) -> EngineError:
    """The error for a failed allocation in ``phase``."""
    return EngineError(
        f"out of memory during {phase}{f' ({detail})' if detail else ''}",
        found=str(error).strip().split("\n")[0] or type(error).__name__,
        wanted="a piece of work that fits",
        next=next or HELP.get(phase),
    )


@contextmanager
def work(name: str, **detail: Scalar) -> Iterator[None]:
    """A phase (:class:`rlctl.runtime.phases.phase`) in which a failed allocation becomes an :class:`EngineError` that names
    the innermost phase."""
    with phase(name, **detail):
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            found = out_of_memory(error, getattr(getattr(error, "rlctl_status", None), "phase", name))
            if hasattr(error, "rlctl_status"):
                found.rlctl_status = error.rlctl_status  # type: ignore[attr-defined]
            raise found from error
