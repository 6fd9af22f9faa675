"""The ``engine`` section of ``megatron`` and ``mindspeed_megatron`` on an NPU. Importing it imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rlctl_megatron.config import MegatronConfig


class MindSpeedConfig(MegatronConfig):
    """Settings of megatron-core on an NPU: those of the ``megatron`` backend, and MindSpeed's own arguments."""

    layers: Literal["auto", "local"] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]  (fewer choices)
        default="auto",
        description="Modules of a layer: megatron-core's own, local, in either case. Transformer Engine is NVIDIA's.",
    )
    mindspeed_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments for mindspeed.megatron_adaptor.repatch, which switch its features, before megatron-core is used.",
    )
