"""The ``fsdp2`` training engine: one Hugging Face causal LM, or a value model on its layers, on one rank or many.

One rank runs the plain module (under autocast where the computation has a lower precision than the weights); more ranks
run ``fully_shard`` of each layer, over one dimension or with replicas over two. Both compute packed rows through
:mod:`rlctl.parts.attention` and losses through :mod:`rlctl.parts.reader`; with usp each rank computes a slice of them
(:mod:`rlctl.parts.ulysses`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rlctl.batch import PackedBatch
from rlctl.engine import EngineInfo, MeshInfo, MicroOutput, StepOutput
from rlctl.errors import EngineError
from rlctl.hookspecs import hookimpl
from rlctl.logits import LossFn
from rlctl.parts import agreement, attention, fsdp, layout, offload, ranks
from rlctl.parts.job import Root, ScoreJob
from rlctl.parts.outputs import ALIGNMENT, Collected, merge, on_device, to_micro_output
from rlctl.parts.routing import Routing
from rlctl.parts.values import ValueJob
from rlctl.runtime.phases import beat
from rlctl.topology import Topology
from rlctl_fsdp import build, place, rooted, state
from rlctl_fsdp.config import FSDPConfig
from rlctl_fsdp.export import export_weights
from rlctl_fsdp.inspection import Inspection, Surroundings, inspect_model
from rlctl_fsdp.lora.adapters import Adapters
from rlctl_fsdp.lora.merge import is_adapter
from rlctl_fsdp.optim import Stepper
from rlctl_fsdp.phases import phase


class FSDPEngine:
    """Provider of the engine hooks. Built by :class:`rlctl.engine.Engine`; takes no arguments."""

    def __init__(self) -> None:
        self._config = FSDPConfig()
        self._topology = Topology()
        self._mesh = MeshInfo()
        self._place = place.Place(torch.device("cpu"), None, False)
        self._root: Root | None = None
        self._stepper: Stepper | None = None
        self._compute = torch.float32
        self._seen = Inspection()
        self._routing: Routing | None = None
        self._adapters: Adapters | None = None
        self._train = False
        self._value = False
        self._host = offload.Whereabouts()

    # ---- building ---------------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_build_mesh(self, topology: Topology, settings: Mapping[str, Any]) -> MeshInfo:
        """See :class:`rlctl.hookspecs.EngineSpecs`. The axes are dp_replicate, dp_shard and usp."""
        self._topology = topology
        self._config = FSDPConfig(**{k: v for k, v in settings.items() if k != "device"})
        self._mesh, self._place = place.settle(topology, settings)
        return self._mesh

    @hookimpl
    def rlctl_engine_init(
        self, mesh: MeshInfo, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None, forward_only: bool
    ) -> EngineInfo:
        """See :class:`rlctl.hookspecs.EngineSpecs`. ``model`` may carry ``seed`` for random weights (default 0),
        ``model_type``, the head, and ``lora``, adapters that are trained in the place of all weights."""
        attention.register()
        self._value = build.is_value_model(model)
        place.check_heads(self._topology, model)
        device, config = self._place.device, self._config
        master = build.master_dtype(model)
        self._compute = build.compute_dtype(config.param_dtype, master, device)
        with phase("init"):
            lora = None if forward_only else model.get("lora")
            self._root = rooted.build_root(model, lora, self._place, self._config, self._compute)
            hf = self._root.model
            if lora:
                self._adapters = Adapters(hf, lora, model.get("path"), value=self._value)
                self._adapters.seed_dropout(int(model.get("seed") or 0), mesh.rank)
            else:
                hf.requires_grad_(not forward_only)
            hf.eval()
            if config.activation_checkpointing and not forward_only:
                build.checkpoint_layers(hf)
            routing = Routing(hf)
            self._seen = self._inspect()
            self._routing = routing if routing.note is not None else None
            if not forward_only:
                trained = {n: p for n, p in hf.named_parameters() if p.requires_grad}
                self._stepper = Stepper(trained, optimizer or {})
        self._host = offload.Whereabouts(device, config.param_offload, config.optimizer_offload)
        self._host.rest(self._root, self._stepper)
        self._check_adapters()
        return EngineInfo(
            num_parameters=sum(p.numel() for n, p in hf.named_parameters() if not (self._adapters and is_adapter(n))),
            vocab_size=self._seen.vocab_size,
            model_family=str(hf.config.model_type),
            notes=self._notes(),
        )

    def _inspect(self) -> Inspection:
        """Try the head and the packed path on whole weights."""
        root, result, place_ = self._built(), Inspection(), self._place
        sharded = place_.mesh is not None
        where = Surroundings(place_.device, self._compute, sharded, place_.ulysses, self._agree, self._value)

        def job(model: PreTrainedModel) -> None:
            nonlocal result
            result = inspect_model(model, self._config, where)

        with torch.no_grad():
            root(job)
        self._reshard()
        return result

    def _agree(self, mine: bool) -> bool:
        """Whether every rank says yes."""
        if self._place.mesh is None:
            return mine
        return bool(ranks.reduce_values([float(mine)], "min", self._place.device)[0])

    def _notes(self) -> dict[str, str]:
        notes = {
            "attention": self._seen.attention_note,
            "shared_prompts": self._seen.share_note,
            "logits": self._seen.head_note,
            "compute_dtype": str(self._compute).removeprefix("torch."),
            "wrap": self._wrap_note(),
        }
        if self._adapters is not None:
            notes["lora"] = self._adapters.note()
        if self._routing is not None and self._routing.note is not None:
            notes["experts"] = self._routing.note
        if self._place.ulysses is not None:
            notes["sequence"] = f"each packed sequence is split between {self._place.ulysses.size} ranks (usp)"
        if self._seen.longest_row is not None:
            notes["longest_row"] = f"{self._seen.longest_row} tokens: beyond it all rows' position encoding changes"
        if self._config.activation_checkpointing:
            notes["checkpointing"] = "every layer"
        return notes

    def _wrap_note(self) -> str:
        if self._place.mesh is None:
            return "plain module"
        replicas = self._topology.dp_replicate
        shards = f"fully_shard over {self._mesh.world_size // replicas} ranks"
        return shards if replicas == 1 else f"{shards}, {replicas} replicas"

    # ---- adapters ---------------------------------------------------------------------------------------------
    def _check_adapters(self) -> None:
        """Refuse adapters that change nothing. Collective."""
        if self._adapters is not None:
            largest = partial(ranks.reduce_values, op="max", device=self._place.device) if self._place.mesh else list
            clear = self._trained().optimizer.zero_grad
            self._adapters.check_effect(self.rlctl_forward_backward, self._seen.vocab_size, largest, clear)
            self._host.rest(self._built(), self._stepper)

    @hookimpl
    def rlctl_set_adapters(self, enabled: bool) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        if self._adapters is None:
            return False
        self._adapters.switch(enabled)
        return True

    @hookimpl
    def rlctl_export_adapters(self, path: Path) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        if self._adapters is None or self._value:
            return False  # a value head is trained in full, and is no adapter
        self._reshard()
        with phase("export"):
            self._host.model_in(self._built())
            self._adapters.write(path, writer=self._mesh.rank == 0)
        self._host.rest(self._built(), None)
        return True

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
        """See :class:`rlctl.hookspecs.EngineSpecs`.

        Gradients are reduced once, in the last micro-batch's backward pass, and add up over calls. A model that cannot be
        packed gets each micro-batch as several, one for each row length; their losses and sums add up.
        """
        root = self._built()
        if not forward_only and self._stepper is None:
            raise EngineError(
                "this engine was built to score only", found="forward_only=True at its start", wanted="an optimizer"
            )
        ulysses = self._place.ulysses
        agreement.check_micro_batches(
            micro_batches,
            lambda batch: layout.check(batch, self._seen.vocab_size, self._seen.longest_row),
            device=self._place.device,
            world_size=self._mesh.world_size,
            sharers=() if ulysses is None else (ulysses.group,),
            # Rows that are not packed run in as many pieces as the rank with most of them has.
            same_count=self._seen.packed,
        )
        pieces = self._pieces(micro_batches)
        with phase("scoring" if forward_only else "forward"):
            self._host.model_in(root)
        # Generation may have switched the shared module to eval in between.
        root.model.train(self._train and not forward_only)
        collected: list[list[Collected]] = [[] for _ in micro_batches]
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(not forward_only))
            if self._seen.packed:
                stack.enter_context(attention.attention_set(root.model, attention.NAME))
            try:
                for i, (owner, rows, batch) in enumerate(pieces):
                    if not forward_only:
                        self._set_last(i == len(pieces) - 1)
                    sizes = {"micro_rows": batch.num_rows, "micro_tokens": batch.num_items}
                    beat(micro_batch=i + 1, micro_batches=len(pieces), **sizes)
                    found = self._run(root, batch, loss_fn, forward_only)
                    if owner is not None:
                        collected[owner].append((rows, batch, found))
            except BaseException:
                self._forget(forward_only)
                raise
        if forward_only:
            self._reshard()
            self._host.rest(root, None)
        return [to_micro_output(merge(b, parts)) for b, parts in zip(micro_batches, collected, strict=True)]

    def _forget(self, forward_only: bool) -> None:
        """After a call that failed: part of its gradients must not be added to the next one's."""
        self._reshard()
        if self._stepper is not None and not forward_only:
            fsdp.drop_unreduced(self._built())
            self._stepper.optimizer.zero_grad(set_to_none=True)

    def _run(self, root: Root, batch: PackedBatch, loss_fn: LossFn, forward_only: bool) -> Any:
        device = self._place.device
        laid = layout.lay_out(
            batch, device, packed=self._seen.packed, share=self._seen.share, ulysses=self._place.ulysses
        )
        here, keep = on_device(batch, device), self._config.logits_budget_mib << 20
        job: ScoreJob | ValueJob
        if self._value:
            job = ValueJob(here, laid, loss_fn)
        else:
            job = ScoreJob(here, laid, loss_fn, self._seen.head, self._compute, keep, self._routing)
        detail = f"{batch.num_rows} rows, {batch.num_items} tokens"
        with phase("scoring" if forward_only else "forward", detail), self._autocast():
            loss = root(job)
        if not forward_only:
            with phase("backward", detail):
                loss.backward()
        assert job.output is not None, "the job ran"
        if laid.part is None:
            return job.output
        return replace(job.output, sums={**job.output.sums, ALIGNMENT: float(laid.part.filling)})

    def _pieces(self, micro_batches: Sequence[PackedBatch]) -> list[tuple[int | None, list[int] | None, PackedBatch]]:
        """(index of the micro-batch or None for filling, its rows or None for all, the batch to run)."""
        if self._seen.packed:
            return [(i, None, batch) for i, batch in enumerate(micro_batches)]
        pieces: list[tuple[int | None, list[int] | None, PackedBatch]] = [
            (i, rows, part) for i, batch in enumerate(micro_batches) for part, rows in layout.by_length(batch)
        ]
        if self._mesh.dp_size > 1:
            # Ranks hold rows of different lengths, and each piece is one round of collectives.
            count = int(ranks.reduce_values([float(len(pieces))], "max", self._place.device)[0])
            filling = layout.zero_weight_like(micro_batches[0])
            pieces = [(None, None, filling)] * (count - len(pieces)) + pieces
        return pieces

    def _autocast(self) -> AbstractContextManager[Any]:
        plain = self._place.mesh is None
        if plain and self._compute != next(self._built().parameters()).dtype:
            return torch.autocast(self._place.device.type, self._compute)
        return nullcontext()

    def _set_last(self, last: bool) -> None:
        if self._place.mesh is not None:
            wrapped = cast(FSDPModule, self._root)
            wrapped.set_requires_gradient_sync(last)
            wrapped.set_is_last_backward(last)

    def _reshard(self) -> None:
        """After a forward without backward the root's weights are still whole; parameters must be shards again."""
        if self._place.mesh is not None:
            fsdp.reshard(self._built())

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput:
        """See :class:`rlctl.hookspecs.EngineSpecs`. Nothing is pending here: every forward_backward call reduces."""
        root, stepper = self._built(), self._trained()
        with phase("optimizer step"):
            self._host.model_in(root)
            self._host.optimizer_in(stepper)
            out = stepper.step()
        self._host.rest(root, stepper)
        return out

    # ---- state ------------------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_export_weights(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        """See :class:`rlctl.hookspecs.EngineSpecs`. Collective: every rank iterates to the end."""
        root = self._built()
        self._reshard()
        with phase("export"):
            self._host.model_in(root)
        iterator = export_weights(root.model, dtype)
        while True:
            # Around each step of the iterator, not around the yield: the consumer's failures are its own.
            with phase("export"):
                item = next(iterator, None)
            if item is None:
                break
            yield item
        self._host.rest(root, None)

    @hookimpl
    def rlctl_move(self, device: str, parts: Sequence[str]) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`. What was moved away comes back by itself when it is used."""
        root = self._built()
        self._reshard()
        self._host.move(device, parts, root, self._stepper)
        return True

    @hookimpl
    def rlctl_save_state(self, path: Path) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        self._reshard()
        mesh = self._mesh
        base = None if self._adapters is None else self._adapters.base
        state.save_state(path, self._built(), self._trained(), mesh.rank, mesh.world_size, self._place.device, base)
        return True

    @hookimpl
    def rlctl_load_state(self, path: Path) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        self._reshard()
        root, stepper, mesh = self._built(), self._trained(), self._mesh
        self._host.model_in(root)
        base = None if self._adapters is None else self._adapters.base
        state.load_state(path, root, stepper, mesh.rank, mesh.world_size, self._place.device, base)
        self._host.rest(root, stepper)
        self._check_adapters()
        return True

    @hookimpl
    def rlctl_reduce(self, values: Sequence[float], op: str) -> list[float]:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        if self._mesh.dp_size == 1:
            return list(values)
        return ranks.reduce_values(list(values), op, self._place.device, self._place.data)

    @hookimpl
    def rlctl_local_module(self) -> Any:
        """The Hugging Face model itself on one unsharded rank, else None. Its own attention is set outside our calls."""
        if self._place.mesh is not None:
            return None
        root = self._built()
        self._host.model_in(root)
        return root.model

    @hookimpl
    def rlctl_shutdown(self) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        self._root = self._stepper = None
        # Once: another engine of the process may have made a group of its own since.
        left, self._place = self._place, place.Place(torch.device("cpu"), None, False)
        place.leave(left)
        return True

    def _built(self) -> Root:
        assert self._root is not None, "build the engine first"
        return self._root

    def _trained(self) -> Stepper:
        if self._stepper is None:
            raise EngineError(
                "this engine has no optimizer", found="forward_only=True at its start", wanted="an optimizer"
            )
        return self._stepper
