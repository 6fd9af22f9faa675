"""Adapters of an engine, as the facade deals with them: that there are some, and that they can be switched off for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlctl.errors import EngineError

if TYPE_CHECKING:
    from rlctl.hookspecs import EngineHooks

SWITCH = "rlctl_set_adapters"
"""The hook of an engine that trains adapters."""


def require_switch(model: Mapping[str, Any], name: str, *, has: bool) -> None:
    """Refuse ``model.lora`` on an engine that knows no adapters.

    Args:
        name: of the engine's backend.
        has: the engine implements :data:`SWITCH`.

    Raises:
        EngineError: it does not, and adapters are asked for.
    """
    if model.get("lora") and not has:
        raise EngineError(
            f"the engine {name!r} trains no adapters: it would train every weight",
            found="model.lora",
            wanted=f"a backend that has {SWITCH}",
            next="take model.lora out, or another backend: rlctl capabilities",
        )


@contextmanager
def without_adapters(hooks: EngineHooks, name: str, *, has: bool) -> Iterator[None]:
    """The base model in the place of the adapted one.

    Args:
        name, has: as in :func:`require_switch`.

    Raises:
        EngineError: there are no adapters: what answers would be the trained model itself.
    """
    if not (has and hooks.rlctl_set_adapters(enabled=False)):
        raise EngineError(
            f"the engine {name!r} cannot score as its base model",
            found="a model without adapters",
            wanted="model.lora, which leaves the base as it was",
        )
    try:
        yield
    finally:
        hooks.rlctl_set_adapters(enabled=True)
