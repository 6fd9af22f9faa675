"""The ``trainer`` and ``guards`` sections: the loop, and what stops it. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from rlctl.config.base import Count, CountOrZero, Seed, Strict


class GuardsConfig(Strict):
    """Guards that are on by default; turning one off is written to the manifest."""

    rollout_logprob_check: bool = Field(
        default=True, description="Compare log-probs of rollout and trainer at step 0 and after each sync."
    )
    rollout_probs_diff_mean_max: PositiveFloat = Field(
        default=0.02,
        description="Stop when the mean |p_rollout - p_trainer| of the check is larger. Under 0.005 is normal.",
    )
    weight_fingerprint: bool = Field(default=True, description="Compare fingerprints of the weights after each sync.")
    nonfinite_step_budget: CountOrZero = Field(
        default=3,
        description="Stop after more than this many steps in a row with a loss or gradient that is not finite.",
    )


class TrainerConfig(Strict):
    """The loop."""

    type: Literal["rl", "sft", "dpo", "rm"] = Field(
        default="rl", description="Which trainer; dpo and rm learn from pairs of a chosen and a rejected response."
    )
    total_training_steps: Count | None = Field(default=None, description="Steps; default: total_epochs.")
    total_epochs: Count = Field(default=1, description="Passes over the training rows.")
    seed: Seed = Field(default=0, description="Order of rows, sampling and random weights follow from it.")
    val_before_train: bool = Field(default=True, description="Validate before the first step.")
    test_freq: CountOrZero = Field(default=0, description="Validate every this many steps; 0: only at the end.")
    save_freq: CountOrZero = Field(
        default=0, description="Save a checkpoint every this many steps; 0: only at the end."
    )
    max_ckpt_to_keep: Count = Field(default=2, description="Checkpoints that are kept, the newest.")
    save_best: bool = Field(default=True, description="Export the best validation score as a Hugging Face directory.")
    resume_mode: Literal["disable", "auto"] = Field(
        default="disable", description="auto: go on from the last checkpoint of the run directory, if it has one."
    )
    logger: tuple[str, ...] = Field(
        default=("console", "jsonl", "tensorboard"), description="Where metrics go; also wandb, and plugins' sinks."
    )
    project_name: str = Field(default="rlctl", description="Project in wandb.")
    experiment_name: str | None = Field(default=None, description="Name of the run; default: the recipe's.")
    rollout_samples: Count = Field(default=8, description="Rows of each step kept as samples.")
    device: Literal["auto", "cpu", "cuda", "npu"] = Field(default="auto", description="auto: what the machine has.")
    num_threads: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        default=None, description="CPU threads of torch in each process; default: the cores, shared by the processes."
    )
    max_staleness: Annotated[int, Field(ge=0, le=1)] = Field(
        default=0,
        description="1: sample the next batch while the update goes on, with weights of one update before; the rollout needs a "
        "pool of its own. 0: sample, then update.",
    )
    balance_batch: bool = Field(
        default=True, description="Give data parallel ranks equal tokens, not just equal rows (Karmarkar-Karp)."
    )
