"""An engine as the controller sees it: the facade's methods, over every rank of a worker group.

The controller holds whole batches. Weights of items come from the whole mini-batch before it is split, so ranks only add
up; what every rank must agree on (loss, grad norm) is compared.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from rlctl.balance import seqlen_metrics, split_rows
from rlctl.batch import GROUP, PackedBatch, padding_like
from rlctl.config.schema import ModelConfig
from rlctl.engine import EngineInfo, MeshInfo, TrainOutput
from rlctl.errors import EngineError, GuardError
from rlctl.first_items import check_first_items
from rlctl.generation import Completion, GenerateRequest, ScoreRequest, TokenScores
from rlctl.logits import LossFn
from rlctl.microbatch import MicroBatchPlan, check_lengths
from rlctl.normalizer import item_weights
from rlctl.normalizer_modes import LossAggMode
from rlctl.runtime.carriage import Carriage, Transfer
from rlctl.runtime.dispatch import restore_order
from rlctl.runtime.group import WorkerGroup
from rlctl.runtime.records import BuildSpec, RankPlace
from rlctl.sync import SyncReport

_AGREE = 1e-6
"""Relative difference between replicas' reports of one reduced number."""


class RemoteEngine:
    """One engine of a worker group. Built by :meth:`build`.

    Args:
        balance: split rows over dp ranks by tokens; else in order.
    """

    def __init__(
        self,
        group: WorkerGroup,
        spec: BuildSpec,
        places: Sequence[RankPlace],
        info: EngineInfo,
        *,
        balance: bool = True,
    ) -> None:
        self.group = group
        self.role = spec.role
        self.name = spec.backend
        self.model_type = spec.model_type
        self.axes = dict(spec.axes)
        self.places = tuple(places)
        self.info = info
        self.dp_size = places[0].dp_size
        self.mesh: MeshInfo | None = MeshInfo(world_size=group.world_size, device=places[0].device)
        self._balance = balance
        self._carriages: dict[tuple[str, str, Transfer], Carriage] = {}
        self._last_split: tuple[list[int], list[Any] | None, list[list[int]]] | None = None

    @classmethod
    def build(cls, group: WorkerGroup, spec: BuildSpec, *, balance: bool = True) -> RemoteEngine:
        """Build ``spec`` on every rank of ``group``."""
        built = group.build(spec)
        return cls(group, spec, [b.place for b in built], built[0].info, balance=balance)

    # ---- training ---------------------------------------------------------------------------------------------
    def reduce(self, values: Sequence[float], op: str = "sum") -> list[float]:
        """The controller has whole batches already: identity. It stands in where an engine's ``reduce`` is asked for."""
        return list(values)

    def train_batch(
        self,
        batch: PackedBatch,
        loss_fn: LossFn,
        plan: MicroBatchPlan,
        agg_mode: LossAggMode | str = LossAggMode.TOKEN_MEAN,
        norm_length: int | None = None,
    ) -> TrainOutput:
        """One optimizer step on one whole mini-batch; see :meth:`rlctl.engine.Engine.train_batch`.

        Returns:
            The numbers of the whole mini-batch; ``num_padding`` is summed over the replicas.

        Raises:
            BatchError: a row is over the token bound (its index in ``batch`` is named), or scores its first token.
            GuardError: the replicas report different numbers.
        """
        batch = self._ready(batch, plan, agg_mode, norm_length)
        parts, _ = self._split(batch)
        arguments = [(self.role, part, loss_fn, plan, agg_mode, norm_length) for part in parts]
        outputs: list[TrainOutput] = self.group.call_nd(
            "train_batch", self.places, arguments, doing=self._doing("train_batch", batch)
        )
        self._agree("loss", [o.loss for o in outputs])
        self._agree("grad norm", [o.step.grad_norm for o in outputs])
        self._agree("number of micro-batches", [float(o.num_micro_batches) for o in outputs])
        return replace(outputs[0], num_padding=sum(o.num_padding for o in outputs))

    def eval_loss(
        self,
        batch: PackedBatch,
        loss_fn: LossFn,
        plan: MicroBatchPlan,
        agg_mode: LossAggMode | str = LossAggMode.TOKEN_MEAN,
        norm_length: int | None = None,
    ) -> tuple[float, dict[str, float]]:
        """The loss of one mini-batch without gradients: (loss, sums)."""
        batch = self._ready(batch, plan, agg_mode, norm_length)
        parts, _ = self._split(batch)
        arguments = [(self.role, part, loss_fn, plan, agg_mode, norm_length) for part in parts]
        outputs = self.group.call_nd("eval_loss", self.places, arguments, doing=self._doing("eval_loss", batch))
        self._agree("loss", [loss for loss, _ in outputs])
        return outputs[0]

    def infer_batch(
        self, batch: PackedBatch, plan: MicroBatchPlan, want: Sequence[str] = ("log_probs",)
    ) -> dict[str, torch.Tensor]:
        """Score known sequences: ``{name: [N, ...] float32}`` in the order of ``batch``.

        Raises:
            BatchError: as :meth:`train_batch`.
            EngineError: a replica answered for another number of tokens than it was given.
        """
        return self._infer(batch, plan, want)

    def infer_base(
        self, batch: PackedBatch, plan: MicroBatchPlan, want: Sequence[str] = ("log_probs",)
    ) -> dict[str, torch.Tensor]:
        """As :meth:`infer_batch`, by the model without its adapters: the one that training started from.

        Raises:
            EngineError: it has none.
        """
        return self._infer(batch, plan, want, True)

    def _infer(
        self, batch: PackedBatch, plan: MicroBatchPlan, want: Sequence[str], *base: bool
    ) -> dict[str, torch.Tensor]:
        self._check(batch, plan)
        parts, indices = self._split(batch)
        arguments = [(self.role, part, plan, tuple(want), *base) for part in parts]
        outputs = self.group.call_nd("infer_batch", self.places, arguments, doing=self._doing("infer_batch", batch))
        for dp_rank, (part, out) in enumerate(zip(parts, outputs, strict=True)):
            self._check_scores(dp_rank, part.num_items, want, out)
        if self.dp_size == 1:
            return {name: outputs[0][name] for name in want}
        return {name: batch.merge(indices, [out[name] for out in outputs]) for name in want}

    def _check_scores(self, dp_rank: int, num_items: int, want: Sequence[str], out: Mapping[str, torch.Tensor]) -> None:
        for name in want:
            if name not in out or out[name].shape[:1] != (num_items,):
                raise EngineError(
                    f"dp rank {dp_rank} of {self.role} scored another number of tokens than it was given",
                    found=f"{name} of shape {tuple(out[name].shape)}" if name in out else ", ".join(out) or "nothing",
                    wanted=f"{name} of shape {(num_items, *(out[name].shape[1:] if name in out else ()))}",
                )

    def seqlen_metrics(self, batch: PackedBatch) -> dict[str, float]:
        """``global_seqlen/*`` of a batch as it would be split; empty on one replica."""
        if self.dp_size == 1:
            return {}
        return seqlen_metrics(batch.lengths, self._rows_by_part(batch))

    def _ready(
        self, batch: PackedBatch, plan: MicroBatchPlan, agg_mode: LossAggMode | str, norm_length: int | None
    ) -> PackedBatch:
        self._check(batch, plan)
        if "item_weight" in batch.items:
            return batch
        return batch.with_items(item_weight=item_weights(batch, agg_mode, norm_length=norm_length))

    def _check(self, batch: PackedBatch, plan: MicroBatchPlan) -> None:
        """Refuse bad rows here, by their index in the whole batch, before any rank starts."""
        if plan.max_tokens is not None:
            plan = MicroBatchPlan(max_tokens=plan.max_tokens * self.places[0].token_multiplier)
        check_lengths(batch.lengths, plan)
        check_first_items(batch)

    def _split(self, batch: PackedBatch) -> tuple[list[PackedBatch], list[list[int]]]:
        """Rows by dp rank, and their indices; a replica without rows gets zero-weight padding."""
        if self.dp_size == 1:
            return [batch], [list(range(batch.num_rows))]
        indices = self._rows_by_part(batch)
        if batch.is_padding:
            return [batch] * self.dp_size, indices
        filled = iter(batch.parts([rows for rows in indices if rows]))
        padding = None if all(indices) else padding_like(batch)
        return [next(filled) if rows else cast(PackedBatch, padding) for rows in indices], indices

    def _rows_by_part(self, batch: PackedBatch) -> list[list[int]]:
        """The split of a batch; of one that is asked for again (to score, then to train) the same list."""
        lengths = batch.lengths
        groups = batch.rows[GROUP].tolist() if GROUP in batch.rows else None
        if self._last_split is None or self._last_split[:2] != (lengths, groups):
            indices = split_rows(lengths, self.dp_size, balance=self._balance, groups=groups)
            self._last_split = (lengths, groups, indices)
        return self._last_split[2]

    def _agree(self, what: str, values: Sequence[float]) -> None:
        reference = values[0]
        for dp_rank, value in enumerate(values):
            same = value == reference or (math.isnan(value) and math.isnan(reference))
            if not same and not math.isclose(value, reference, rel_tol=_AGREE, abs_tol=1e-12):
                raise GuardError(
                    f"the replicas of {self.role} report different values of the {what}",
                    found=f"{reference!r} on dp rank 0, {value!r} on dp rank {dp_rank}",
                    wanted="one value: it is reduced over all of them",
                    next=f"rlctl verify --backend {self.name} with this topology shows what differs",
                )

    def _doing(self, method: str, batch: PackedBatch) -> str:
        return (
            f"{method} of {self.role} with {batch.num_rows} rows and {batch.num_items} tokens over {self.dp_size} "
            f"data parallel {'rank' if self.dp_size == 1 else 'ranks'}"
        )

    # ---- rollout ----------------------------------------------------------------------------------------------
    def generate(self, request: GenerateRequest, on_progress: Callable[[int], None] | None = None) -> list[Completion]:
        """Sample completions, prompt-major; see ``rlctl_generate``. A row samples the same whatever replica it is on.

        Args:
            on_progress: told how many completions have finished since it was told last.
        """
        if request.params.seed is None:
            # One for all: ranks of one replica would else sample apart.
            request = replace(request, params=replace(request.params, seed=secrets.randbits(62)))
        n = request.params.n
        pieces = split_rows([1] * len(request.prompts), self.dp_size, balance=False)
        arguments = [
            (self.role, self._piece(request, rows[0] if rows else 0, len(rows)), on_progress is not None)
            for rows in pieces
        ]
        doing = f"generate of {self.role}, {len(request.prompts)} prompts x {n} samples over {self.dp_size} replicas"
        answers: list[list[Completion]] = self.group.call_nd(
            "generate", self.places, arguments, doing=doing, on_event=on_progress
        )
        out: list[Completion] = []
        for rows, completions in zip(pieces, answers, strict=True):
            if len(completions) != len(rows) * n:
                raise EngineError(
                    f"a replica of {self.role} returned another number of completions than it was asked for",
                    found=len(completions),
                    wanted=f"{n} for each of {len(rows)} prompts",
                )
            first = rows[0] if rows else 0
            out += [replace(c, prompt_index=c.prompt_index + first) if first else c for c in completions]
        return out

    def _piece(self, request: GenerateRequest, first: int, count: int) -> GenerateRequest:
        params = request.params
        offset = params.row_offset + first * params.n
        return GenerateRequest(request.prompts[first : first + count], replace(params, row_offset=offset))

    def score(self, request: ScoreRequest) -> list[TokenScores]:
        """Log-probs (and top-k) of given tokens under the engine's own weights."""
        lengths = [len(s) for s in request.sequences]
        pieces = split_rows(lengths, self.dp_size, balance=self._balance)
        arguments = [(self.role, replace(request, sequences=[request.sequences[i] for i in rows])) for rows in pieces]
        doing = f"score of {self.role}, {len(lengths)} sequences"
        answers = self.group.call_nd("score", self.places, arguments, doing=doing)
        return restore_order(pieces, answers, len(lengths))

    def release(self, *parts: str) -> bool:
        return all(self.group.call("release", self.role, parts))

    def resume(self, *parts: str) -> bool:
        return all(self.group.call("resume", self.role, parts))

    # ---- weights and state ------------------------------------------------------------------------------------
    def sync_to(
        self,
        rollout: RemoteEngine,
        version: int,
        *,
        share: bool,
        verify: bool,
        dtype: str | None,
        transfer: Transfer | None = None,
    ) -> SyncReport:
        """Make ``rollout`` serve this engine's weights.

        In one pool each rank hands over to its own rollout engine; between pools the weights travel in buckets.

        Args:
            transfer: how, between pools.

        Raises:
            GuardError: a name was exported twice or not loaded, or a fingerprint differs.
        """
        if rollout.group is self.group:
            reports: list[SyncReport] = self.group.call("sync", self.role, rollout.role, version, share, verify, dtype)
            return reports[0]
        transfer = transfer or Transfer()
        key = (rollout.group.name, rollout.role, transfer)
        if key not in self._carriages:
            self._carriages[key] = Carriage(self, rollout, transfer)
        return self._carriages[key].sync(version, verify=verify, dtype=dtype)

    def export_directory(self, dest: Path, model: ModelConfig, dtype: str | None = None) -> None:
        """Write the weights as a Hugging Face directory; rank 0 writes, so ``dest`` must be a place that it sees."""
        self.group.call("export_directory", self.role, model, dest, dtype)

    def export_adapters(self, dest: Path) -> bool:
        """Write the adapters alone, as peft reads them; False where the model has none."""
        return all(self.group.call("export_adapters", self.role, dest))

    def save_state(self, path: Path) -> None:
        """Every rank writes its part below ``path``, which all ranks must see."""
        self.group.call("save_state", self.role, path)

    def load_state(self, path: Path) -> None:
        self.group.call("load_state", self.role, path)

    def move(self, device: str, *parts: str) -> None:
        self.group.call("move", self.role, device, parts)

    def memory(self) -> dict[str, float]:
        """Peak memory in GiB: the largest over the ranks."""
        found: list[Mapping[str, float]] = self.group.call("memory")
        return {name: max(m[name] for m in found) for name in found[0]}

    def shutdown(self) -> None:
        """Shut the engine down on every rank; nothing to do where the group has ended."""
        if not self.group.closed:
            self.group.call("drop", self.role)
