"""The ``engine`` section of the ``megatron`` backend. Importing it imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rlctl.config.schema import Strict


class MegatronConfig(Strict):
    """Settings of the ``megatron`` training backend."""

    param_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="dtype of weights in the computation; main weights are float32. auto: bfloat16 on accelerators, "
        "float32 on cpu.",
    )
    layers: Literal["auto", "local", "transformer_engine"] = Field(
        default="auto",
        description="Modules of a layer. local: megatron-core's own. transformer_engine: NVIDIA's kernels, on CUDA in bfloat16. "
        "auto: those where they are installed and can be used.",
    )
    recompute: Literal["none", "full"] = Field(
        default="none",
        description="full: keep only each layer's input and compute the layer again in the backward pass.",
    )
    distributed_optimizer: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Shard moments and main weights over data parallel and context parallel ranks (dp x cp). auto: AdamW's, "
        "with two or more data parallel ranks.",
    )
    moe_token_dispatcher: Literal["alltoall", "allgather"] = Field(
        default="alltoall", description="How tokens reach the ranks of their experts."
    )
    param_offload: bool = Field(default=False, description="Keep weights on the host between calls of the engine.")
    optimizer_offload: bool = Field(
        default=False, description="Keep moments and main weights on the host between steps."
    )
    logits_budget_mib: PositiveInt = Field(
        default=1024,
        description="Logits of a micro-batch up to this size are kept for the backward pass; larger ones are computed "
        "again in chunks.",
    )
    collective_timeout_s: PositiveFloat = Field(
        default=1800.0, description="Time limit of one collective between ranks."
    )
