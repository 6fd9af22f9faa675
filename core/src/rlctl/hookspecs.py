"""The contract: every hook, when it runs, its arguments, what it returns.

Two groups. *Discovery* hooks are implemented by a plugin's light module (standard library and ``rlctl`` only) and
return records; they never register anything. *Engine* hooks are implemented as ``@hookimpl`` methods of an engine
class; each :class:`rlctl.engine.Engine` owns a plugin manager with exactly one provider of them, plus wrappers.

Example of a light module::

    from rlctl.hookspecs import hookimpl
    from rlctl.records import BackendSpec

    @hookimpl
    def rlctl_backends():
        return [BackendSpec(name="toy", ...)]

Argument names are part of the contract: pluggy matches by name, and an implementation may leave arguments out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from rlctl.records import (
    AlgorithmSpec,
    BackendSpec,
    Check,
    EnvironmentSpec,
    RecipeSpec,
    RewardSpec,
    TrackerSpec,
    WeightTransportSpec,
)

if TYPE_CHECKING:
    import torch

    from rlctl.batch import PackedBatch
    from rlctl.engine import EngineInfo, MeshInfo, MicroOutput, StepOutput
    from rlctl.generation import Completion, GenerateRequest, ScoreRequest, TokenScores
    from rlctl.logits import LossFn
    from rlctl.topology import Topology

PROJECT = "rlctl"
ENTRY_POINT_GROUP = "rlctl.plugins"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class DiscoverySpecs:
    """Hooks of a plugin's light module. Each returns records, collected from every plugin."""

    @hookspec
    def rlctl_backends(self) -> Iterable[BackendSpec]:  # type: ignore[empty-body]
        """Runs at discovery. Returns the backends of this dist."""

    @hookspec
    def rlctl_checks(self) -> Iterable[Check]:  # type: ignore[empty-body]
        """Runs in ``rlctl doctor``. Returns extra checks; they return data and print nothing."""

    @hookspec
    def rlctl_prepare_process(self, backend: str, config: Mapping[str, Any]) -> None:
        """Runs in every rank before the backend's libraries are imported: the only place where a patch may be applied.

        Called for the plugin that owns ``backend`` alone. ``config`` is the resolved engine section.
        """

    @hookspec
    def rlctl_trackers(self) -> Iterable[TrackerSpec]:  # type: ignore[empty-body]
        """Returns metrics sinks."""

    @hookspec
    def rlctl_rewards(self) -> Iterable[RewardSpec]:  # type: ignore[empty-body]
        """Returns named rewards."""

    @hookspec
    def rlctl_environments(self) -> Iterable[EnvironmentSpec]:  # type: ignore[empty-body]
        """Returns environments for conversations of several turns, by name."""

    @hookspec
    def rlctl_algorithms(self) -> Iterable[AlgorithmSpec]:  # type: ignore[empty-body]
        """Returns advantage estimators and policy losses by name."""

    @hookspec
    def rlctl_recipes(self) -> Iterable[RecipeSpec]:  # type: ignore[empty-body]
        """Returns shipped configurations."""

    @hookspec
    def rlctl_weight_transports(self) -> Iterable[WeightTransportSpec]:  # type: ignore[empty-body]
        """Returns ways to carry weights from training to rollout ranks in other processes.

        Each rank offers those of its environment; of what all offer, :func:`rlctl.runtime.transfer.choose` takes the one that
        fits their devices and reaches least far.
        """

    @hookspec
    def rlctl_engine_wrappers(self, backend: str, role: str) -> Iterable[tuple[str, str]]:  # type: ignore[empty-body]
        """Returns (name, ``module:Class``) of wrappers (``wrapper=True`` hooks only) for an engine about to be built."""


class EngineSpecs:
    """Hooks of an engine. ``firstresult`` because exactly one provider answers; the facade counts them."""

    # ---- both kinds -------------------------------------------------------------------------------------------
    @hookspec(firstresult=True)
    def rlctl_build_mesh(self, topology: Topology, settings: Mapping[str, Any]) -> MeshInfo:  # type: ignore[empty-body]
        """First call on an engine: process groups and device meshes. Reports this rank's place (see MeshInfo).

        ``settings``: the backend's own ``engine`` section, already validated by its config model, plus ``device``.
        """

    @hookspec(firstresult=True)
    def rlctl_engine_init(
        self, mesh: MeshInfo, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None, forward_only: bool
    ) -> EngineInfo:  # type: ignore[empty-body]
        """Build module, optimizer and schedule. With ``forward_only`` neither optimizer nor schedule exists.

        ``model``: the ``model`` section as a dict (path, config, init, dtype ...), ``seed``, from which random weights
        are drawn, and always ``model_type``, the head: ``language_model``, or ``value_model`` for one number a token. A
        value model is read through a :class:`rlctl.logits.ValueReader`; its weights are those of transformers' token
        classifier with one label, ``score.weight`` ``[1, D]`` on top. ``lora`` (None, or a
        :class:`rlctl.config.schema_lora.LoraConfig` as a dict) asks for adapters in the place of all weights: they alone are
        trained and saved, and exports are merged. Only an engine that has ``rlctl_set_adapters`` is asked.

        ``optimizer``: the ``optim`` section; ``name`` is ``adamw`` (without AMSGrad) or ``sgd`` (no momentum), and
        an engine refuses with ConfigError what it has not; the rate goes by :func:`rlctl.schedule.lr_factor`.
        """

    @hookspec(firstresult=True)
    def rlctl_release(self, parts: Sequence[str]) -> bool:  # type: ignore[empty-body]
        """Free device memory of ``parts`` (``weights``, ``kv``, ``optimizer``). True when something was freed."""

    @hookspec(firstresult=True)
    def rlctl_resume(self, parts: Sequence[str]) -> bool:  # type: ignore[empty-body]
        """Bring ``parts`` back. True when they are usable again."""

    @hookspec(firstresult=True)
    def rlctl_shutdown(self) -> bool:  # type: ignore[empty-body]
        """Last call: destroy process groups and free memory. It also follows a mesh or model that failed to build, and
        may come twice."""

    # ---- training engines -------------------------------------------------------------------------------------
    @hookspec(firstresult=True)
    def rlctl_forward_backward(
        self, micro_batches: Sequence[PackedBatch], loss_fn: LossFn, forward_only: bool
    ) -> list[MicroOutput]:  # type: ignore[empty-body]
        """Run all micro-batches of one mini-batch; unless ``forward_only`` gradients accumulate.

        The engine calls ``loss_fn(reader, micro_batch)`` once per micro-batch and backpropagates ``loss``; the reader is a
        :class:`rlctl.logits.LogitsReader`, or of a value model a :class:`rlctl.logits.ValueReader`. The loss is
        already a globally weighted sum; the engine only makes its gradient reduction a *sum* over data parallel ranks.
        Zero-weight micro-batches (``micro_batch.is_padding``) take part in every collective. Several calls may precede
        one optimizer step. A call that raises drops what was gathered: nothing of it is in a later step.
        """

    @hookspec(firstresult=True)
    def rlctl_optimizer_step(self) -> StepOutput:  # type: ignore[empty-body]
        """Finish pending reductions, clip, step, schedule, zero gradients.

        A non-finite norm skips the step: weights, moments and schedule stay as they were, the gradients are dropped.
        The rate in the answer is the one that this step used.
        """

    @hookspec(firstresult=True)
    def rlctl_export_weights(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:  # type: ignore[empty-body]
        """Iterate over (Hugging Face name, full tensor), lazily and with bounded memory. ``dtype`` None keeps master."""

    @hookspec(firstresult=True)
    def rlctl_set_mode(self, train: bool) -> bool:  # type: ignore[empty-body]
        """Switch between train and eval behaviour (dropout)."""

    @hookspec(firstresult=True)
    def rlctl_set_adapters(self, enabled: bool) -> bool:  # type: ignore[empty-body]
        """Compute with the model's adapters (as after its start), or as the base model does without them, until told otherwise.

        Called around forward-only passes: the base is the reference of a policy that trains adapters. False without adapters.
        """

    @hookspec(firstresult=True)
    def rlctl_export_adapters(self, path: Path) -> bool:  # type: ignore[empty-body]
        """Write the adapters alone as a directory that peft reads; collective. False without adapters, and of a
        value model, whose head is no adapter."""

    @hookspec(firstresult=True)
    def rlctl_move(self, device: str, parts: Sequence[str]) -> bool:  # type: ignore[empty-body]
        """Move ``parts`` (``model``, ``optimizer``, ``grad``) to ``device`` or ``cpu``."""

    @hookspec(firstresult=True)
    def rlctl_save_state(self, path: Path) -> bool:  # type: ignore[empty-body]
        """Write model, optimizer, schedule and RNG state of all ranks below ``path`` (an empty directory)."""

    @hookspec(firstresult=True)
    def rlctl_load_state(self, path: Path) -> bool:  # type: ignore[empty-body]
        """Read what ``rlctl_save_state`` wrote; raises CheckpointError when moments or step counts are missing."""

    @hookspec(firstresult=True)
    def rlctl_reduce(self, values: Sequence[float], op: str) -> list[float]:  # type: ignore[empty-body]
        """Reduce numbers over the data parallel group, in float64; ``op`` is ``sum``, ``max`` or ``min``."""

    @hookspec(firstresult=True)
    def rlctl_local_module(self) -> Any:  # type: ignore[empty-body]
        """The live module for an embedded rollout in this process, or None where it cannot be shared."""

    # ---- rollout engines --------------------------------------------------------------------------------------
    @hookspec(firstresult=True)
    def rlctl_generate(
        self, request: GenerateRequest, on_done: Callable[[Completion], None] | None
    ) -> list[Completion]:  # type: ignore[empty-body]
        """Sample completions. Output order: prompt-major, ``n`` consecutive samples a prompt. Tokens in, tokens out."""

    @hookspec(firstresult=True)
    def rlctl_score(self, request: ScoreRequest) -> list[TokenScores]:  # type: ignore[empty-body]
        """Log-probs (and top-k) of given tokens under the rollout engine's own weights."""

    @hookspec(firstresult=True)
    def rlctl_load_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:  # type: ignore[empty-body]
        """Take a full set of weights by Hugging Face name, reset every cache that depends on them.

        A tensor is good until the next one is asked for: what comes may be written where it lies. Clone what is kept.

        Returns ``{"loaded": [...names], "missing": [...names]}``; the caller checks the coverage.
        """

    @hookspec(firstresult=True)
    def rlctl_attach_module(self, module: Any, version: int) -> bool:  # type: ignore[empty-body]
        """Use the training engine's live module from here on (in-process transport). False when not possible."""

    @hookspec(firstresult=True)
    def rlctl_weight_fingerprint(self, names: Sequence[str]) -> dict[str, str]:  # type: ignore[empty-body]
        """Fingerprints of the weights this engine serves, by Hugging Face name (see :mod:`rlctl.sync`)."""


COMMON_HOOKS = ("rlctl_build_mesh", "rlctl_engine_init")
TRAIN_HOOKS = (
    *COMMON_HOOKS,
    "rlctl_forward_backward",
    "rlctl_optimizer_step",
    "rlctl_export_weights",
    "rlctl_set_mode",
    "rlctl_move",
    "rlctl_save_state",
    "rlctl_load_state",
    "rlctl_reduce",
)
ROLLOUT_HOOKS = (*COMMON_HOOKS, "rlctl_generate", "rlctl_load_weights", "rlctl_weight_fingerprint")
"""Hooks that a provider of each kind must implement; the rest are optional."""


class EngineHooks(Protocol):
    """Keyword-only view of the engine hooks, as pluggy calls them. A test derives its names from EngineSpecs."""

    def rlctl_build_mesh(self, *, topology: Topology, settings: Mapping[str, Any]) -> MeshInfo: ...
    def rlctl_engine_init(
        self, *, mesh: MeshInfo, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None, forward_only: bool
    ) -> EngineInfo: ...
    def rlctl_release(self, *, parts: Sequence[str]) -> bool | None: ...
    def rlctl_resume(self, *, parts: Sequence[str]) -> bool | None: ...
    def rlctl_shutdown(self) -> bool | None: ...
    def rlctl_forward_backward(
        self, *, micro_batches: Sequence[PackedBatch], loss_fn: LossFn, forward_only: bool
    ) -> list[MicroOutput]: ...
    def rlctl_optimizer_step(self) -> StepOutput: ...
    def rlctl_export_weights(self, *, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]: ...
    def rlctl_set_mode(self, *, train: bool) -> bool | None: ...
    def rlctl_set_adapters(self, *, enabled: bool) -> bool | None: ...
    def rlctl_export_adapters(self, *, path: Path) -> bool | None: ...
    def rlctl_move(self, *, device: str, parts: Sequence[str]) -> bool | None: ...
    def rlctl_save_state(self, *, path: Path) -> bool | None: ...
    def rlctl_load_state(self, *, path: Path) -> bool | None: ...
    def rlctl_reduce(self, *, values: Sequence[float], op: str) -> list[float]: ...
    def rlctl_local_module(self) -> Any: ...
    def rlctl_generate(
        self, *, request: GenerateRequest, on_done: Callable[[Completion], None] | None
    ) -> list[Completion]: ...
    def rlctl_score(self, *, request: ScoreRequest) -> list[TokenScores]: ...
    def rlctl_load_weights(self, *, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]: ...
    def rlctl_attach_module(self, *, module: Any, version: int) -> bool | None: ...
    def rlctl_weight_fingerprint(self, *, names: Sequence[str]) -> dict[str, str]: ...
