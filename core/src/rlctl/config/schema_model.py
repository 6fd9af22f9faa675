"""What every model of a run has: its weights, its parallel axes, its optimizer. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, field_validator, model_validator

from rlctl.config.base import MAX_COUNT, Count, CountOrZero, Momentum, Strict
from rlctl.config.schema_lora import LoraConfig


class ModelConfig(Strict):
    """Which model."""

    path: str | None = Field(
        default=None,
        description="Local directory (relative to the config file), hub id, or package:NAME for weights inside an "
        "installed package (GGUF is converted once and cached).",
    )
    config: dict[str, Any] | None = Field(
        default=None,
        description="A Hugging Face config as a mapping with model_type; the model starts from random weights.",
    )
    init: Literal["pretrained", "random"] = Field(
        default="pretrained", description="random: take only the config of path and draw weights from trainer.seed."
    )
    tokenizer: str | None = Field(default=None, description="Tokenizer directory or hub id, when it is not model.path.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="dtype of the master weights."
    )
    revision: str | None = Field(default=None, description="Hub revision.")
    trust_remote_code: bool = Field(
        default=False, description="Run the model's own code. Off unless you trust its source."
    )
    chat_template: str | None = Field(default=None, description="Jinja chat template that replaces the tokenizer's.")
    lora: LoraConfig | None = Field(
        default=None,
        description="Train adapters in the place of all weights. dtype is then that of the frozen weights.",
    )

    def without_lora(self) -> ModelConfig:
        """The same model, every weight of it."""
        return self if self.lora is None else self.model_copy(update={"lora": None})

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.path is None and self.config is None:
            raise ValueError("set model.path (a directory or hub id) or model.config (random weights)")
        if self.path is not None and self.config is not None:
            raise ValueError("set one of model.path and model.config, not both")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("model.config needs model_type, for example llama")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("model.config needs model.tokenizer: random weights have no tokenizer of their own")
        return self


class ParallelConfig(Strict):
    """Sizes of the parallel axes. dp_shard -1 takes the ranks that the others leave."""

    dp_shard: int = Field(
        default=-1, ge=-1, le=MAX_COUNT, description="Ranks that share the weights (FSDP); -1: what the others leave."
    )
    dp_replicate: Count = Field(default=1, description="Replicas of the sharded weights (HSDP).")
    tp: Count = Field(default=1, description="Tensor parallel.")
    sp: bool = Field(default=False, description="Megatron's activation sharding; belongs to tp.")
    pp: Count = Field(default=1, description="Pipeline stages.")
    vpp: Count = Field(default=1, description="Virtual stages of each pipeline rank.")
    cp: Count = Field(default=1, description="Context parallel (ring attention).")
    ep: Count = Field(default=1, description="Expert parallel.")
    etp: Count = Field(default=1, description="Tensor parallel inside an expert.")
    usp: Count = Field(default=1, description="Ulysses sequence parallel.")
    dcp: Count = Field(default=1, description="Decode context parallel (rollout).")

    @field_validator("dp_shard")
    @classmethod
    def _not_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 ranks cannot share weights: set -1 (what the others leave) or at least 1")
        return value


class OptimConfig(Strict):
    """The optimizer and its schedule."""

    name: Literal["adamw", "sgd"] = Field(
        default="adamw",
        description="adamw, or plain gradient descent (no momentum), whose update is linear in the gradient: for measuring.",
    )
    lr: PositiveFloat = Field(default=1e-6, description="Learning rate after the warm-up.")
    betas: tuple[Momentum, Momentum] = Field(default=(0.9, 0.999), description="Decay of AdamW's two moments.")
    eps: PositiveFloat = Field(default=1e-8, description="Added to the root of AdamW's second moment.")
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled weight decay.")
    clip_grad: float = Field(default=1.0, ge=0, description="Largest gradient norm; 0 switches clipping off.")
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = Field(
        default="constant", description="What follows the warm-up."
    )
    lr_warmup_steps: CountOrZero = Field(default=0, description="Optimizer steps from 0 to lr.")
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Last learning rate as a share of lr (cosine, linear)."
    )
    total_training_steps: Count | None = Field(
        default=None, description="Length of the schedule in optimizer steps; the trainer fills it in."
    )
