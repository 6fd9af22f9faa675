"""Targets of adapters against a model's config alone, before anything is started. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.errors import ConfigError
from rlctl.plan.adapters import unmatched_targets
from rlctl.plan.planner import model_size
from rlctl.plan.source import find_model

if TYPE_CHECKING:
    from rlctl.config.schema import ModelConfig


def require_targets(model: ModelConfig) -> None:
    """Refuse ``model.lora`` on no layer, where the model's family is known.

    Raises:
        ConfigError: the engine would have no adapters.
    """
    if model.lora is None:
        return
    size, _ = model_size(find_model(model))
    unmatched = None if size.shape is None else unmatched_targets(size.shape, model.lora)
    if unmatched is not None:
        what, hint = unmatched
        raise ConfigError("model.lora.target_modules does not fit the model", found=what, next=f"model.lora.{hint}")
