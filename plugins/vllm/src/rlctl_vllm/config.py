"""The ``rollout.engine`` section of the backend ``vllm``. Importing it imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from rlctl.config.schema import Strict


class VLLMConfig(Strict):
    """Settings of the ``vllm`` rollout backend."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="dtype of weights and computation. auto: that of model.dtype. Weights that come in another dtype are "
        "converted, and are then other weights than were sent: guards.weight_fingerprint says so.",
    )
    kv_cache_mib: PositiveInt | None = Field(
        default=None,
        description="Memory of the key/value cache. Unset: 256 MiB on a CPU; on a GPU what gpu_memory_utilization leaves.",
    )
    gpu_memory_utilization: float = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="Share of a GPU that vLLM may take, weights and cache together, where kv_cache_mib is unset. A "
        "training engine in the same process needs the rest.",
    )
    enable_sleep_mode: bool = Field(
        default=False,
        description="On a GPU: take memory that can be given back between rollouts (rollout.free_cache_engine). On a CPU vLLM has no "
        "such memory.",
    )
    max_model_len: PositiveInt | None = Field(
        default=None,
        description="Longest prompt and completion together, in tokens. Unset: the positions of the model.",
    )
    max_num_seqs: PositiveInt = Field(default=256, description="Rows decoded together.")
    max_num_batched_tokens: PositiveInt | None = Field(
        default=None, description="Tokens of one step of the scheduler. Unset: vLLM's own choice."
    )
    enforce_eager: bool | None = Field(
        default=None,
        description="Run without compiled graphs. Unset: true on a CPU, false on a GPU.",
    )
    enable_prefix_caching: bool = Field(
        default=True,
        description="Keep the keys and values of prompts that several rows share. Emptied by every sync of weights.",
    )
    logprobs_mode: Literal["processed", "raw"] = Field(
        default="processed",
        description="Log-probs of sampled tokens. processed: under the distribution that they were drawn from (temperature, "
        "top-k and top-p applied), as every rollout of rlctl gives them. raw: of the model, before either.",
    )
    seed: int = Field(
        default=0, ge=0, description="Seed of the engine. Rows of a request are drawn from the request's own seed."
    )
