"""The ``megatron`` training engine: a Hugging Face model on megatron-core's modules, schedules and optimizer."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from rlctl.batch import PackedBatch
from rlctl.engine import EngineInfo, MeshInfo, MicroOutput, StepOutput
from rlctl.errors import EngineError
from rlctl.hf_config import load_config, starts_random
from rlctl.hookspecs import hookimpl
from rlctl.logits import LossFn
from rlctl.records import ModelType
from rlctl.topology import Topology
from rlctl_megatron import agreement, build, mesh, schedule, state
from rlctl_megatron.architecture import Architecture, read_architecture
from rlctl_megatron.config import MegatronConfig
from rlctl_megatron.exporting import export_weights
from rlctl_megatron.families import Family, family_of
from rlctl_megatron.loading import load_weights
from rlctl_megatron.mapping import check_split
from rlctl_megatron.masters import MainWeights
from rlctl_megatron.mesh import Place
from rlctl_megatron.offload import Whereabouts
from rlctl_megatron.optim import Stepper
from rlctl_megatron.source import DrawnSource, FileSource, Source
from rlctl_megatron.standins import building, name_router_gemm

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class MegatronEngine:
    """Provider of the engine hooks. Built by :class:`rlctl.engine.Engine`; takes no arguments.

    A plugin for another device inherits it and says which; see :attr:`devices`, :attr:`config_model`, :meth:`_kernel_device`.
    """

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    """Device types that it runs on."""
    config_model: ClassVar[type[MegatronConfig]] = MegatronConfig
    """Its ``engine`` section."""

    def __init__(self) -> None:
        self._config = self.config_model()
        self._topology = Topology()
        self._place = Place(Topology(), torch.device("cpu"))
        self._architecture: Architecture | None = None
        self._family: Family | None = None
        self._built: build.Built | None = None
        self._stepper: Stepper | None = None
        self._head = schedule.Head(0, 0)
        self._train = False
        self._mains = MainWeights(None)
        self._host = Whereabouts()
        self._left = True

    # ---- building ---------------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_build_mesh(self, topology: Topology, settings: Mapping[str, Any]) -> MeshInfo:
        """See :class:`rlctl.hookspecs.EngineSpecs`. The axes are those of :data:`rlctl_megatron.mesh.AXES`."""
        self._config = self.config_model(**{k: v for k, v in settings.items() if k != "device"})
        self._topology = topology
        info, self._place = mesh.settle(topology, settings, self._config.collective_timeout_s, self.devices)
        self._left = False
        return info

    @hookimpl
    def rlctl_engine_init(
        self, mesh: MeshInfo, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None, forward_only: bool
    ) -> EngineInfo:
        """See :class:`rlctl.hookspecs.EngineSpecs`. ``model`` may carry ``seed`` and ``model_type``, the head."""
        place, config = self._place, self._config
        distributed = self._distributed_optimizer(optimizer or {})
        built, family, architecture, engine = agreement.together(
            place, "build its part of the model", lambda: self._construct(model, forward_only, distributed)
        )
        if not forward_only:
            # megatron-core compares its parameter groups over all ranks, so none comes here alone.
            make = functools.partial(Stepper, built, optimizer or {}, place.device, distributed=distributed)
            self._stepper = agreement.together(place, "build its optimizer", make)
        self._mains = MainWeights(self._stepper)
        source = _source(model, load_config(model), place)
        # Once the optimizer is there, so that its main weights get the numbers before they are rounded.
        load_weights(built.chunks, family, place, source, self._mains.store)
        self._head = schedule.Head(architecture.vocab_size, config.logits_budget_mib << 20)
        self._host = Whereabouts(place.device, config.param_offload, config.optimizer_offload)
        self._host.rest(built, self._stepper)
        return EngineInfo(
            num_parameters=sum(math.prod(shape) for shape in family.checkpoint().values()),
            vocab_size=architecture.vocab_size,
            model_family=architecture.model_type,
            notes={**self._notes(built.config, distributed, engine), **source.notes},
        )

    def _construct(
        self, model: Mapping[str, Any], forward_only: bool, distributed: bool
    ) -> tuple[build.Built, Family, Architecture, bool]:
        """This rank's modules, with whatever memory holds as values; True where they are Transformer Engine's. No collective
        runs here."""
        place, config = self._place, self._config
        hf = load_config(model)
        architecture = read_architecture(hf)
        head = ModelType(model.get("model_type") or ModelType.LANGUAGE_MODEL)
        dtype = build.compute_dtype(config, model, self._kernel_device())
        engine = build.uses_transformer_engine(config, place.device, dtype)
        settings = build.transformer_config(architecture, place, config, dtype)
        family = family_of(hf.to_dict(), head)
        check_split(family, self._topology)
        if architecture.num_experts:
            name_router_gemm()
        with building(place.device.type):
            chunks = build.build_chunks(architecture, family, place, settings, engine=engine)
        built = build.wrap(chunks, settings, train=not forward_only, distributed_optimizer=distributed)
        for chunk in chunks:
            chunk.module.requires_grad_(not forward_only)
        self._architecture, self._family, self._built = architecture, family, built
        return built, family, architecture, engine

    def _kernel_device(self) -> torch.device:
        """Whose kernels compute: it decides the dtype that ``auto`` stands for."""
        return self._place.device

    def _distributed_optimizer(self, optimizer: Mapping[str, Any]) -> bool:
        choice = self._config.distributed_optimizer
        useful = self._topology.dp_size > 1 and optimizer.get("name", "adamw") == "adamw"
        return choice == "always" or (choice == "auto" and useful)

    def _notes(self, settings: Any, distributed: bool, engine: bool) -> dict[str, str]:
        t = self._topology
        notes = {
            "layers": "Transformer Engine's modules" if engine else "megatron-core's local modules",
            "gradients": "summed over data and context parallel ranks, once a step; nothing is divided (the loss is weighted)",
            "compute_dtype": str(settings.params_dtype).removeprefix("torch."),
            "optimizer": "moments sharded over data and context parallel ranks"
            if distributed
            else "moments whole on every rank",
            "schedule": "interleaved 1F1B" if t.vpp > 1 else "1F1B" if t.pp > 1 else "one stage",
        }
        if t.sp and t.tp == 1:
            notes["sp"] = "off: it splits activations over the ranks of tp, which is 1"
        elif t.sp:
            notes["sp"] = f"on, over {t.tp} ranks"
        if settings.num_moe_experts:
            notes["experts_dispatch"] = self._config.moe_token_dispatcher
        if self._config.recompute == "full":
            notes["recompute"] = "every layer"
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
        """See :class:`rlctl.hookspecs.EngineSpecs`. Gradients wait in this rank's buffers until the step reduces them."""
        built = self._ready()
        if not forward_only and self._stepper is None:
            raise EngineError(
                "this engine was built to score only", found="forward_only=True at its start", wanted="an optimizer"
            )
        agreement.check_micro_batches(micro_batches, self._head.vocab_size, self._place)
        self._host.model_in(built)
        for module in built.wrapped:
            module.train(self._train and not forward_only)
        try:
            outputs = schedule.run(built, self._place, self._head, micro_batches, loss_fn, forward_only=forward_only)
        except BaseException:
            # What a part of the micro-batches left must not be added to the next call's.
            if self._stepper is not None and not forward_only:
                self._stepper.drop_gradients()
            raise
        if forward_only:
            self._host.rest(built, self._stepper)
        else:
            self._trained().pending = True
        return outputs

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        built, stepper = self._ready(), self._trained()
        self._host.model_in(built)
        self._host.optimizer_in(stepper)
        out = stepper.step()
        self._host.rest(built, stepper)
        return out

    # ---- state ------------------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_export_weights(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        """See :class:`rlctl.hookspecs.EngineSpecs`. Collective: every rank iterates to the end."""
        built = self._ready()
        assert self._family is not None
        self._host.model_in(built)
        wanted = torch.float32 if dtype is None else DTYPES[dtype]
        if self._stepper is not None:
            self._host.optimizer_in(self._stepper)  # main weights are the optimizer's
        try:
            # What is rounded anyway need not be gathered from the optimizer first.
            value_of = self._mains.whole if wanted is torch.float32 else None
            away = self._config.param_offload or self._config.optimizer_offload
            for name, tensor in export_weights(built.chunks, self._family, self._place, wanted, value_of):
                # Storages that go back to the host at the end are not handed out.
                yield name, tensor.clone() if away else tensor
        finally:
            self._host.rest(built, self._stepper)

    @hookimpl
    def rlctl_move(self, device: str, parts: Sequence[str]) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`. What was moved away comes back by itself when it is used."""
        self._host.move(device, parts, self._ready(), self._stepper)
        return True

    @hookimpl
    def rlctl_save_state(self, path: Path) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        built, stepper = self._ready(), self._trained()
        self._host.model_in(built)
        self._host.optimizer_in(stepper)
        assert self._family is not None
        state.save_state(path, built, stepper, self._place, self._family)
        self._host.rest(built, stepper)
        return True

    @hookimpl
    def rlctl_load_state(self, path: Path) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        built, stepper = self._ready(), self._trained()
        self._host.model_in(built)
        self._host.optimizer_in(stepper)
        assert self._family is not None
        state.load_state(path, built, stepper, self._place, self._family)
        self._host.rest(built, stepper)
        return True

    @hookimpl
    def rlctl_reduce(self, values: Sequence[float], op: str) -> list[float]:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        if self._place.data_group is None:
            return list(values)
        ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self._place.device)
        dist.all_reduce(tensor, op=ops[op], group=self._place.data_group)
        return tensor.tolist()

    @hookimpl
    def rlctl_shutdown(self) -> bool:
        """See :class:`rlctl.hookspecs.EngineSpecs`."""
        if self._built is not None:
            build.let_go(self._built)
        self._built = self._stepper = None
        self._mains = MainWeights(None)
        if not self._left:
            self._left = True
            mesh.leave(self._place)
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


def _source(model: Mapping[str, Any], config: PreTrainedConfig, place: Place) -> Source:
    seed = int(model.get("seed") or 0)
    if starts_random(model):
        return DrawnSource(config, torch.float32, seed, place, bool(model.get("trust_remote_code")))
    return FileSource(str(model["path"]), model.get("revision"), seed)
