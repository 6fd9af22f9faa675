"""One rank: the engines that live here, by role, and what the controller may ask of them."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rlctl import device as devices
from rlctl import extensions, registry
from rlctl.batch import PackedBatch
from rlctl.config.schema import ModelConfig
from rlctl.device import Device
from rlctl.engine import Engine, MeshInfo, TrainOutput
from rlctl.generation import Completion, GenerateRequest, ScoreRequest, TokenScores
from rlctl.logits import LossFn
from rlctl.microbatch import MicroBatchPlan
from rlctl.normalizer_modes import LossAggMode
from rlctl.plugins import PluginSet
from rlctl.records import BackendKind, ModelType
from rlctl.runtime import collectives
from rlctl.runtime.dispatch import Dispatch, dispatch, dispatch_of
from rlctl.runtime.links import LinkPlan, Links
from rlctl.runtime.out_of_memory import work
from rlctl.runtime.phases import beat, phase
from rlctl.runtime.records import Boot, BuildSpec, Built, Call, Hello, RankPlace
from rlctl.runtime.transfer import Whereabouts
from rlctl.runtime.weights import Inlet, Outlet, Received, Sent, receive, send
from rlctl.sync import SyncReport, sync_weights
from rlctl.topology import resolve

Emit = Callable[[Any], None]


class Worker:
    """The engines of one rank. Every public method that a controller calls declares its dispatch.

    Args:
        boot: this rank's place in its group.
        plugins: loaded in this process.
        notice: told of aliases and left-out wrappers; rank 0's only, they are the same everywhere.
    """

    def __init__(self, boot: Boot, plugins: PluginSet, notice: Callable[[str], None] | None = None) -> None:
        self.boot = boot
        self.plugins = plugins
        self.device = Device(boot.device, boot.vendor)
        extensions.shield()
        self.engines: dict[str, Engine] = {}
        self._notice = notice if boot.rank == 0 and notice is not None else lambda text: None
        self._emit: Emit = lambda value: None
        self._outlets: dict[str, Outlet] = {}
        self._inlets: dict[str, Inlet] = {}
        self._links = Links(boot, plugins)
        if boot.num_threads is not None:
            import torch

            torch.set_num_threads(boot.num_threads)

    def run(self, call: Call, emit: Emit) -> Any:
        """Run one call. ``emit`` carries what it says before it ends.

        Of an nd-compute method only the collector of a replica answers: what the others found is the same, and need not
        travel.
        """
        mode = dispatch_of(type(self), call.method)
        self._emit = emit
        with work(call.method):
            value = getattr(self, call.method)(*call.args, **call.kwargs)
        return value if mode is not Dispatch.ND_COMPUTE or self._collects(call.args[0]) else None

    def _collects(self, role: str) -> bool:
        mesh = self.engines[role].mesh
        assert mesh is not None, "it was built"
        return mesh.is_collect

    # ---- life -------------------------------------------------------------------------------------------------
    @dispatch(Dispatch.ONE_TO_ALL)
    def hello(self) -> Hello:
        """Who and where this rank is."""
        import torch

        versions = {"torch": str(torch.__version__)}
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions["transformers"] = metadata.version("transformers")
        return Hello(self.boot.rank, socket.gethostname(), os.getpid(), platform.python_version(), versions)

    @dispatch(Dispatch.ONE_TO_ALL)
    def build(self, spec: BuildSpec) -> Built:
        """Build one engine; the process group of this rank's group comes first.

        Raises:
            RlctlError: the backend does not answer here, or refuses the model or topology.
        """
        settings = {**spec.engine, "device": self.device.type}
        with phase("init"):
            self._join()
            engine = self._create(spec, settings)
            topology = resolve(self.boot.world_size, spec.axes)
            optimizer = None if spec.optimizer is None else dict(spec.optimizer)
            model = {**spec.model, "model_type": spec.model_type}
            info = engine.build(topology, settings, model, optimizer, forward_only=optimizer is None)
        assert spec.role not in self.engines, f"two engines called {spec.role!r}"
        self.engines[spec.role] = engine
        assert engine.mesh is not None, "it was just built"
        return Built(_place(self.boot.rank, engine.mesh), info)

    def _join(self) -> None:
        """Meet the other ranks of the group."""
        collectives.join(self.boot, self.device)

    def _create(self, spec: BuildSpec, settings: Mapping[str, Any]) -> Engine:
        """The engine of ``spec``, not built yet."""
        kind = BackendKind(spec.kind)
        model_type = ModelType(spec.model_type)
        record = registry.resolve_backend(
            self.plugins, spec.backend, kind, model_type, self.device.type, self.device.vendor, notice=self._notice
        )
        return registry.create_engine(self.plugins, record, role=spec.role, settings=settings)

    @dispatch(Dispatch.ONE_TO_ALL)
    def drop(self, role: str) -> None:
        """Shut one engine down."""
        self._links.drop(role)
        engine = self.engines.pop(role, None)
        if engine is not None:
            engine.shutdown()

    def shutdown(self) -> None:
        """Shut every engine down and leave the process group."""
        self._links.close()
        for role in list(self.engines):
            self.drop(role)
        collectives.leave(self.boot)

    @dispatch(Dispatch.ONE_TO_ALL)
    def memory(self) -> dict[str, float]:
        """Peak memory so far, in GiB: of the process, and of the device where it has memory of its own."""
        metrics = {"perf/max_rss_gb": devices.peak_rss_gb()}
        if self.device.type != "cpu":
            metrics["perf/max_memory_allocated_gb"] = devices.max_memory_allocated_gb(self.device)
        return metrics

    # ---- training engines -------------------------------------------------------------------------------------
    @dispatch(Dispatch.ND_COMPUTE)
    def train_batch(
        self,
        role: str,
        batch: PackedBatch,
        loss_fn: LossFn,
        plan: MicroBatchPlan,
        agg_mode: LossAggMode | str,
        norm_length: int | None,
    ) -> TrainOutput:
        """One optimizer step on this replica's rows; see :meth:`rlctl.engine.Engine.train_batch`."""
        beat(rows=batch.num_rows, tokens=batch.num_items)
        return self.engines[role].train_batch(batch, loss_fn, plan, agg_mode, norm_length)

    @dispatch(Dispatch.ND_COMPUTE)
    def infer_batch(
        self, role: str, batch: PackedBatch, plan: MicroBatchPlan, want: tuple[str, ...], base: bool = False
    ) -> dict[str, Any]:
        """Score this replica's rows; see :meth:`rlctl.engine.Engine.infer_batch`."""
        beat(rows=batch.num_rows, tokens=batch.num_items)
        return self.engines[role].infer_batch(batch, plan, want, base=base)

    @dispatch(Dispatch.ND_COMPUTE)
    def eval_loss(
        self,
        role: str,
        batch: PackedBatch,
        loss_fn: LossFn,
        plan: MicroBatchPlan,
        agg_mode: LossAggMode | str,
        norm_length: int | None,
    ) -> tuple[float, dict[str, float]]:
        """The loss over all replicas; see :meth:`rlctl.engine.Engine.eval_loss`."""
        beat(rows=batch.num_rows, tokens=batch.num_items)
        return self.engines[role].eval_loss(batch, loss_fn, plan, agg_mode, norm_length)

    @dispatch(Dispatch.ONE_TO_ALL)
    def move(self, role: str, device: str, parts: tuple[str, ...]) -> None:
        """See :meth:`rlctl.engine.Engine.move`."""
        self.engines[role].move(device, *parts)

    # ---- rollout engines --------------------------------------------------------------------------------------
    @dispatch(Dispatch.ND_COMPUTE)
    def generate(self, role: str, request: GenerateRequest, progress: bool) -> list[Completion]:
        """Sample this replica's prompts; with ``progress`` each finished completion is an event, the number 1.

        A replica without prompts calls its engine too: with sharded weights all ranks gather them together.
        """
        beat(prompts=len(request.prompts))
        tells = progress and self._collects(role)

        def done(completion: Completion) -> None:
            beat()
            if tells:
                self._emit(1)

        return self.engines[role].generate(request, done)

    @dispatch(Dispatch.ND_COMPUTE)
    def score(self, role: str, request: ScoreRequest) -> list[TokenScores]:
        """See :meth:`rlctl.engine.Engine.score`."""
        return self.engines[role].score(request)

    @dispatch(Dispatch.ONE_TO_ALL)
    def release(self, role: str, parts: tuple[str, ...]) -> bool:
        """See :meth:`rlctl.engine.Engine.release`."""
        return self.engines[role].release(*parts)

    @dispatch(Dispatch.ONE_TO_ALL)
    def resume(self, role: str, parts: tuple[str, ...]) -> bool:
        """See :meth:`rlctl.engine.Engine.resume`."""
        return self.engines[role].resume(*parts)

    # ---- weights ----------------------------------------------------------------------------------------------
    @dispatch(Dispatch.ONE_TO_ALL)
    def sync(self, source: str, target: str, version: int, share: bool, verify: bool, dtype: str | None) -> SyncReport:
        """Weights between two engines of this rank; every rank takes part in the export."""
        return sync_weights(
            self.engines[source], self.engines[target], version, share=share, verify=verify, dtype=dtype
        )

    @dispatch(Dispatch.ONE_TO_ALL)
    def whereabouts(self, role: str) -> Whereabouts:
        """Where this rank's weights of ``role`` are, and the links that it knows."""
        return self._links.whereabouts(self._device_of(role))

    @dispatch(Dispatch.RANK_ZERO)
    def meeting_place(self, loopback: bool) -> str:
        """Where rank 0 will wait for the ranks of another pool."""
        return self._links.meeting_place(loopback=loopback)

    @dispatch(Dispatch.ONE_TO_ALL)
    def send_weights(
        self, role: str, plan: LinkPlan, number: int, version: int, dtype: str | None, verify: bool
    ) -> Sent:
        """Send the weights of ``role`` over a link: every rank takes part in the export, rank 0 sends."""
        link = self._links.get(role, plan, 0, self._device_of(role)) if self.boot.rank == 0 else None
        return send(self.engines[role], link, version=version, number=number, dtype=dtype, verify=verify)

    @dispatch(Dispatch.ONE_TO_ALL)
    def receive_weights(self, role: str, plan: LinkPlan, number: int, version: int) -> Received:
        """Take the weights of ``role`` from a link."""
        link = self._links.get(role, plan, 1 + self.boot.rank, self._device_of(role))
        return receive(self.engines[role], link, version=version, number=number)

    def _device_of(self, role: str) -> str:
        mesh = self.engines[role].mesh
        assert mesh is not None, "it was built"
        return mesh.device

    @dispatch(Dispatch.ONE_TO_ALL)
    def export_open(self, role: str, dtype: str | None, verify: bool) -> None:
        """Begin to send the weights of ``role`` in buckets (see :mod:`rlctl.runtime.weights`)."""
        self._outlets[role] = Outlet(self.engines[role].export_weights(dtype), send=self.boot.rank == 0, verify=verify)

    @dispatch(Dispatch.ONE_TO_ALL)
    def export_next(self, role: str, max_bytes: int) -> Mapping[str, Any]:
        """The next bucket from rank 0, an empty one from the others, which take part; empty at the end."""
        return self._outlets[role].next_bucket(max_bytes)

    @dispatch(Dispatch.ONE_TO_ALL)
    def export_close(self, role: str) -> dict[str, str]:
        """End the export; name -> fingerprint of what was sent (rank 0)."""
        return self._outlets.pop(role).close()

    @dispatch(Dispatch.ONE_TO_ALL)
    def load_open(self, role: str, version: int) -> None:
        """Begin to take weights for ``role`` in buckets."""
        self._inlets[role] = Inlet(self.engines[role], version)

    @dispatch(Dispatch.ONE_TO_ALL)
    def load_next(self, role: str, bucket: Mapping[str, Any]) -> None:
        """Take one bucket."""
        self._inlets[role].put(bucket)

    @dispatch(Dispatch.ONE_TO_ALL)
    def load_close(self, role: str) -> dict[str, Any]:
        """No more buckets; the engine's answer (see ``rlctl_load_weights``)."""
        return self._inlets.pop(role).close()

    @dispatch(Dispatch.ONE_TO_ALL)
    def fingerprint(self, role: str, names: tuple[str, ...]) -> dict[str, str]:
        """Fingerprints of what a rollout engine serves."""
        return self.engines[role].weight_fingerprint(names)

    @dispatch(Dispatch.ONE_TO_ALL)
    def export_directory(self, role: str, model: ModelConfig, dest: Path, dtype: str | None) -> None:
        """Write a Hugging Face directory: every rank takes part in the export, rank 0 writes.

        Raises:
            RlctlError: the export does not cover the model, or the directory cannot be written; on rank 0.
        """
        engine = self.engines[role]
        weights = engine.export_weights(dtype)
        if self.boot.rank != 0:
            for _ in weights:
                beat()
            return
        from rlctl.data.tokenizer import load_tokenizer
        from rlctl.export import write_hf_directory

        tokenizer = load_tokenizer(model)
        write_hf_directory(weights, model=model, tokenizer=tokenizer, dest=dest, dtype=dtype, head=engine.model_type)

    @dispatch(Dispatch.ONE_TO_ALL)
    def export_adapters(self, role: str, dest: Path) -> bool:
        """See :meth:`rlctl.engine.Engine.export_adapters`."""
        return self.engines[role].export_adapters(dest)

    # ---- state ------------------------------------------------------------------------------------------------
    @dispatch(Dispatch.ONE_TO_ALL)
    def save_state(self, role: str, path: Path) -> None:
        """See :meth:`rlctl.engine.Engine.save_state`."""
        with phase("saving"):
            self.engines[role].save_state(path)

    @dispatch(Dispatch.ONE_TO_ALL)
    def load_state(self, role: str, path: Path) -> None:
        """See :meth:`rlctl.engine.Engine.load_state`."""
        with phase("loading"):
            self.engines[role].load_state(path)


def _place(rank: int, mesh: MeshInfo) -> RankPlace:
    """``rank`` is the group's own number of this process: an engine may count its ranks in another order."""
    return RankPlace(
        rank,
        mesh.dp_rank,
        mesh.dp_size,
        mesh.is_collect,
        dict(mesh.coordinates),
        mesh.device,
        mesh.token_multiplier,
        mesh.count_multiple,
    )
