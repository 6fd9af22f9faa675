"""Config models of the toys."""

from __future__ import annotations

import pydantic


class ToyConfig(pydantic.BaseModel):
    """Engine section of every toy."""

    model_config = pydantic.ConfigDict(extra="forbid")
    bias: float = 0.0


class LaxConfig(pydantic.BaseModel):
    """Takes any key: a fault that the suite must find."""

    model_config = pydantic.ConfigDict(extra="allow")
