"""The configuration of a run: strict, frozen pydantic models. Importing it imports no torch.

One name for one thing. Sizes say their unit: ``*_batch_size`` counts prompts unless it says rows, ``*_length`` and
``*_tokens`` count tokens, ``*_freq`` counts steps, ``*_s`` seconds. Defaults are what a first run wants.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from rlctl.normalizer_modes import LossAggMode


class Strict(BaseModel):
    """Base of every section: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_enum_values=False)


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

    dp_shard: int = Field(default=-1, ge=-1)
    dp_replicate: PositiveInt = 1
    tp: PositiveInt = 1
    sp: bool = False
    pp: PositiveInt = 1
    vpp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt = 1
    usp: PositiveInt = 1
    dcp: PositiveInt = 1


class OptimConfig(Strict):
    """AdamW and its schedule."""

    lr: PositiveFloat = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(default=0.01, ge=0)
    clip_grad: float = Field(default=1.0, ge=0, description="Largest gradient norm; 0 switches clipping off.")
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    lr_warmup_steps: int = Field(default=0, ge=0)
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Last learning rate as a share of lr (cosine, linear)."
    )
    total_training_steps: int | None = Field(
        default=None, ge=1, description="Length of the schedule in optimizer steps; the trainer fills it in."
    )


class PolicyLossConfig(Strict):
    """The policy loss. Vanilla is PPO's clip (arXiv 1707.06347) with dual clip (arXiv 1912.09729)."""

    loss_mode: str = "vanilla"
    clip_ratio_low: float = Field(default=0.2, ge=0)
    clip_ratio_high: float = Field(default=0.2, ge=0)
    clip_ratio_c: float = Field(default=3.0, gt=1, description="Dual clip: bound on the loss of negative advantages.")


class TrainRole(Strict):
    """What the roles that run a training engine share."""

    backend: str = "fsdp2"
    engine: dict[str, Any] = Field(default_factory=dict, description="The backend's own section.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    micro_batch_size_per_device: PositiveInt | None = Field(default=None, description="Rows of a micro-batch.")
    max_tokens_per_device: PositiveInt | None = Field(
        default=None,
        description="Token budget of a micro-batch, a hard bound. Exactly one of the two; default 16384 tokens.",
    )

    @model_validator(mode="after")
    def _one_bound(self) -> TrainRole:
        if self.micro_batch_size_per_device and self.max_tokens_per_device:
            raise ValueError("set one of micro_batch_size_per_device and max_tokens_per_device, not both")
        return self


class ActorConfig(TrainRole):
    """The policy that is trained (for SFT: the model that is trained)."""

    optim: OptimConfig = Field(default_factory=OptimConfig)
    policy_loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig)
    loss_agg_mode: LossAggMode = LossAggMode.TOKEN_MEAN
    ppo_mini_batch_size: PositiveInt | None = Field(
        default=None, description="Prompts of one optimizer step; default: all."
    )
    ppo_epochs: PositiveInt = 1
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = Field(default=0.001, ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "kl", "mse", "low_var_kl"] = "k3"
    skip_zero_advantage: bool = Field(
        default=True,
        description="Leave rows out of the update whose gradient is exactly zero (no advantage, no KL, no entropy).",
    )


class RefConfig(TrainRole):
    """The frozen reference. backend empty: the actor's."""

    backend: str = ""


class ValSampling(Strict):
    """How validation samples; the default is greedy."""

    n: PositiveInt = 1
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)


class RolloutConfig(Strict):
    """Generation."""

    backend: str = "hf"
    engine: dict[str, Any] = Field(default_factory=dict, description="The backend's own section.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    n: PositiveInt = Field(default=8, description="Samples a prompt.")
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    stop: tuple[str, ...] = ()
    share_weights: bool = Field(
        default=True, description="Generate from the training module itself where both live in one process (no copy)."
    )
    val_kwargs: ValSampling = Field(default_factory=ValSampling)


class AlgorithmConfig(Strict):
    """How rewards become advantages, and where old log-probs come from."""

    name: Literal["grpo"] = "grpo"
    adv_estimator: Literal["grpo"] = "grpo"
    norm_adv_by_std_in_grpo: bool = Field(default=True, description="False is Dr. GRPO's advantage (arXiv 2503.20783).")
    bypass_mode: bool = Field(
        default=False, description="Take the rollout's log-probs as old log-probs instead of recomputing them."
    )


class RewardComponent(Strict):
    """One reward: a registered name, or path/to/file.py:function."""

    name: str
    weight: float = 1.0
    args: dict[str, Any] = Field(default_factory=dict)


class RewardConfig(Strict):
    """The reward of a row is the weighted sum of its components."""

    components: tuple[RewardComponent, ...] = (RewardComponent(name="exact_match"),)
    timeout_s: PositiveFloat = Field(
        default=10.0, description="Limit for one call of a user's function or of math-verify."
    )


class TaskConfig(Strict):
    """A procedural task: rows are made from a seed."""

    name: str
    args: dict[str, Any] = Field(default_factory=dict)
    train_size: PositiveInt = 10_000
    val_size: PositiveInt = 256
    seed: int = 0


class ColumnsConfig(Strict):
    """Names of columns where they are not found by themselves."""

    prompt: str | None = None
    answer: str | None = Field(default=None, description="Ground truth for the reward.")
    response: str | None = Field(default=None, description="Target text for SFT.")
    messages: str | None = None
    data_source: str | None = None


class DataConfig(Strict):
    """Rows: files or a procedural task."""

    train_files: tuple[str, ...] = ()
    val_files: tuple[str, ...] = ()
    task: TaskConfig | None = None
    columns: ColumnsConfig = Field(default_factory=ColumnsConfig)
    train_max_samples: PositiveInt | None = None
    val_max_samples: PositiveInt | None = None
    train_batch_size: PositiveInt = Field(default=32, description="Prompts a step (RL); rows an optimizer step (SFT).")
    val_batch_size: PositiveInt = 128
    max_prompt_length: PositiveInt = 512
    max_response_length: PositiveInt = 512
    overlong_prompts: Literal["error", "filter"] = "error"
    shuffle: bool = True
    apply_chat_template: Literal["auto", "always", "never"] = Field(
        default="auto", description="auto: when the tokenizer has a template."
    )
    system_prompt: str | None = None
    prompt_template: str | None = Field(default=None, description="str.format template with {prompt}.")

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if self.task is None and not self.train_files:
            raise ValueError("set data.train_files (jsonl or parquet) or data.task (procedural)")
        if self.task is not None and (self.train_files or self.val_files):
            raise ValueError("set one of data.train_files and data.task, not both")
        return self


class WarmStartConfig(Strict):
    """SFT on the training rows' own answers before RL, so that a reward signal exists."""

    steps: PositiveInt
    batch_size: PositiveInt = 32
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig(lr=1e-5))
    eval_freq: PositiveInt = 20
    stop_at_score: float | None = Field(default=None, description="Stop once the sampled validation score reaches it.")


class GuardsConfig(Strict):
    """Guards that are on by default; turning one off is written to the manifest."""

    rollout_logprob_check: bool = True
    rollout_probs_diff_mean_max: PositiveFloat = Field(
        default=0.02,
        description="Stop when the mean |p_rollout - p_trainer| of the check is larger. Under 0.005 is normal.",
    )
    weight_fingerprint: bool = True
    nonfinite_step_budget: int = Field(default=3, ge=0, description="Stop after this many non-finite steps in a row.")


class TrainerConfig(Strict):
    """The loop."""

    type: Literal["rl", "sft"] = "rl"
    total_training_steps: PositiveInt | None = None
    total_epochs: PositiveInt = 1
    seed: int = Field(default=0, ge=0)
    val_before_train: bool = True
    test_freq: int = Field(default=0, ge=0, description="Validate every this many steps; 0: only at the end.")
    save_freq: int = Field(default=0, ge=0, description="Save a checkpoint every this many steps; 0: only at the end.")
    max_ckpt_to_keep: PositiveInt = 2
    save_best: bool = Field(default=True, description="Export the best validation score as a Hugging Face directory.")
    resume_mode: Literal["disable", "auto"] = "disable"
    logger: tuple[str, ...] = ("console", "jsonl", "tensorboard")
    project_name: str = "rlctl"
    experiment_name: str | None = None
    rollout_samples: PositiveInt = Field(default=8, description="Rows of each step kept as samples.")
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    nproc: PositiveInt = Field(default=1, description="Processes (ranks). This version launches one.")
    num_threads: PositiveInt | None = Field(default=None, description="CPU threads of torch; default: torch's own.")


class RunConfig(Strict):
    """One run, one file."""

    model: ModelConfig
    data: DataConfig
    actor: ActorConfig = Field(default_factory=ActorConfig)
    ref: RefConfig = Field(default_factory=RefConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    guards: GuardsConfig = Field(default_factory=GuardsConfig)
    warm_start: WarmStartConfig | None = None

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> RunConfig:
        mini = self.actor.ppo_mini_batch_size
        if mini is not None and self.trainer.type == "rl" and self.data.train_batch_size % mini:
            raise ValueError(
                f"data.train_batch_size {self.data.train_batch_size} is not a multiple of "
                f"actor.ppo_mini_batch_size {mini}"
            )
        budget = self.actor.max_tokens_per_device
        longest = self.data.max_prompt_length + self.data.max_response_length
        if budget is not None and budget < longest:
            raise ValueError(
                f"actor.max_tokens_per_device {budget} cannot hold one row of data.max_prompt_length + "
                f"data.max_response_length = {longest} tokens"
            )
        return self
