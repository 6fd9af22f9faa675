"""The ``veomni`` training engine: a Hugging Face model on VeOmni's modules, sharding, experts and optimizers.

Packed rows, slices of them and losses are computed by the parts that rlctl's engines share; what is VeOmni's own is the model
code, the layout of ranks, FSDP2 around layers and experts, the exchange of heads and of tokens, clipping and the optimizer.

VeOmni averages gradients: dense ones over all ranks, those of experts over the ranks that hold the same experts, divided by
the number of all ranks too. Core wants sums, so each loss is multiplied by that number before its backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule

from rlctl.batch import PackedBatch
from rlctl.engine import EngineInfo, MeshInfo, MicroOutput, StepOutput
from rlctl.errors import EngineError
from rlctl.hookspecs import hookimpl
from rlctl.logits import LossFn, LossOutput
from rlctl.parts import agreement, layout, offload, ranks
from rlctl.parts.attention import attention_set, tracing
from rlctl.parts.head import HeadSpec, probe_head
from rlctl.parts.job import ScoreJob
from rlctl.parts.outputs import on_device, to_micro_output
from rlctl.parts.routing import Routing
from rlctl.parts.values import ValueJob
from rlctl.records import ModelType
from rlctl.runtime.phases import beat
from rlctl.topology import Topology
from rlctl_veomni import attention, build, mesh, state
from rlctl_veomni.config import VeOmniConfig
from rlctl_veomni.exporting import export_weights
from rlctl_veomni.job import Inside
from rlctl_veomni.mesh import Place
from rlctl_veomni.optim import Stepper
from rlctl_veomni.phases import phase
from rlctl_veomni.weights import whole_shape


class VeOmniEngine:
    """Provider of the engine hooks. Built by :class:`rlctl.engine.Engine`; takes no arguments."""

    def __init__(self) -> None:
        self._config = VeOmniConfig()
        self._place = Place(Topology(), torch.device("cpu"))
        self._built: build.Built | None = None
        self._stepper: Stepper | None = None
        self._compute = torch.float32
        self._head: HeadSpec | None = None
        self._head_note = ""
        self._routing: Routing | None = None
        self._vocab_size = 0
        self._train = False
        self._undo_mean = 1
        """What a loss is multiplied by, because VeOmni divides its gradients by it."""
        self._host = offload.Whereabouts()
        self._left = True

    # ---- building ---------------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_build_mesh(self, topology: Topology, settings: Mapping[str, Any]) -> MeshInfo:
        """See :class:`rlctl.hookspecs.EngineSpecs`. The axes are those of :data:`rlctl_veomni.mesh.AXES`."""
        self._config = VeOmniConfig(**{k: v for k, v in settings.items() if k != "device"})
        info, self._place = mesh.settle(topology, settings, self._config.collective_timeout_s)
        self._left = False
        self._undo_mean = topology.world_size
        return info

    @hookimpl
    def rlctl_engine_init(
        self, mesh: MeshInfo, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None, forward_only: bool
    ) -> EngineInfo:
        """See :class:`rlctl.hookspecs.EngineSpecs`. ``model`` may carry ``seed`` and ``model_type``, the head."""
        place, config = self._place, self._config
        _check_model(place.topology, model)
        self._compute = build.compute_dtype(config, model, place.device)
        with phase("init"), place.here():
            self._built = built = build.build(model, config, place, self._compute, train=not forward_only)
            build.check_tied(built)
            self._vocab_size = int(built.model.get_input_embeddings().weight.shape[0])
            routing = Routing(built.model)
            self._inspect(built)
            self._routing = routing if routing.note is not None else None
            if not forward_only:
                self._stepper = Stepper(built.model, optimizer or {}, place.device)
        self._host = offload.Whereabouts(place.device, config.param_offload, config.optimizer_offload)
        self._host.rest(built.model, self._stepper)
        ep = place.topology.ep
        return EngineInfo(
            num_parameters=sum(math.prod(whole_shape(n, p, ep)) for n, p in built.model.named_parameters()),
            vocab_size=self._vocab_size,
            model_family=str(built.model.config.model_type),
            notes={**self._notes(built), **built.notes},
        )

    def _inspect(self, built: build.Built) -> None:
        """Try the head and the attention on whole weights; one forward pass of a few tokens, on all ranks."""
        place, config = self._place, built.model.config
        attention.check_name(config, place.topology.usp)

        def head_job(model: Inside) -> None:
            self._head, self._head_note = probe_head(cast(Any, model), place.device)

        def attention_job(model: Inside) -> None:
            laid = layout.lay_out(_probe_rows(self._vocab_size), place.device, packed=True, ulysses=place.ulysses)
            with tracing() as trace:
                model.base_model(**laid.inputs)
            attention.check_calls(trace.calls, attention.num_attention_layers(config), str(config.model_type))

        with torch.no_grad(), built.kernels.bound():
            if built.head is ModelType.LANGUAGE_MODEL:
                with attention_set(built.model, "sdpa"):
                    built.model(job=head_job)
            built.model(job=attention_job)
        built.reshard()

    def _notes(self, built: build.Built) -> dict[str, str]:
        t = self._place.topology
        notes = {
            "attention": "packed rows, between VeOmni's exchanges of heads where usp > 1",
            "logits": self._head_note or "none: a value head",
            "compute_dtype": str(self._compute).removeprefix("torch."),
            "gradients": f"averaged by VeOmni over {t.world_size} ranks; each loss is multiplied by {t.world_size} before that",
            "wrap": f"VeOmni's FSDP2 over {t.world_size // t.dp_replicate} ranks"
            + (f", {t.dp_replicate} replicas" if t.dp_replicate > 1 else ""),
        }
        if built.experts is not None:
            spread = f", spread over {t.ep} ranks, each sharded over {self._place.expert_shards}" if t.ep > 1 else ""
            notes["experts"] = f"{built.experts}{spread}"
        if self._routing is not None and self._routing.note is not None:
            notes["routing"] = self._routing.note
        if t.usp > 1:
            notes["sequence"] = f"each packed sequence is split between {t.usp} ranks (usp)"
        if self._config.activation_checkpointing:
            notes["checkpointing"] = "every layer"
        return notes

    # ---- running ----------------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_set_mode(self, train: bool) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        self._train = train
        return True

    @hookimpl
    def rlctl_forward_backward(
        self, micro_batches: Sequence[PackedBatch], loss_fn: LossFn, forward_only: bool
    ) -> list[MicroOutput]:
        """See :class:`rlctl.hookspecs.EngineSpecs`. Gradients are reduced once, in the last micro-batch's backward pass."""
        built = self._ready()
        if not forward_only and self._stepper is None:
            raise EngineError(
                "this engine was built to score only", found="forward_only=True at its start", wanted="an optimizer"
            )
        place = self._place
        attention.check_name(built.model.config, place.topology.usp)
        agreement.check_micro_batches(
            micro_batches,
            lambda batch: layout.check(batch, self._vocab_size),
            device=place.device,
            world_size=place.topology.world_size,
            sharers=[] if place.ulysses is None else [place.ulysses.group],
        )
        with phase("scoring" if forward_only else "forward"):
            self._host.model_in(built.model)
        built.model.train(self._train and not forward_only)
        results: list[tuple[LossOutput, int | None]] = []
        with self._running(built), torch.set_grad_enabled(not forward_only):
            for i, batch in enumerate(micro_batches):
                if not forward_only:
                    self._set_last(built, i == len(micro_batches) - 1)
                beat(
                    micro_batch=i + 1,
                    micro_batches=len(micro_batches),
                    micro_rows=batch.num_rows,
                    micro_tokens=batch.num_items,
                )
                results.append(self._run(built, batch, loss_fn, forward_only))
        if forward_only:
            built.reshard()
            self._host.rest(built.model, None)
        return [to_micro_output(out, filling) for out, filling in results]

    @contextmanager
    def _running(self, built: build.Built) -> Iterator[None]:
        """Inside, VeOmni's globals are this engine's; what a failure left behind is dropped."""
        with ExitStack() as stack:
            stack.enter_context(self._place.here())
            stack.enter_context(built.kernels.bound())
            try:
                yield
            except BaseException:
                # Part of a call's gradients must not be added to the next one's.
                built.reshard()
                if self._stepper is not None and torch.is_grad_enabled():
                    built.drop_unreduced()
                    self._stepper.drop_gradients()
                raise

    def _run(
        self, built: build.Built, batch: PackedBatch, loss_fn: LossFn, forward_only: bool
    ) -> tuple[LossOutput, int | None]:
        place = self._place
        laid = layout.lay_out(batch, place.device, packed=True, share=self._config.share_prompts, ulysses=place.ulysses)
        here = on_device(batch, place.device)
        job: ScoreJob | ValueJob
        if built.head is ModelType.VALUE_MODEL:
            job = ValueJob(here, laid, loss_fn)
        else:
            keep = self._config.logits_budget_mib << 20
            job = ScoreJob(here, laid, loss_fn, self._head, self._compute, keep, self._routing)
        detail = f"{batch.num_rows} rows, {batch.num_items} tokens"
        with phase("scoring" if forward_only else "forward", detail):
            loss = built.model(job=job)
        if not forward_only:
            with phase("backward", detail):
                (loss * self._undo_mean).backward()
        assert job.output is not None, "the job ran"
        return replace(job.output), None if laid.part is None else laid.part.filling

    def _set_last(self, built: build.Built, last: bool) -> None:
        root = cast(FSDPModule, built.model)
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput:
        """See :class:`rlctl.hookspecs.EngineSpecs`. Nothing is pending here: every forward_backward call reduces."""
        built, stepper = self._ready(), self._trained()
        with phase("optimizer step"), self._place.here():
            self._host.model_in(built.model)
            self._host.optimizer_in(stepper)
            out = stepper.step()
        self._host.rest(built.model, stepper)
        return out

    # ---- state ------------------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_export_weights(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        """See :class:`rlctl.hookspecs.EngineSpecs`. Collective: every rank iterates to the end."""
        built = self._ready()
        built.reshard()
        with phase("export"):
            self._host.model_in(built.model)
        iterator = export_weights(built.model, self._place, None if dtype is None else build.DTYPES[dtype])
        while True:
            # Around each step of the iterator, not around the yield: the consumer's failures are its own.
            with phase("export"):
                item = next(iterator, None)
            if item is None:
                break
            yield item
        self._host.rest(built.model, None)

    @hookimpl
    def rlctl_move(self, device: str, parts: Sequence[str]) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`. What was moved away comes back by itself when it is used."""
        built = self._ready()
        built.reshard()
        self._host.move(device, parts, built.model, self._stepper)
        return True

    @hookimpl
    def rlctl_save_state(self, path: Path) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        built, stepper = self._ready(), self._trained()
        built.reshard()
        self._host.model_in(built.model)
        self._host.optimizer_in(stepper)
        state.save_state(path, built.model, stepper, self._place)
        self._host.rest(built.model, stepper)
        return True

    @hookimpl
    def rlctl_load_state(self, path: Path) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        built, stepper = self._ready(), self._trained()
        built.reshard()
        self._host.model_in(built.model)
        self._host.optimizer_in(stepper)
        state.load_state(path, built.model, stepper, self._place)
        self._host.rest(built.model, stepper)
        return True

    @hookimpl
    def rlctl_reduce(self, values: Sequence[float], op: str) -> list[float]:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        if self._place.data is None:
            return list(values)
        return ranks.reduce_values(list(values), op, self._place.device, self._place.data)

    @hookimpl
    def rlctl_shutdown(self) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        self._built = self._stepper = self._routing = None
        if not self._left:
            self._left = True
            mesh.leave()
        return True

    def _ready(self) -> build.Built:
        assert self._built is not None, "build the engine first"
        return self._built

    def _trained(self) -> Stepper:
        if self._stepper is None:
            raise EngineError(
                "this engine has no optimizer", found="forward_only=True at its start", wanted="an optimizer"
            )
        return self._stepper


def _check_model(topology: Topology, model: Mapping[str, Any]) -> None:
    # A function of its own: the hook's argument is called mesh.
    mesh.check_model(topology, model)


def _probe_rows(vocab_size: int) -> PackedBatch:
    """Two short rows, scored to their ends."""
    from rlctl.batch import pack

    rows = [torch.arange(n) % vocab_size for n in (5, 3)]
    return pack({"input_ids": rows, "loss_mask": [torch.arange(len(r)) > 0 for r in rows]})
