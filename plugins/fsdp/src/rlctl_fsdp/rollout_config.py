"""Settings of the embedded rollout engine ``hf``. No torch here: configurations are checked before anything is loaded."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from rlctl.config.schema import Strict


class HFRolloutConfig(Strict):
    """The ``rollout.engine`` section of the backend ``hf``."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="dtype of generation. auto: that of the training module when it is shared, else model.dtype. Another "
        "dtype than the training module's makes a copy of the weights.",
    )
    max_batch_rows: PositiveInt = Field(default=512, description="Rows decoded together.")
    max_batch_tokens: PositiveInt = Field(
        default=65_536,
        description="Bound on rows x (longest prompt + max_response_length) decoded together; it bounds the key/value cache.",
    )
    path: Literal["auto", "static", "dynamic", "recompute"] = Field(
        default="auto",
        description="How keys and values are kept. static: preallocated, prompts of any length together; dynamic: "
        "transformers' own cache, prompts of one length at a time; recompute: no cache. auto takes the first whose "
        "logits equal a plain forward pass of this model.",
    )
