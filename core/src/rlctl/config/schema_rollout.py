"""The ``rollout`` section. Imports no torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rlctl.config.base import Count, CountOrZero, Strict
from rlctl.config.schema_environment import EnvironmentConfig
from rlctl.config.schema_model import ParallelConfig
from rlctl.config.schema_runtime import MAIN_POOL


class ValSampling(Strict):
    """How validation samples; the default is greedy."""

    n: Count = Field(default=1, description="Samples a prompt.")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Share of the probability that is kept; 1: all.")
    top_k: CountOrZero = Field(default=0, description="Most likely tokens that are kept; 0: all.")


class RolloutConfig(Strict):
    """Generation."""

    backend: str = Field(default="hf", description="Rollout backend; rlctl plugins lists them.")
    engine: dict[str, Any] = Field(default_factory=dict, description="The backend's own section.")
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig, description="Sizes of the parallel axes; ranks that they leave are replicas."
    )
    pool: str = Field(default=MAIN_POOL, description="Pool of processes where it lives (runtime.pools).")
    python: str | None = Field(
        default=None,
        description="Directory of the virtual environment, or interpreter, in which its processes run. Without a pool it gets one "
        "of its own, named after it.",
    )
    n: Count = Field(default=8, description="Samples a prompt.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Share of the probability that is kept; 1: all.")
    top_k: CountOrZero = Field(default=0, description="Most likely tokens that are kept; 0: all.")
    stop: tuple[str, ...] = Field(default=(), description="Texts that end a sample.")
    share_weights: bool = Field(
        default=True, description="Generate from the training module itself where both live in one process (no copy)."
    )
    free_cache_engine: bool = Field(
        default=False,
        description="Give back what the engine holds on its device while it does not sample, where it can: for a rollout that shares "
        "its GPUs with training.",
    )
    val_kwargs: ValSampling = Field(default_factory=ValSampling, description="How validation samples.")
    environment: EnvironmentConfig | None = Field(
        default=None, description="Conversations of several turns with an environment, instead of single completions."
    )
