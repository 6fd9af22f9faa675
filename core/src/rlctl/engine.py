"""The Engine facade: what trainers and roles call. It reaches a backend only through hooks.

Each Engine owns a small plugin manager: exactly one provider, plus wrappers. Raw ``pm.hook`` never leaves this module:
pluggy takes a missing keyword with a warning and an extra one silently, so the facade is the typed way in.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pluggy
import torch

from rlctl import hookspecs
from rlctl.batch import GROUP, PackedBatch, padding_like
from rlctl.engine_adapters import SWITCH, require_switch, without_adapters
from rlctl.engine_records import EngineInfo, MeshInfo, MicroOutput, StepOutput, TrainOutput
from rlctl.errors import BatchError, EngineError
from rlctl.first_items import rows_scored_from_the_start, scored_first_error
from rlctl.generation import Completion, GenerateRequest, ScoreRequest, TokenScores
from rlctl.logits import LossFn
from rlctl.microbatch import MicroBatchPlan, assign, min_count
from rlctl.normalizer import item_weights
from rlctl.normalizer_modes import LossAggMode
from rlctl.records import BackendKind, ModelType
from rlctl.runtime.phases import phase
from rlctl.scoring import ScoreLoss, check_scores
from rlctl.topology import Topology

__all__ = ["Engine", "EngineInfo", "MeshInfo", "MicroOutput", "StepOutput", "TrainOutput", "load_target"]


def load_target(target: str) -> Any:
    """Import ``module:attribute``."""
    import importlib

    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Engine:
    """One rank's view of one model on one backend.

    Args:
        provider: the backend's engine object, with ``@hookimpl`` methods.
        kind: which hooks are required of it.
        name: backend name, for messages.
        wrappers: (name, object) pairs whose hooks are all ``wrapper=True``.

    Raises:
        EngineError: a required hook has not exactly one provider, or a wrapper is none.
    """

    def __init__(
        self, provider: object, kind: BackendKind, name: str, wrappers: Sequence[tuple[str, object]] = ()
    ) -> None:
        self.kind = kind
        self.name = name
        self.mesh: MeshInfo | None = None
        self.info: EngineInfo | None = None
        self.model_type = ModelType.LANGUAGE_MODEL
        self._pm = pluggy.PluginManager(hookspecs.PROJECT)
        self._pm.add_hookspecs(hookspecs.EngineSpecs)
        self._register("provider", provider)
        for wrapper_name, wrapper in wrappers:
            self._register(wrapper_name, wrapper)
            callers = self._pm.get_hookcallers(wrapper) or []
            own = [(c.name, i) for c in callers for i in c.get_hookimpls() if i.plugin is wrapper]
            bad = sorted(hook for hook, i in own if not i.wrapper)
            if bad or not own:
                self._pm.unregister(wrapper)
                raise EngineError(
                    f"{wrapper_name!r} may only wrap the engine {name!r}",
                    found=f"plain hooks {', '.join(bad)}" if bad else "no hook at all",
                    wanted="methods marked @hookimpl(wrapper=True)",
                )
        required = hookspecs.TRAIN_HOOKS if kind is BackendKind.TRAIN else hookspecs.ROLLOUT_HOOKS
        missing = [h for h in required if not self.provides(h)]
        if missing:
            raise EngineError(
                f"the engine of {name!r} does not implement the whole contract",
                found=f"missing {', '.join(missing)}",
                wanted=f"every hook of a {kind} engine",
                next="see docs/write-a-plugin.md",
            )
        self._hooks = cast(hookspecs.EngineHooks, self._pm.hook)

    def _register(self, name: str, plugin: object) -> None:
        try:
            self._pm.register(plugin, name)
            self._pm.check_pending()
        except ValueError as error:
            # A name or an object that is registered already.
            raise EngineError(
                f"{name!r} of {self.name!r} is registered twice", found=str(error), wanted="one name for each wrapper"
            ) from error
        except pluggy.PluginValidationError as error:
            # pluggy leaves a plugin registered when check_pending fails, and does not when register fails.
            if self._pm.is_registered(plugin):
                self._pm.unregister(plugin)
            raise EngineError(f"{name!r} of {self.name!r} does not fit the hooks", found=str(error)) from error

    def provides(self, hook: str) -> bool:
        """True when the provider implements ``hook``."""
        impls = getattr(self._pm.hook, hook).get_hookimpls()
        return [i.plugin_name for i in impls if not (i.wrapper or i.hookwrapper)] == ["provider"]

    def _answer(self, hook: str, value: Any) -> Any:
        if value is None:
            if not self.provides(hook):
                raise EngineError(
                    f"the engine {self.name!r} has no {hook}", found=f"a {self.kind} engine without it", wanted=hook
                )
            raise EngineError(f"{hook} of {self.name!r} returned nothing", found="None", wanted="a result")
        return value

    # ---- both kinds -------------------------------------------------------------------------------------------
    def build(
        self,
        topology: Topology,
        settings: Mapping[str, Any],
        model: Mapping[str, Any],
        optimizer: Mapping[str, Any] | None = None,
        forward_only: bool = False,
    ) -> EngineInfo:
        """Build the mesh, then the model (see the hooks of the same names).

        Args:
            model: its key ``model_type`` says which head; without it, that of a language model.

        An engine that refuses, or fails, is shut down before the error goes on.
        """
        self.model_type = ModelType(model.get("model_type", ModelType.LANGUAGE_MODEL))
        require_switch(model, self.name, has=self.provides(SWITCH))
        model = {**model, "model_type": str(self.model_type)}
        try:
            with phase("init"):
                mesh = self._answer(
                    "rlctl_build_mesh", self._hooks.rlctl_build_mesh(topology=topology, settings=settings)
                )
                self.mesh = mesh
                self.info = self._answer(
                    "rlctl_engine_init",
                    self._hooks.rlctl_engine_init(
                        mesh=mesh, model=model, optimizer=optimizer, forward_only=forward_only
                    ),
                )
        except BaseException as error:
            # Nobody holds an engine that was not built: what it and its wrappers had taken goes back here.
            try:
                self.shutdown()
            except Exception as second:
                error.add_note(f"and shutting {self.name!r} down after it failed: {second!r}")
            raise
        return cast(EngineInfo, self.info)

    def release(self, *parts: str) -> bool:
        return bool(self._hooks.rlctl_release(parts=parts))

    def resume(self, *parts: str) -> bool:
        return bool(self._hooks.rlctl_resume(parts=parts))

    def shutdown(self) -> None:
        self._hooks.rlctl_shutdown()

    # ---- training ---------------------------------------------------------------------------------------------
    def set_mode(self, train: bool) -> None:
        """Train or eval behaviour; the calls below set it themselves."""
        self._hooks.rlctl_set_mode(train=train)

    def reduce(self, values: Sequence[float], op: str = "sum") -> list[float]:
        """Reduce numbers over data parallel ranks (identity on one)."""
        assert self.mesh is not None, "build the engine first"
        if self.mesh.dp_size == 1:
            return list(values)
        with phase("reduce"):
            return self._answer("rlctl_reduce", self._hooks.rlctl_reduce(values=list(values), op=op))

    def micro_batches(self, batch: PackedBatch, plan: MicroBatchPlan) -> tuple[list[PackedBatch], list[list[int]]]:
        """Split a local mini-batch, the count agreed over data parallel ranks before any collective of the model.

        Raises:
            BatchError: a row is over the token bound, or the first token of a row is in its loss mask (nothing predicts
                it); raised on every rank, so that none waits for another.
        """
        assert self.mesh is not None, "build the engine first"
        if plan.max_tokens is not None:
            plan = MicroBatchPlan(max_tokens=plan.max_tokens * self.mesh.token_multiplier)
        lengths = batch.lengths
        bound = plan.max_tokens
        longest = max(lengths, default=0)
        scored_first = rows_scored_from_the_start(batch)
        worst, any_scored_first = self.reduce([longest, len(scored_first)], "max")
        if any_scored_first:
            raise scored_first_error(scored_first)
        if bound is not None and worst > bound >= longest:
            raise BatchError(
                "another rank has a row longer than a micro-batch may be",
                found=f"{int(worst)} tokens",
                wanted=f"at most {bound} tokens a row",
                next="raise actor.max_tokens_per_device, or lower data.max_prompt_length / data.max_response_length",
            )
        count = int(self.reduce([min_count(lengths, plan)], "max")[0])
        prompts = batch.rows[GROUP].tolist() if GROUP in batch.rows else None
        groups = assign(lengths, plan, count, self.mesh.count_multiple, prompts)
        return [batch.select(g) if g else padding_like(batch) for g in groups], groups

    def forward_backward(
        self, micro_batches: Sequence[PackedBatch], loss_fn: LossFn, forward_only: bool
    ) -> list[MicroOutput]:
        name = "scoring" if forward_only else "forward and backward"
        with phase(name, micro_batches=len(micro_batches)):
            out = self._hooks.rlctl_forward_backward(
                micro_batches=micro_batches, loss_fn=loss_fn, forward_only=forward_only
            )
        return self._answer("rlctl_forward_backward", out)

    def optimizer_step(self) -> StepOutput:
        with phase("optimizer step"):
            return self._answer("rlctl_optimizer_step", self._hooks.rlctl_optimizer_step())

    def train_batch(
        self,
        batch: PackedBatch,
        loss_fn: LossFn,
        plan: MicroBatchPlan,
        agg_mode: LossAggMode | str = LossAggMode.TOKEN_MEAN,
        norm_length: int | None = None,
    ) -> TrainOutput:
        """One optimizer step on one local mini-batch.

        Adds item field ``item_weight`` (see :mod:`rlctl.normalizer`) unless the batch already carries it, splits into
        micro-batches, runs them all, steps once.
        """
        if "item_weight" not in batch.items:
            weights = item_weights(batch, agg_mode, reduce=self.reduce, norm_length=norm_length)
            batch = batch.with_items(item_weight=weights)
        micro_batches, _ = self.micro_batches(batch, plan)
        self._hooks.rlctl_set_mode(train=True)
        outputs = self.forward_backward(micro_batches, loss_fn, forward_only=False)
        loss, sums, maxes = self._collect(micro_batches, outputs)
        padding = sum(b.is_padding for b in micro_batches)
        return TrainOutput(loss, sums, maxes, self.optimizer_step(), len(micro_batches), padding)

    def _collect(
        self, micro_batches: Sequence[PackedBatch], outputs: Sequence[MicroOutput]
    ) -> tuple[float, dict[str, float], dict[str, float]]:
        if len(outputs) != len(micro_batches):
            raise EngineError(
                f"rlctl_forward_backward of {self.name!r} left micro-batches out",
                found=f"{len(outputs)} outputs",
                wanted=f"one for each of {len(micro_batches)} micro-batches, padding included",
            )
        sum_names = sorted({k for o in outputs for k in o.sums})
        max_names = sorted({k for o in outputs for k in o.maxes})
        self._agree_on_names([*sum_names, "", *max_names])
        local = [sum(o.loss for o in outputs), *(sum(o.sums.get(k, 0.0) for o in outputs) for k in sum_names)]
        total = self.reduce(local, "sum")
        # A padding micro-batch adds nothing to a sum, but its values must not win a maximum.
        real = [o for o, b in zip(outputs, micro_batches, strict=True) if not b.is_padding]
        top = [max((o.maxes.get(k, float("-inf")) for o in real), default=float("-inf")) for k in max_names]
        if max_names:
            top = self.reduce(top, "max")
        return total[0], dict(zip(sum_names, total[1:], strict=True)), dict(zip(max_names, top, strict=True))

    def _agree_on_names(self, names: Sequence[str]) -> None:
        # Numbers alone are reduced, so ranks with other names would add unlike things, or wait for ever for each other.
        digest = float(zlib.crc32("\n".join(names).encode()))
        low, high = self.reduce([-digest, digest], "max")
        if -low != high:
            raise EngineError(
                "the ranks report metrics of different names",
                found=", ".join(n for n in names if n) or "none",
                wanted="a loss that returns the same names for every micro-batch, padding included",
            )

    def infer_batch(
        self, batch: PackedBatch, plan: MicroBatchPlan, want: Sequence[str] = ("log_probs",), *, base: bool = False
    ) -> dict[str, torch.Tensor]:
        """Score known sequences without gradients.

        Args:
            base: by the model without its adapters, which is the one that training started from.
            want: of a language model among ``log_probs``, ``entropy``, ``sum_p2`` (the sum of the squared probabilities, where
                the engine's reader has it) and, where the engine's notes have it, ``experts``: what a mixture of experts chose
                at the position that predicts each scored token; ``topk_ids``, ``topk_log_probs`` and ``log_probs_at`` of
                several tokens a place (:mod:`rlctl.scoring`). Of a value model ``values`` (see
                :meth:`rlctl.logits.ValueReader.values`).

        Returns:
            ``{name: [N] float32 on the CPU}`` in the order of ``batch``, zero where ``loss_mask`` is False; ``experts`` is
            ``[N, layers, experts of a token]``, what is of several tokens ``[N, K]``, and ``topk_ids`` is int64.

        Raises:
            EngineError: what a model with this head has not, or ``experts`` of an engine that does not report them.
        """
        check_scores(want, self.model_type, self.name)
        micro_batches, groups = self.micro_batches(batch, plan)
        self._hooks.rlctl_set_mode(train=False)
        with without_adapters(self._hooks, self.name, has=self.provides(SWITCH)) if base else nullcontext():
            outputs = self.forward_backward(micro_batches, ScoreLoss(tuple(want)), forward_only=True)
        starts = batch.cu_seqlens.tolist()
        result = {
            name: torch.zeros(
                batch.num_items,
                *outputs[0].items[name].shape[1:],
                # float32 holds no id above 2^24.
                dtype=torch.long if name == "topk_ids" else torch.float32,
            )
            for name in want
        }
        for rows, out in zip(groups, outputs, strict=True):
            if not rows:
                continue
            index = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in rows])
            for name in want:
                result[name][index] = out.items[name].to(result[name].dtype).cpu()
        return result

    def eval_loss(
        self,
        batch: PackedBatch,
        loss_fn: LossFn,
        plan: MicroBatchPlan,
        agg_mode: LossAggMode | str = LossAggMode.TOKEN_MEAN,
        norm_length: int | None = None,
    ) -> tuple[float, dict[str, float]]:
        """The loss of one mini-batch without gradients: (loss, sums), over all data parallel ranks."""
        if "item_weight" not in batch.items:
            weights = item_weights(batch, agg_mode, reduce=self.reduce, norm_length=norm_length)
            batch = batch.with_items(item_weight=weights)
        micro_batches, _ = self.micro_batches(batch, plan)
        self._hooks.rlctl_set_mode(train=False)
        outputs = self.forward_backward(micro_batches, loss_fn, forward_only=True)
        loss, sums, _ = self._collect(micro_batches, outputs)
        return loss, sums

    def export_weights(self, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return self._answer("rlctl_export_weights", self._hooks.rlctl_export_weights(dtype=dtype))

    def export_adapters(self, path: Path) -> bool:
        """Write the adapters alone; False where the model has none."""
        if not self.provides("rlctl_export_adapters"):
            return False
        return bool(self._hooks.rlctl_export_adapters(path=path))

    def move(self, device: str, *parts: str) -> None:
        self._hooks.rlctl_move(device=device, parts=parts)

    def save_state(self, path: Path) -> None:
        with phase("saving"):
            self._answer("rlctl_save_state", self._hooks.rlctl_save_state(path=path))

    def load_state(self, path: Path) -> None:
        with phase("loading"):
            self._answer("rlctl_load_state", self._hooks.rlctl_load_state(path=path))

    def local_module(self) -> Any:
        return self._hooks.rlctl_local_module() if self.provides("rlctl_local_module") else None

    # ---- rollout ----------------------------------------------------------------------------------------------
    def generate(
        self, request: GenerateRequest, on_done: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        with phase("generation", prompts=len(request.prompts)):
            out = self._answer("rlctl_generate", self._hooks.rlctl_generate(request=request, on_done=on_done))
        wanted = len(request.prompts) * request.params.n
        if len(out) != wanted:
            raise EngineError(f"{self.name!r} returned another number of completions", found=len(out), wanted=wanted)
        return out

    def score(self, request: ScoreRequest) -> list[TokenScores]:
        with phase("scoring", sequences=len(request.sequences)):
            return self._answer("rlctl_score", self._hooks.rlctl_score(request=request))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        with phase("loading weights"):
            return self._answer("rlctl_load_weights", self._hooks.rlctl_load_weights(weights=weights, version=version))

    def attach_module(self, module: Any, version: int) -> bool:
        if not self.provides("rlctl_attach_module"):
            return False
        return bool(self._hooks.rlctl_attach_module(module=module, version=version))

    def weight_fingerprint(self, names: Sequence[str]) -> dict[str, str]:
        return self._answer("rlctl_weight_fingerprint", self._hooks.rlctl_weight_fingerprint(names=names))
