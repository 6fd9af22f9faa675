"""The ``distillation`` section, and what it asks of the other sections. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat

from rlctl.config.base import Count, Strict

if TYPE_CHECKING:
    from rlctl.config.schema import RunConfig

TOPK_SUFFIX = "_topk"


class DistillationConfig(Strict):
    """On-policy distillation: the actor's own samples, and a teacher's opinion of each of their tokens."""

    loss_mode: Literal["k1", "k2", "k3", "abs", "forward_kl_topk", "reverse_kl_topk", "jsd_topk"] = Field(
        default="forward_kl_topk",
        description="k1: a reward of log q - log p under the policy gradient. k2, k3, abs: losses of the sampled tokens. *_topk: "
        "divergences over the topk most probable tokens of the teacher (reverse_kl_topk: of the student) and the rest as one.",
    )
    topk: Count = Field(default=32, description="Tokens that the *_topk losses see; at most the vocabulary.")
    loss_coef: float = Field(default=1.0, ge=0, description="Weight of the distillation loss, or of k1's reward.")
    use_task_rewards: bool = Field(
        default=False,
        description="Add the policy loss of the task's rewards, with weight 1; else they are only reported.",
    )
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.5, description="jsd_topk: weight of the teacher in the mixture."
    )
    log_prob_min: Annotated[float, Field(lt=0)] | None = Field(
        default=None, description="Floor of log-probs inside the *_topk losses, in nats; default: none."
    )
    loss_max: PositiveFloat | None = Field(
        default=None, description="Bound on the loss of a token (k1: on its reward, both ways), in nats; default: none."
    )

    @property
    def is_topk(self) -> bool:
        """True for a loss over several tokens a position."""
        return self.loss_mode.endswith(TOPK_SUFFIX)

    @property
    def uses_policy_loss(self) -> bool:
        """True where advantages are trained on: k1's reward, or the task's."""
        return self.use_task_rewards or self.loss_mode == "k1"


def distillation_faults(config: RunConfig) -> list[str]:
    """What is wrong between ``distillation``, ``teacher`` and the trainer, one line each."""
    distillation, teacher = config.distillation, config.teacher
    if distillation is None and teacher is None:
        return []
    if teacher is None:
        return ["distillation needs a teacher: set teacher.model.path"]
    if distillation is None:
        return ["teacher has nothing to do without distillation: set distillation.loss_mode, or take teacher out"]
    faults: list[str] = []
    if config.trainer.type != "rl":
        faults.append("distillation is of the actor's own samples: set trainer.type to rl, or take distillation out")
    if (teacher.model is None) == (not teacher.models):
        faults.append(
            "set one of teacher.model (one teacher) and teacher.models (one for each value of teacher.route_by)"
        )
    if teacher.train is not None and teacher.models:
        faults.append("teacher.train makes one teacher, and teacher.models names several: set teacher.model")
    return faults
