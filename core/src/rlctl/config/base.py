"""What every section of the configuration is made of: the strict base and bounded numbers. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_COUNT = 2**31 - 1
"""Bound on every count: a number with a few zeros too many is a mistake, not a run."""

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


class Strict(BaseModel):
    """Base of every section: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_enum_values=False, allow_inf_nan=False
    )
