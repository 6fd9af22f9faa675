"""The ``engine`` section of the ``veomni`` backend. Importing it imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rlctl.config.schema import Strict


class VeOmniConfig(Strict):
    """Settings of the ``veomni`` training backend."""

    param_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="dtype of the computation; master weights are float32. auto: bfloat16 on accelerators, float32 on cpu.",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of the gradient reduction between ranks."
    )
    experts: Literal["auto", "eager", "grouped"] = Field(
        default="auto",
        description="How experts are computed. eager: one after another. grouped: all in one kernel (VeOmni's Triton kernel "
        "on CUDA), which ep needs. auto: grouped where ep > 1 or the computation is bfloat16 on CUDA.",
    )
    activation_checkpointing: bool = Field(
        default=False, description="Keep only each layer's input and compute the layer again in the backward pass."
    )
    reshard_after_forward: bool = Field(
        default=True, description="Free gathered weights after a layer's forward and gather them again in the backward."
    )
    param_offload: bool = Field(default=False, description="Keep weights on the host between calls of the engine.")
    optimizer_offload: bool = Field(default=False, description="Keep optimizer moments on the host between steps.")
    share_prompts: bool = Field(
        default=True,
        description="Compute a prompt that several rows of a micro-batch share once. Values and gradients are those of "
        "separate rows.",
    )
    logits_budget_mib: PositiveInt = Field(
        default=1024,
        description="Logits of a micro-batch up to this size are kept for the backward pass; larger ones are computed "
        "again in chunks.",
    )
    collective_timeout_s: PositiveFloat = Field(
        default=1800.0, description="Time limit of one collective between ranks."
    )
