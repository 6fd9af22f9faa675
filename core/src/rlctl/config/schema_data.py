"""The ``data`` section: rows from files or from a procedural task. Imports no torch."""

from __future__ import annotations

from string import Formatter
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rlctl.config.base import Count, Seed, Strict


class TaskConfig(Strict):
    """A procedural task: rows are made from a seed."""

    name: str = Field(min_length=1, description="A task of rlctl, or reasoning_gym:NAME.")
    args: dict[str, Any] = Field(default_factory=dict, description="Settings of the task.")
    train_size: Count = Field(default=10_000, description="Training rows.")
    val_size: Count = Field(default=256, description="Validation rows, which no training row repeats.")
    seed: Seed = Field(default=0, description="The rows follow from it.")


class ColumnsConfig(Strict):
    """Names of columns where they are not found by themselves."""

    prompt: str | None = Field(default=None, description="Text, or chat messages.")
    answer: str | None = Field(default=None, description="Ground truth for the reward.")
    response: str | None = Field(default=None, description="Target text for SFT.")
    messages: str | None = Field(default=None, description="Whole conversations, for SFT.")
    chosen: str | None = Field(
        default=None, description="The better response of a pair: text, messages, or a whole conversation."
    )
    rejected: str | None = Field(default=None, description="The worse response of a pair.")
    margin: str | None = Field(
        default=None, description="By how much the chosen response is better, for a reward model."
    )
    data_source: str | None = Field(default=None, description="Where a row comes from; metrics are split by it.")


class DataConfig(Strict):
    """Rows: files or a procedural task."""

    train_files: tuple[str, ...] = Field(
        default=(), description="jsonl or parquet files, directories of splits, or hf:DATASET[/CONFIG]:SPLIT."
    )
    val_files: tuple[str, ...] = Field(
        default=(), description="As train_files; default: the test or validation files of its directories."
    )
    task: TaskConfig | None = Field(default=None, description="A procedural task instead of files.")
    columns: ColumnsConfig = Field(
        default_factory=ColumnsConfig, description="Names of columns where they are not found by themselves."
    )
    train_max_samples: Count | None = Field(default=None, description="Use only the first rows for training.")
    val_max_samples: Count | None = Field(default=None, description="Use only the first rows for validation.")
    train_batch_size: Count = Field(
        default=32, description="Prompts a step (RL); rows an optimizer step (SFT); pairs an optimizer step (dpo, rm)."
    )
    gen_batch_size: Count | None = Field(
        default=None,
        description="Prompts of a generation batch of algorithm.filter_groups; default: train_batch_size.",
    )
    val_batch_size: Count = Field(default=128, description="Rows of validation that are worked on together.")
    max_prompt_length: Count = Field(default=512, description="Longest prompt, in tokens.")
    max_response_length: Count = Field(default=512, description="Longest response, in tokens.")
    overlong_prompts: Literal["error", "filter"] = Field(
        default="error",
        description="What happens to rows over the limit: refuse the data, or leave them out and say so.",
    )
    shuffle: bool = Field(default=True, description="A new order each epoch, from trainer.seed.")
    apply_chat_template: Literal["auto", "always", "never"] = Field(
        default="auto", description="auto: when the tokenizer has a template."
    )
    system_prompt: str | None = Field(default=None, description="System message of rows that have none.")
    prompt_template: str | None = Field(
        default=None, description="Text with {prompt} where the prompt goes; braces of its own are written twice."
    )

    @field_validator("prompt_template")
    @classmethod
    def _has_prompt(cls, value: str | None) -> str | None:
        if value is None:
            return value
        try:
            fields = {name for _, name, _, _ in Formatter().parse(value) if name is not None}
            value.format(prompt="")
        except (ValueError, KeyError, IndexError, AttributeError):
            fields = set()
        if fields != {"prompt"}:
            raise ValueError("the template needs {prompt} and no other field; braces of its own are written {{ and }}")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if self.task is None and not self.train_files:
            raise ValueError("set data.train_files (jsonl or parquet) or data.task (procedural)")
        if self.task is not None and (self.train_files or self.val_files):
            raise ValueError("set one of data.train_files and data.task, not both")
        return self
