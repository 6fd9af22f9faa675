"""A training engine for simulated ranks: a tiny model in plain torch, data parallel over threads, a make-believe tp axis.

Every rank of a replica computes the whole model on the same rows, which it checks with its peers; gradients and numbers are
summed over the replicas, in one order. So losses, norms and updates are real, and equal those of one rank. It keeps the
contract (see ``rlctl.testing.TrainConformance``) and says loudly when it is used against it.

Shapes: V vocabulary, D hidden, T tokens of a row, N of a batch.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlctl.batch import PackedBatch
from rlctl.engine import Engine, EngineInfo, MeshInfo, MicroOutput, StepOutput
from rlctl.errors import CheckpointError, EngineError
from rlctl.hookspecs import hookimpl
from rlctl.logits import LossFn
from rlctl.readers import DenseReader
from rlctl.records import BackendKind
from rlctl.runtime.records import Boot, BuildSpec
from rlctl.schedule import lr_factor
from rlctl.testing.fake_transport import Fabric
from rlctl.topology import Topology

Place = Callable[[Topology, int], MeshInfo]


class TinyLM(nn.Module):
    """Embedding beside the mean of the row so far, one hidden layer, a head tied to the embedding."""

    def __init__(self, vocab: int = 16, hidden: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.mix = nn.Linear(2 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` -> logits ``[T, V]``; row t predicts token t + 1."""
        x = self.embed(ids)
        mean = x.cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
        return self.head(self.drop(self.norm(torch.tanh(self.mix(torch.cat([x, mean], dim=-1))))))


_SEEDING = threading.Lock()
"""torch's generator is one for all threads: ranks draw their weights one after the other."""


def make_tiny(section: Mapping[str, Any]) -> TinyLM:
    """The model of a ``model`` section (``config``: vocab, hidden, dropout), its weights from the section's seed alone."""
    with _SEEDING, torch.random.fork_rng():
        torch.manual_seed(section["seed"])
        return TinyLM(**{k: v for k, v in section["config"].items() if k != "model_type"})


def by_topology(topology: Topology, rank: int) -> MeshInfo:
    """The place that the topology itself gives a rank."""
    return MeshInfo(
        rank,
        topology.world_size,
        topology.dp_rank(rank),
        topology.dp_size,
        topology.is_collector(rank),
        {k: v for k, v in topology.coordinates(rank).items() if getattr(topology, k) > 1},
        token_multiplier=topology.usp * topology.cp,
    )


class FakeTrain:
    """Provider of the training hooks.

    Args:
        fabric, rank: of the simulated group; the defaults are one rank alone.
        place: where a rank is in the mesh.
    """

    def __init__(self, fabric: Fabric | None = None, rank: int = 0, place: Place = by_topology) -> None:
        self._fabric = fabric or Fabric()
        self._rank = rank
        self._place = place
        self.mesh = MeshInfo()
        self.model = TinyLM()
        self.optimizer: torch.optim.Optimizer | None = None
        self.steps = 0
        self._section: Mapping[str, Any] = {}
        self._replica: tuple[int, ...] = (rank,)
        self._peers: tuple[int, ...] = (rank,)

    # ---- building ---------------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_build_mesh(self, topology: Topology, settings: Mapping[str, Any]) -> MeshInfo:
        self.mesh = self._place(topology, self._rank)
        everyone = range(topology.world_size)
        dp_ranks = self._fabric.gather(everyone, self._rank, self.mesh.dp_rank, "mesh")
        replicas: dict[int, list[int]] = {}
        for rank, dp_rank in enumerate(dp_ranks):
            replicas.setdefault(dp_rank, []).append(rank)
        self._replica = tuple(replicas[self.mesh.dp_rank])
        # The same place in each replica; a lopsided mesh is refused by who builds the group, not here.
        at = self._replica.index(self._rank)
        self._peers = tuple(members[at] for _, members in sorted(replicas.items()) if at < len(members))
        return self.mesh

    @hookimpl
    def rlctl_engine_init(
        self, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None, forward_only: bool
    ) -> EngineInfo:
        self.model = make_tiny(model)
        if not forward_only:
            assert optimizer is not None
            self._section = optimizer
            if optimizer.get("name") == "sgd":
                self.optimizer = torch.optim.SGD(self.model.parameters(), optimizer["lr"])
            else:
                self.optimizer = torch.optim.AdamW(
                    self.model.parameters(),
                    lr=optimizer["lr"],
                    betas=optimizer["betas"],
                    eps=optimizer["eps"],
                    weight_decay=optimizer["weight_decay"],
                )
        return EngineInfo(sum(p.numel() for p in self.model.parameters()), self.model.embed.num_embeddings, "fake")

    # ---- training ---------------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_forward_backward(
        self, micro_batches: Sequence[PackedBatch], loss_fn: LossFn, forward_only: bool
    ) -> list[MicroOutput]:
        outputs = []
        for i, batch in enumerate(micro_batches):
            self._same_rows(batch, i)
            # Sharded weights would be gathered here: every rank takes part, for padding too.
            self._fabric.gather(self._peers, self._rank, None, f"micro-batch {i} of {len(micro_batches)}")
            try:
                with torch.set_grad_enabled(not forward_only):
                    out = loss_fn(DenseReader(self._logits(batch), batch), batch)
                    if not forward_only:
                        out.loss.backward()
            except BaseException:
                if not forward_only:
                    self.model.zero_grad()
                raise
            sums, maxes = ({k: float(v) for k, v in d.items()} for d in (out.sums, out.maxes))
            outputs.append(MicroOutput(out.loss.item(), sums, maxes, out.items))
        return outputs

    def _logits(self, batch: PackedBatch) -> torch.Tensor:
        return torch.cat([self.model(ids) for ids in batch.split_items(batch.items["input_ids"])])

    def _same_rows(self, batch: PackedBatch, index: int) -> None:
        """Ranks that hold parts of one model must be given the same rows."""
        digest = hashlib.sha256(batch.cu_seqlens.numpy().tobytes())
        for name, value in sorted(batch.items.items()):
            digest.update(name.encode() + value.contiguous().numpy().tobytes())
        found = self._fabric.gather(self._replica, self._rank, digest.hexdigest(), f"rows of micro-batch {index}")
        if len(set(found)) != 1:
            raise EngineError(
                f"the ranks of dp rank {self.mesh.dp_rank} were given different rows",
                found=f"ranks {', '.join(map(str, self._replica))} in micro-batch {index}",
                wanted="the same rows on every rank of one replica",
            )

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput:
        if self.optimizer is None:
            raise EngineError("this engine was built without an optimizer", next="build it with forward_only=False")
        lr = self._section["lr"] * lr_factor(self.steps, self._section)
        norm = self._reduce_and_clip()
        skipped = not math.isfinite(norm)
        if not skipped:
            self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.step()
            self.steps += 1
        self.optimizer.zero_grad()
        return StepOutput(norm, lr, skipped)

    def _reduce_and_clip(self) -> float:
        parameters = list(self.model.parameters())
        assert all(p.grad is not None for p in parameters), "a backward pass comes first"
        mine = [p.grad.clone() for p in parameters if p.grad is not None]
        everyone = self._fabric.gather(self._peers, self._rank, mine, "gradients")
        for i, parameter in enumerate(parameters):
            # One order on every rank: they stay equal to the bit.
            parameter.grad = torch.stack([grads[i] for grads in everyone]).sum(0)
        return float(nn.utils.clip_grad_norm_(parameters, self._section["clip_grad"] or math.inf))

    @hookimpl
    def rlctl_reduce(self, values: Sequence[float], op: str) -> list[float]:
        found = self._fabric.gather(self._peers, self._rank, list(values), f"reduce {op} of {len(values)} numbers")
        join: Callable[[tuple[float, ...]], float] = {"sum": math.fsum, "max": max, "min": min}[op]
        return [join(column) for column in zip(*found, strict=True)]

    @hookimpl
    def rlctl_set_mode(self, train: bool) -> bool:
        self.model.train(train)
        return True

    @hookimpl
    def rlctl_move(self, device: str, parts: Sequence[str]) -> bool:
        return True

    # ---- weights and state ------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_export_weights(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.state_dict().items():
            yield name, tensor if dtype is None else tensor.to(getattr(torch, dtype))

    @hookimpl
    def rlctl_save_state(self, path: Path) -> bool:
        assert self.optimizer is not None
        if self._rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.steps}
            torch.save({**state, "rng": torch.get_rng_state()}, path / "state.pt")
        self._fabric.gather(range(self.mesh.world_size), self._rank, None, "saved")
        return True

    @hookimpl
    def rlctl_load_state(self, path: Path) -> bool:
        if not (path / "state.pt").is_file():
            raise CheckpointError("no state of this engine here", found=path, wanted="state.pt")
        state = torch.load(path / "state.pt")
        self.model.load_state_dict(state["model"])
        assert self.optimizer is not None
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        torch.set_rng_state(state["rng"])
        return True


def fake_train(
    place: Place = by_topology, kind: type[FakeTrain] = FakeTrain
) -> Callable[[BuildSpec, Boot, Fabric], Engine]:
    """For :class:`rlctl.testing.fake_transport.FakeTransport`: a :class:`FakeTrain` on each rank."""

    def make(spec: BuildSpec, boot: Boot, fabric: Fabric) -> Engine:
        return Engine(kind(fabric, boot.rank, place), BackendKind.TRAIN, spec.backend)

    return make
