"""The configuration of a run: strict, frozen pydantic models. Importing it imports no torch.

One name for one thing. Sizes say their unit: ``*_batch_size`` counts prompts unless it says rows, ``*_length`` and
``*_tokens`` count tokens, ``*_freq`` counts steps, ``*_s`` seconds. Defaults are what a first run wants.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from rlctl.config.algorithm_faults import algorithm_faults
from rlctl.config.base import Strict as Strict
from rlctl.config.entropy_faults import entropy_faults
from rlctl.config.reward_faults import reward_faults
from rlctl.config.schema_algorithm import AlgorithmConfig
from rlctl.config.schema_algorithm import PolicyLossConfig as PolicyLossConfig
from rlctl.config.schema_correction import correction_faults
from rlctl.config.schema_critic import CriticConfig, critic_faults
from rlctl.config.schema_data import ColumnsConfig as ColumnsConfig
from rlctl.config.schema_data import DataConfig as DataConfig
from rlctl.config.schema_data import TaskConfig as TaskConfig
from rlctl.config.schema_distillation import DistillationConfig, distillation_faults
from rlctl.config.schema_environment import environment_faults
from rlctl.config.schema_lora import lora_faults
from rlctl.config.schema_model import ModelConfig
from rlctl.config.schema_model import OptimConfig as OptimConfig
from rlctl.config.schema_model import ParallelConfig as ParallelConfig
from rlctl.config.schema_pools import pool_faults
from rlctl.config.schema_preference import DPOConfig, RMConfig, preference_faults
from rlctl.config.schema_reward import RewardComponent as RewardComponent
from rlctl.config.schema_reward import RewardConfig
from rlctl.config.schema_roles import ActorConfig, RefConfig, TeacherConfig, WarmStartConfig
from rlctl.config.schema_roles import TrainRole as TrainRole
from rlctl.config.schema_rollout import RolloutConfig
from rlctl.config.schema_rollout import ValSampling as ValSampling
from rlctl.config.schema_runtime import RuntimeConfig
from rlctl.config.schema_trainer import GuardsConfig, TrainerConfig
from rlctl.config.sft_faults import supervised_faults
from rlctl.config.staleness import staleness_faults
from rlctl.records import BackendKind


class RunConfig(Strict):
    """One run, one file."""

    model: ModelConfig = Field(description="Which model.")
    data: DataConfig = Field(description="Rows: files or a procedural task.")
    actor: ActorConfig = Field(default_factory=ActorConfig, description="The policy that is trained.")
    ref: RefConfig = Field(default_factory=RefConfig, description="The frozen reference of the KL.")
    critic: CriticConfig | None = Field(
        default=None, description="The value model. algorithm.adv_estimator gae makes one of defaults."
    )
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Generation.")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="How rewards become advantages.")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="A weighted sum of rewards.")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="The loop.")
    runtime: RuntimeConfig = Field(
        default_factory=RuntimeConfig, description="Processes: how many, started how, and how long they are waited for."
    )
    guards: GuardsConfig = Field(default_factory=GuardsConfig, description="What stops a run that has gone wrong.")
    warm_start: WarmStartConfig | None = Field(default=None, description="A short SFT before RL.")
    dpo: DPOConfig = Field(default_factory=DPOConfig, description="Learning from pairs (trainer.type dpo).")
    rm: RMConfig = Field(default_factory=RMConfig, description="Training a reward model (trainer.type rm).")
    distillation: DistillationConfig | None = Field(default=None, description="Learn from a teacher.")
    teacher: TeacherConfig | None = Field(default=None, description="Whom distillation learns from.")

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> RunConfig:
        # All of them, one a line: the reader mends them together.
        faults = distillation_faults(self) + algorithm_faults(self) + critic_faults(self)
        if self.trainer.type == "rl":  # elsewhere the section itself is refused
            faults += correction_faults(self)
        faults += reward_faults(self) + entropy_faults(self) + supervised_faults(self) + preference_faults(self)
        faults += [*staleness_faults(self), *lora_faults(self), *environment_faults(self)]
        rl = self.trainer.type == "rl"
        mini = self.actor.ppo_mini_batch_size
        if rl and mini is not None and self.data.train_batch_size % mini:
            faults.append(
                f"data.train_batch_size {self.data.train_batch_size} is not a multiple of "
                f"actor.ppo_mini_batch_size {mini}"
            )
        faults += pool_faults(self, ("actor", "ref", "rollout", "critic", "teacher"))
        longest = self.data.max_prompt_length + self.data.max_response_length
        for role in ("actor", "ref", "critic", "teacher"):
            section = getattr(self, role)
            budget = section.max_tokens_per_device if section else None
            if budget is not None and budget < longest:
                faults.append(
                    f"{role}.max_tokens_per_device {budget} cannot hold one row of data.max_prompt_length + "
                    f"data.max_response_length = {longest} tokens"
                )
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @property
    def needs_reference(self) -> bool:
        """True where a reference takes part: for a KL in the loss or in the reward, or for DPO."""
        if self.trainer.type == "dpo":
            return self.dpo.needs_reference
        return self.trainer.type == "rl" and (self.actor.use_kl_loss or self.algorithm.use_kl_in_reward)

    def pool_of(self, role: str) -> str:
        """The pool of processes where a role lives: its own, else the actor's."""
        return getattr(getattr(self, role, None), "pool", "") or self.actor.pool

    def backend_of(self, role: str) -> tuple[str, BackendKind]:
        """The backend of a role: its own, else the actor's."""
        kind = BackendKind.ROLLOUT if role == "rollout" else BackendKind.TRAIN
        return getattr(getattr(self, role, None), "backend", "") or self.actor.backend, kind

    def roles_used(self) -> dict[str, str]:
        """Role -> pool, of the roles that take part in this run."""
        roles = ["actor", *(["ref"] if self.needs_reference else [])]
        if self.trainer.type == "rl":
            roles.append("rollout")
            roles += [role for role in ("critic", "teacher") if getattr(self, role) is not None]
        return {role: self.pool_of(role) for role in roles}

    def pools_used(self) -> dict[str, int]:
        """Pool name -> number of ranks of the pools where a role of this run lives; no other is started."""
        used = set(self.roles_used().values())
        return {name: size for name, size in self.runtime.sizes().items() if name in used}
