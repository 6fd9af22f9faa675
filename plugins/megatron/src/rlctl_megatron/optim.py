"""The optimizer step: reductions, norm over every group, clipping, schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

from rlctl.engine import StepOutput
from rlctl.errors import ConfigError, EngineError
from rlctl.schedule import lr_factor
from rlctl_megatron.build import Built
from rlctl_megatron.standins import building, cast_no_fp8


class Stepper:
    """megatron-core's optimizer of all chunks, with rlctl's schedule and clipping.

    Weight decay falls on matrices only: biases and norm weights (one dimension) have none. ``sgd`` has no momentum.

    Args:
        settings: the ``optim`` section.
        distributed: moments and main weights are sharded over data parallel and context parallel ranks.

    Raises:
        ConfigError: the schedule does not know its length, or an optimizer that this backend has not.
    """

    def __init__(self, built: Built, settings: Mapping[str, Any], device: torch.device, *, distributed: bool) -> None:
        self.built = built
        self._settings = dict(settings)
        lr_factor(0, self._settings)  # an impossible schedule fails here, not after the first forward
        self.name = str(settings.get("name", "adamw"))
        self.distributed = distributed
        self.num_steps = 0
        self.pending = False
        """Gradients were added since the last step."""
        self.optimizer = _optimizer(built, settings, device, distributed)
        self.set_decay()

    def set_decay(self) -> None:
        """The decay of each group, which megatron-core leaves to its own scheduler; that is not used here."""
        decay = float(self._settings.get("weight_decay", 0.01))
        for group in self.groups():
            group["weight_decay"] = decay * group["wd_mult"]

    def groups(self) -> Iterator[dict[str, Any]]:
        """Parameter groups of this rank, of dense and of expert weights."""
        for inner in self.parts():
            if inner.optimizer is not None:
                yield from inner.optimizer.param_groups

    def parts(self) -> list[Any]:
        """The optimizers of dense and of expert weights."""
        whole: Any = self.optimizer
        return list(whole.chained_optimizers) if isinstance(whole, ChainedOptimizer) else [whole]

    @property
    def has_moments(self) -> bool:
        """The optimizer keeps moments, and has begun to."""
        return self.name == "adamw" and self.num_steps > 0

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self._settings.get("lr", 1e-6)) * lr_factor(self.num_steps, self._settings)

    @torch.no_grad()
    def step(self) -> StepOutput:
        """Reduce, clip, step, schedule, zero gradients. A non-finite norm skips the step; the schedule then stays.

        Raises:
            EngineError: nothing was run since the last step.
        """
        if not self.pending:
            raise EngineError(
                "there are no gradients to step with",
                found="no forward_backward call since the last step",
                wanted="one without forward_only before each optimizer step",
            )
        # Sums over data and context parallel ranks, over tp where only a part of the tokens or heads was seen, and of the
        # embedding's two copies under pp. Without a token count nothing is divided: the loss was weighted already.
        finalize_model_grads(list(self.built.wrapped), None)  # type: ignore[arg-type]
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        lr = self.lr
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            self._clip(grad_norm)
            for group in self.groups():
                group["lr"] = lr
            self.optimizer.step_with_ready_grads()
            self.num_steps += 1
        self.drop_gradients()
        return StepOutput(grad_norm=grad_norm, lr=lr, skipped=skipped)

    def _clip(self, norm: float) -> None:
        clip = float(self._settings.get("clip_grad", 1.0))
        if not 0 < clip < norm:
            return
        # torch adds the same small number below, so that both backends clip alike.
        factor = clip / (norm + 1e-6)
        grads = [p.grad for part in self.parts() for p in part.get_parameters() if p.grad is not None]
        for grad in grads:
            grad.mul_(factor)

    def drop_gradients(self) -> None:
        """Zero the buffers."""
        for chunk in self.built.wrapped:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        self.pending = False


def _optimizer(built: Built, settings: Mapping[str, Any], device: torch.device, distributed: bool) -> MegatronOptimizer:
    name = str(settings.get("name", "adamw"))
    if name not in ("adamw", "sgd"):
        raise ConfigError("unknown optimizer", found=f"optim.name {name}", wanted="adamw or sgd")
    if distributed and name != "adamw":
        raise ConfigError(
            "megatron's distributed optimizer shards the moments of AdamW, and of nothing else",
            found=f"optim.name {name} and engine.distributed_optimizer always",
            wanted="engine.distributed_optimizer auto or never",
            next="set actor.engine.distributed_optimizer=auto",
        )
    beta1, beta2 = settings.get("betas", (0.9, 0.999))
    config = OptimizerConfig(
        optimizer="adam" if name == "adamw" else "sgd",
        lr=float(settings.get("lr", 1e-6)),
        min_lr=0.0,
        weight_decay=float(settings.get("weight_decay", 0.01)),
        adam_beta1=float(beta1),
        adam_beta2=float(beta2),
        adam_eps=float(settings.get("eps", 1e-8)),
        sgd_momentum=0.0,
        clip_grad=0.0,  # done here, so that a skipped step leaves everything as it was
        bf16=built.config.bf16,
        params_dtype=built.config.params_dtype,
        use_distributed_optimizer=distributed,
    )
    if distributed:
        cast_no_fp8()
    with building(device.type):
        return get_megatron_optimizer(config, list(built.wrapped), use_gloo_process_groups=False)  # type: ignore[arg-type]
