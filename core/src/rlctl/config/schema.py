"""The configuration of a run: strict, frozen pydantic models. Importing it imports no torch.

One name for one thing. Sizes say their unit: ``*_batch_size`` counts prompts unless it says rows, ``*_length`` and
``*_tokens`` count tokens, ``*_freq`` counts steps, ``*_s`` seconds. Defaults are what a first run wants.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, field_validator, model_validator

from rlctl.config.base import MAX_COUNT, Count, CountOrZero, Momentum, Seed
from rlctl.config.base import Strict as Strict
from rlctl.config.schema_data import ColumnsConfig as ColumnsConfig
from rlctl.config.schema_data import DataConfig as DataConfig
from rlctl.config.schema_data import TaskConfig as TaskConfig
from rlctl.config.schema_distillation import DistillationConfig, distillation_faults
from rlctl.config.schema_runtime import MAIN_POOL, RuntimeConfig
from rlctl.normalizer_modes import LossAggMode


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


class PolicyLossConfig(Strict):
    """The policy loss. Vanilla is PPO's clip (arXiv 1707.06347) with dual clip (arXiv 1912.09729)."""

    loss_mode: Literal["vanilla"] = Field(default="vanilla", description="Which policy loss.")
    clip_ratio_low: float = Field(default=0.2, ge=0, le=1, description="The ratio is clipped below 1 - this.")
    clip_ratio_high: float = Field(default=0.2, ge=0, description="The ratio is clipped above 1 + this.")
    clip_ratio_c: float = Field(default=3.0, gt=1, description="Dual clip: bound on the loss of negative advantages.")


class TrainRole(Strict):
    """What the roles that run a training engine share."""

    backend: str = Field(default="fsdp2", description="Training backend; rlctl plugins lists them.")
    engine: dict[str, Any] = Field(default_factory=dict, description="The backend's own section.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Sizes of the parallel axes.")
    pool: str = Field(default=MAIN_POOL, description="Pool of processes where it lives (runtime.pools).")
    micro_batch_size_per_device: Count | None = Field(default=None, description="Rows of a micro-batch.")
    max_tokens_per_device: Count | None = Field(
        default=None,
        description="Token budget of a micro-batch, a hard bound. Set at most one of the two; default 16384 tokens.",
    )

    @model_validator(mode="after")
    def _one_bound(self) -> TrainRole:
        if self.micro_batch_size_per_device and self.max_tokens_per_device:
            raise ValueError("set one of micro_batch_size_per_device and max_tokens_per_device, not both")
        return self


class ActorConfig(TrainRole):
    """The policy that is trained (for SFT: the model that is trained)."""

    optim: OptimConfig = Field(default_factory=OptimConfig, description="AdamW and its schedule.")
    policy_loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig, description="The policy loss.")
    loss_agg_mode: LossAggMode = Field(
        default=LossAggMode.TOKEN_MEAN, description="How per-token losses become one number."
    )
    ppo_mini_batch_size: Count | None = Field(default=None, description="Prompts of one optimizer step; default: all.")
    ppo_epochs: Count = Field(default=1, description="Passes over each batch of rollouts.")
    entropy_coeff: float = Field(default=0.0, description="Weight of the entropy bonus.")
    use_kl_loss: bool = Field(default=False, description="Add the KL to the reference to the loss.")
    kl_loss_coef: float = Field(default=0.001, ge=0, description="Weight of the KL in the loss.")
    kl_loss_type: Literal["k1", "k2", "k3", "kl", "mse", "low_var_kl"] = Field(
        default="k3",
        description="KL estimator; kl, mse and low_var_kl are other names of k1, k2 and k3. The gradient of k1 is zero in "
        "expectation: it measures and regularises nothing.",
    )
    skip_zero_advantage: bool = Field(
        default=True,
        description="Leave rows out of the update whose gradient is exactly zero (no advantage, no KL, no entropy).",
    )


class RefConfig(TrainRole):
    """The frozen reference, used with actor.use_kl_loss. What it does not state it takes from the actor."""

    backend: str = Field(
        default="", description="Training backend; empty: the actor's, with the actor's engine section."
    )
    pool: str = Field(
        default="", description="Pool of processes where it lives; empty: the actor's, with the actor's dp sizes."
    )


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
    n: Count = Field(default=8, description="Samples a prompt.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Share of the probability that is kept; 1: all.")
    top_k: CountOrZero = Field(default=0, description="Most likely tokens that are kept; 0: all.")
    stop: tuple[str, ...] = Field(default=(), description="Texts that end a sample.")
    share_weights: bool = Field(
        default=True, description="Generate from the training module itself where both live in one process (no copy)."
    )
    val_kwargs: ValSampling = Field(default_factory=ValSampling, description="How validation samples.")


class AlgorithmConfig(Strict):
    """How rewards become advantages, and where old log-probs come from."""

    name: Literal["grpo"] = Field(default="grpo", description="Which algorithm.")
    adv_estimator: Literal["grpo"] = Field(default="grpo", description="How rewards become advantages.")
    norm_adv_by_std_in_grpo: bool = Field(default=True, description="False is Dr. GRPO's advantage (arXiv 2503.20783).")
    bypass_mode: bool = Field(
        default=False, description="Take the rollout's log-probs as old log-probs instead of recomputing them."
    )


class RewardComponent(Strict):
    """One reward: a registered name, or path/to/file.py:function."""

    name: str = Field(min_length=1, description="A registered reward, or path/to/file.py:function.")
    weight: float = Field(default=1.0, description="Weight in the sum.")
    args: dict[str, Any] = Field(default_factory=dict, description="Settings of the reward.")


class RewardConfig(Strict):
    """The reward of a row is the weighted sum of its components."""

    components: tuple[RewardComponent, ...] = Field(
        default=(RewardComponent(name="exact_match"),), min_length=1, description="The rewards that are added up."
    )
    timeout_s: PositiveFloat = Field(
        default=10.0, description="Limit for one call of a user's function or of math-verify."
    )


class WarmStartConfig(Strict):
    """SFT on the training rows' own answers before RL, so that a reward signal exists."""

    steps: Count = Field(description="Optimizer steps at most.")
    batch_size: Count = Field(default=32, description="Rows of an optimizer step.")
    optim: OptimConfig = Field(
        default_factory=lambda: OptimConfig(lr=1e-5), description="AdamW and its schedule, apart from the actor's."
    )
    eval_freq: Count = Field(default=20, description="Steps between two looks at stop_at_score.")
    stop_at_score: float | None = Field(default=None, description="Stop once the sampled validation score reaches it.")


class TeacherConfig(RefConfig):
    """The teacher of a distillation: scores, never learns. What it does not state it takes from the actor."""

    model: ModelConfig | None = Field(default=None, description="The one teacher.")
    models: dict[str, ModelConfig] = Field(
        default_factory=dict,
        description="Several teachers: value of route_by in a row to the model section of its teacher.",
    )
    route_by: str = Field(
        default="data_source", min_length=1, description="data_source, or a key of a row's extra_info."
    )
    train: WarmStartConfig | None = Field(
        default=None, description="Train the teacher first, by SFT on the training rows' answers."
    )


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
    nonfinite_step_budget: CountOrZero = Field(default=3, description="Stop after this many non-finite steps in a row.")


class TrainerConfig(Strict):
    """The loop."""

    type: Literal["rl", "sft"] = Field(default="rl", description="Which trainer.")
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
    balance_batch: bool = Field(
        default=True, description="Give data parallel ranks equal tokens, not just equal rows (Karmarkar-Karp)."
    )


class RunConfig(Strict):
    """One run, one file."""

    model: ModelConfig = Field(description="Which model.")
    data: DataConfig = Field(description="Rows: files or a procedural task.")
    actor: ActorConfig = Field(default_factory=ActorConfig, description="The policy that is trained.")
    ref: RefConfig = Field(default_factory=RefConfig, description="The frozen reference of the KL.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Generation.")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="How rewards become advantages.")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="A weighted sum of rewards.")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="The loop.")
    runtime: RuntimeConfig = Field(
        default_factory=RuntimeConfig, description="Processes: how many, started how, and how long they are waited for."
    )
    guards: GuardsConfig = Field(default_factory=GuardsConfig, description="What stops a run that has gone wrong.")
    warm_start: WarmStartConfig | None = Field(default=None, description="A short SFT before RL.")
    distillation: DistillationConfig | None = Field(default=None, description="Learn from a teacher.")
    teacher: TeacherConfig | None = Field(default=None, description="Whom distillation learns from.")

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> RunConfig:
        # All of them, one a line: the reader mends them together.
        faults = distillation_faults(self)
        rl = self.trainer.type == "rl"
        groups = self.distillation is None or self.distillation.use_task_rewards
        if rl and groups and self.rollout.n < 2:
            faults.append(
                f"rollout.n is {self.rollout.n}: GRPO compares the samples of one prompt and needs at least 2"
            )
        mini = self.actor.ppo_mini_batch_size
        if rl and mini is not None and self.data.train_batch_size % mini:
            faults.append(
                f"data.train_batch_size {self.data.train_batch_size} is not a multiple of "
                f"actor.ppo_mini_batch_size {mini}"
            )
        for path, pool in (
            ("actor.pool", self.actor.pool),
            ("ref.pool", self.ref.pool),
            ("rollout.pool", self.rollout.pool),
            ("teacher.pool", self.teacher.pool if self.teacher else ""),
        ):
            if pool and pool not in self.runtime.sizes():
                faults.append(
                    f"{path} is {pool!r}, and the pools are {', '.join(self.runtime.sizes())}; "
                    f"runtime.pools={{{pool}: {{nproc: 1}}}} makes it"
                )
        named = {self.actor.pool, self.ref.pool or self.actor.pool, self.rollout.pool}
        named |= {self.teacher.pool or self.actor.pool} if self.teacher else set()
        if idle := ", ".join(name for name in self.runtime.pools if name not in named):
            faults.append(
                f"runtime.pools has {idle}, where no role lives: set actor.pool, rollout.pool, ref.pool or "
                "teacher.pool to it"
            )
        if self.runtime.nproc > 1 and MAIN_POOL not in named:
            faults.append(
                f"runtime.nproc is {self.runtime.nproc}, and no role lives in that pool, {MAIN_POOL}: take it out"
            )
        longest = self.data.max_prompt_length + self.data.max_response_length
        for role, section in (("actor", self.actor), ("ref", self.ref), ("teacher", self.teacher)):
            budget = section.max_tokens_per_device if section else None
            if budget is not None and budget < longest:
                faults.append(
                    f"{role}.max_tokens_per_device {budget} cannot hold one row of data.max_prompt_length + "
                    f"data.max_response_length = {longest} tokens"
                )
        if faults:
            raise ValueError("\n".join(faults))
        return self

    def pools_used(self) -> dict[str, int]:
        """Pool name -> number of ranks of the pools where a role of this run lives; no other is started."""
        used = {self.actor.pool}
        if self.trainer.type == "rl":
            used.add(self.rollout.pool)
            if self.actor.use_kl_loss:
                used.add(self.ref.pool or self.actor.pool)
            if self.teacher is not None:
                used.add(self.teacher.pool or self.actor.pool)
        return {name: size for name, size in self.runtime.sizes().items() if name in used}
