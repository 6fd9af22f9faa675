"""The ``engine`` sections of this plugin's backends. Importing it imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rlctl.config.schema import Strict
from rlctl_fsdp.rollout_config import HFRolloutConfig as HFRolloutConfig


class FSDPConfig(Strict):
    """Settings of the ``fsdp2`` training backend."""

    param_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="dtype of the computation; master weights keep model.dtype. auto: bfloat16 on accelerators, "
        "model.dtype on cpu.",
    )
    reduce_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="dtype of the gradient reduction between ranks. auto: float32."
    )
    activation_checkpointing: bool = Field(
        default=False, description="Keep only each layer's input and compute the layer again in the backward pass."
    )
    param_offload: bool = Field(default=False, description="Keep weights on the host between calls of the engine.")
    optimizer_offload: bool = Field(default=False, description="Keep optimizer moments on the host between steps.")
    reshard_after_forward: bool = Field(
        default=True, description="Free gathered weights after a layer's forward and gather them again in the backward."
    )
    attention: Literal["auto", "packed", "per_row"] = Field(
        default="auto",
        description="packed: rows end to end in one sequence. per_row: rows of equal length as one batch, with the "
        "model's own attention. auto: packed where a probe finds that no layer looks across rows.",
    )
    share_prompts: bool = Field(
        default=True,
        description="Compute a prompt that several rows of a micro-batch share once. For packed rows; values and "
        "gradients are those of separate rows.",
    )
    logits_budget_mib: PositiveInt = Field(
        default=1024,
        description="Logits of a micro-batch up to this size are kept for the backward pass; larger ones are computed "
        "again in chunks.",
    )
    wrap: Literal["auto", "always"] = Field(
        default="auto",
        description="auto: fully_shard on two ranks or more, the plain module on one. always: also on one.",
    )
    collective_timeout_s: PositiveFloat = Field(
        default=1800.0, description="Time limit of one collective between ranks."
    )
